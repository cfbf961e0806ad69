"""The frozen base model of a worker: what every path of running it offers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from gristmill_worker.adapter import Adapter, Layout
from gristmill_worker.facts import ModelFacts
from gristmill_worker.head import ROWS_MIN, Head
from gristmill_worker.lora import LayerGradient
from gristmill_worker.optimizer import Spares
from gristmill_worker.runs import Run


class Cache(Protocol):
    """Keys and values of the tokens that a batch of rows has behind it."""

    def repeat(self, rows: int) -> None:
        """One row becomes `rows` equal ones."""

    def select(self, at: Tensor) -> None:
        """Keep these rows, in this order."""

    def copy(self) -> "Cache":
        """Another one that grows on its own."""

    def release(self) -> None:
        """Nobody will need it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a decode step that share a cache and an adapter (None: the base alone); or a prompt."""

    adapter: Adapter | None
    tokens: Tensor
    """(b,) each row's newest token; of a prompt, all of them."""
    cache: Any  # Any: a Cache of the model's own kind


class Shards(Protocol):
    """The base's weights where each rank of a team holds a part: all of them have to look at once."""

    @property
    def gathered_bytes(self) -> int:
        """What is held beside the parts while a pass runs."""

    def together(self, passes: int, *, trains: bool) -> AbstractContextManager[None]:
        """All ranks enter with the same numbers, and each runs up to `passes` passes inside."""

    def settle(self) -> None:
        """End what rank 0 ran outside of `together`, whether it came to its end or not."""


class LayersKept(Protocol):
    """Decides how much of a training pass stays in memory."""

    def layers(self, table: Sequence[Run], rank: int) -> int:
        """How many layers keep what their backward pass needs; the others run again there."""


class BaseModel(ABC):
    """Weights never change. `selected` names the adapter (None: the base alone) of what runs inside."""

    path: ClassVar[Literal["fast", "generic"]]
    packed = False
    """Whether several sequences can run as one row, each as if it were alone."""
    transposed = False
    """Whether the linear layers keep their weights as (in, out)."""
    mode = ""
    """How its kernels run, where that may change the last bits."""
    block: int | None = None
    """Prompts are run in blocks of this many tokens; None = as a whole. A whole block can be kept and
    used again: the numbers of later ones are the same either way."""
    retries = False
    """Whether a decode step that failed half-way can be run again."""
    joins = False
    """Whether whole prompts of several requests gain by running in one pass."""
    invariant = False
    """Whether a row's numbers may not depend on who shares its batch. Set once, after loading."""
    keeper: LayersKept | None = None
    """None = every layer keeps all. The generic path has no other way."""
    shards: Shards | None = None
    """None = this rank holds the whole base."""

    def __init__(
        self,
        *,
        folder: Path,
        facts: ModelFacts,
        head: Head,
        names: tuple[str, ...],
        shapes: tuple[tuple[int, int], ...],
        why: str,
    ) -> None:
        self.folder = folder
        self.facts = facts
        self.head = head
        self.names = names
        self.shapes = shapes
        self.spares = Spares()
        self.why = why
        """Why this path, in words."""

    @cached_property
    def tokenizer(self) -> Any:  # Any: transformers is not typed
        """Read at its first use: training has none, and it takes longer to load than a small model."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder, local_files_only=True)

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

    @property
    @abstractmethod
    def position_bytes(self) -> int:
        """Of one token's keys and values in all layers."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, h) of a decode step -> (B, V) float32."""
        if not self.invariant:
            return self.head.decode_logits(hidden)
        tiles = [self.head.logits(rows) for rows in torch.split(hidden, ROWS_MIN)]
        return torch.cat(tiles)

    @abstractmethod
    def new_cache(self, room: int = 0) -> Cache:
        """For one row, empty. `room`: positions of its prompt, where they are known."""

    @abstractmethod
    def prefill(self, tokens: Tensor, cache: Any) -> Tensor:  # Any: a Cache of its own kind
        """(n,) next tokens of a prompt, behind those in `cache` -> (n, h). The adapter is selected."""

    def prefill_each(self, prompts: Sequence[Part]) -> Tensor:
        """Whole prompts, each with its adapter and an empty cache -> (n, h) of their last tokens."""
        found = []
        for prompt in prompts:
            with self.selected(prompt.adapter):
                found.append(self.prefill(prompt.tokens, prompt.cache)[-1:])
        return torch.cat(found)

    @abstractmethod
    def begin(self, cache: Any, rows: int) -> Cache:  # Any: a Cache of its own kind
        """The cache of `rows` continuations of a prompt that has been run."""

    @abstractmethod
    def decode(self, parts: Sequence[Part]) -> Tensor:
        """One step of all rows -> (B, h), in their order. Selects the adapters itself."""

    @abstractmethod
    def hidden_cached(self, tokens: Tensor, cache: Any) -> Tensor:  # Any: a Cache of its own kind
        """(B, n) new tokens behind those in `cache`, which grows -> (B, n, h)."""
