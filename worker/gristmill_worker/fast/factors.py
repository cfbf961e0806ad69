"""An adapter's factors as the decoder's fused layers use them.

Blocks are alike, so that a projection's factors lie equally far apart in a flat buffer: a few strided copies
make those of all blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gristmill_worker.fast.linear import Factors
from gristmill_worker.fast.weights import Fused


@dataclass(frozen=True, slots=True)
class Strided:
    """A fused layer's place in a flat buffer (all A, then all B), in all blocks at once: views."""

    a: Tensor
    """(blocks, P r, in)."""
    b: list[Tensor]
    """(blocks, out_p, r) of each projection."""


def strided(flat: Tensor, fused: Sequence[Fused], blocks: int, rank: int) -> list[Strided]:
    """Where `flat` holds each fused layer of a block."""
    a_size = blocks * rank * sum(each.columns * len(each.parts) for each in fused)
    every_a, every_b = (part.view(blocks, -1) for part in (flat[:a_size], flat[a_size:]))
    found: list[Strided] = []
    a_at = b_at = 0
    for each in fused:
        count = len(each.parts) * rank
        a = every_a[:, a_at : a_at + count * each.columns].view(blocks, count, each.columns)
        a_at += count * each.columns
        b = []
        for rows in each.parts:
            b.append(every_b[:, b_at : b_at + rows * rank].view(blocks, rows, rank))
            b_at += rows * rank
        found.append(Strided(a, b))
    return found


class Stacks:
    """The factors of all blocks, in the base's dtype; filled again in place for each version of the adapter."""

    def __init__(
        self, fused: Sequence[Fused], blocks: int, rank: int, like: Tensor, dtype: torch.dtype
    ) -> None:
        self.fused, self.blocks, self.rank = fused, blocks, rank
        self.version = -1
        """Of the adapter, when it was filled."""
        self.a = [
            like.new_empty(blocks, len(each.parts) * rank, each.columns, dtype=dtype)
            for each in fused
        ]
        # Zeros between the projections' own blocks stay.
        self.b_t = [
            like.new_zeros(blocks, len(each.parts) * rank, sum(each.parts), dtype=dtype)
            for each in fused
        ]
        self.factors = [
            Factors(a[block], b_t[block])
            for block in range(blocks)
            for a, b_t in zip(self.a, self.b_t, strict=True)
        ]

    def fill(self, weights: Tensor, scale: float) -> None:
        """From float32 masters."""
        places = strided(weights, self.fused, self.blocks, self.rank)
        for each, place, a, b_t in zip(self.fused, places, self.a, self.b_t, strict=True):
            a.copy_(place.a)
            starts = accumulate(each.parts, initial=0)
            for index, (rows, start, own) in enumerate(
                zip(each.parts, starts, place.b, strict=False)
            ):
                at = slice(index * self.rank, (index + 1) * self.rank)
                torch.mul(own.transpose(1, 2), scale, out=b_t[:, at, start : start + rows])
