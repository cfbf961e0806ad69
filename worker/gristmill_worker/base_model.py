"""The frozen base model of a worker: what every path of running it offers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from gristmill_worker.adapter import Adapter, Layout
from gristmill_worker.facts import ModelFacts
from gristmill_worker.head import Head
from gristmill_worker.lora import LayerGradient
from gristmill_worker.runs import Run


class Cache(Protocol):
    """Keys and values of the tokens that a batch of rows has behind it."""

    def repeat(self, rows: int) -> None:
        """One row becomes `rows` equal ones."""

    def select(self, at: Tensor) -> None:
        """Keep these rows, in this order."""

    def copy(self) -> "Cache":
        """Another one that grows on its own."""


class BaseModel(ABC):
    """Weights never change. `selected` names the adapter (None: the base alone) of what runs inside."""

    path: ClassVar[Literal["fast", "generic"]]
    packed = False
    """Whether several sequences can run as one row, each as if it were alone."""
    transposed = False
    """Whether the linear layers keep their weights as (in, out)."""
    mode = ""
    """How its kernels run, where that may change the last bits."""

    def __init__(
        self,
        *,
        folder: Path,
        facts: ModelFacts,
        tokenizer: Any,  # Any: transformers is not typed
        head: Head,
        names: tuple[str, ...],
        shapes: tuple[tuple[int, int], ...],
        why: str,
    ) -> None:
        self.folder = folder
        self.facts = facts
        self.tokenizer = tokenizer
        self.head = head
        self.names = names
        self.shapes = shapes
        self.why = why
        """Why this path, in words."""

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def layout(self, rank: int) -> Layout:
        return Layout(names=self.names, shapes=self.shapes, rank=rank)

    @abstractmethod
    @contextmanager
    def selected(
        self, adapter: Adapter | None, gradient: list[LayerGradient] | None = None
    ) -> Iterator[None]:
        """Run with this adapter; with `gradient`, a backward pass adds to it."""

    @abstractmethod
    def hidden(self, tokens: Tensor) -> Tensor:
        """(n, L) equally long sequences -> (n * L, h), behind the final norm."""

    @abstractmethod
    def hidden_packed(self, tokens: Tensor, table: tuple[Run, ...]) -> Tensor:
        """(T,) tokens of the table's segments, one after another -> (T, h)."""

    @abstractmethod
    def new_cache(self) -> Cache:
        """For one row, empty."""

    @abstractmethod
    def hidden_cached(self, tokens: Tensor, cache: Any) -> Tensor:  # Any: a Cache of its own kind
        """(B, n) new tokens behind those in `cache`, which grows -> (B, n, h)."""
