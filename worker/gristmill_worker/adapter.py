"""One adapter: fp32 master weights in a flat buffer, and compute copies in the base's dtype."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill_worker.lora import LayerFactors, LayerGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each layer's factors lie in a flat buffer: all A matrices, then all B matrices."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    """(out, in) of each layer."""
    rank: int

    @property
    def a_size(self) -> int:
        return sum(columns * self.rank for _, columns in self.shapes)

    @property
    def size(self) -> int:
        return self.a_size + sum(rows * self.rank for rows, _ in self.shapes)

    def views(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A (rank, in) and B (out, rank) of each layer, as views of `flat` (size,)."""
        found: list[tuple[Tensor, Tensor]] = []
        a_at, b_at = 0, self.a_size
        for rows, columns in self.shapes:
            a_end, b_end = a_at + self.rank * columns, b_at + rows * self.rank
            a = flat[a_at:a_end].view(self.rank, columns)
            found.append((a, flat[b_at:b_end].view(rows, self.rank)))
            a_at, b_at = a_end, b_end
        return found


class Adapter:
    """`weights` are the masters; call `sync` after changing them."""

    def __init__(self, layout: Layout, alpha: int, weights: Tensor, dtype: torch.dtype) -> None:
        self.layout = layout
        self.alpha = alpha
        self.weights = weights
        self.dtype = dtype
        self.version = 0
        """Of the weights: a copy of another one is old."""
        self.fused: Any = None
        """What the fast path made of some version."""  # Any: its own type
        self._compute = weights.new_empty(0, dtype=dtype)
        self._factors: list[LayerFactors] = []
        self._copied = -1

    @property
    def rank(self) -> int:
        return self.layout.rank

    @property
    def scale(self) -> float:
        return self.alpha / self.layout.rank

    def sync(self) -> None:
        """Tell that the weights changed. Copies are made again when they are asked for."""
        self.version += 1

    @property
    def factors(self) -> list[LayerFactors]:
        """Compute copies of every layer. The fast path makes its own instead."""
        if self._copied != self.version:
            if not self._factors:
                self._compute = torch.empty_like(self.weights, dtype=self.dtype)
                self._factors = [LayerFactors(a, b) for a, b in self.layout.views(self._compute)]
            split = self.layout.a_size
            self._compute[:split] = self.weights[:split]
            self._compute[split:] = self.weights[split:] * self.scale
            self._copied = self.version
        return self._factors


def fresh_weights(layout: Layout, seed: int) -> Tensor:
    """A uniform in +-1/sqrt(in) (Kaiming with a = sqrt(5), as PEFT draws it), B zero. float32, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(layout.size)
    for a, _ in layout.views(weights):
        bound = 1 / math.sqrt(a.shape[1])
        a.uniform_(-bound, bound, generator=generator)
    return weights


def make_adapter(
    layout: Layout, alpha: int, weights: Tensor, *, device: torch.device, dtype: torch.dtype
) -> Adapter:
    """Own a copy of `weights` (size,) on the device."""
    if weights.shape != (layout.size,):
        raise ValueError(f"{tuple(weights.shape)} weights for a layout of {layout.size}")
    masters = weights.to(device=device, dtype=torch.float32, copy=True)
    adapter = Adapter(layout, alpha, masters, dtype)
    adapter.sync()
    return adapter


def gradient_views(layout: Layout, flat: Tensor) -> list[LayerGradient]:
    return [LayerGradient(a, b) for a, b in layout.views(flat)]
