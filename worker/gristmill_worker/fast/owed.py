"""The gradients of all blocks' factors in a few products, for a stream so short that a product of each block
takes longer to call than to run."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from gristmill_worker.fast.linear import Owed
from gristmill_worker.fast.weights import Fused

ROWS_MAX: Final = 64
"""Longer streams pay for what each block is owed as they pass it."""
BYTES_MAX: Final = 2**25
"""Of what is held until the end of the backward pass beside what is held anyway."""


def owed_columns(fused: Sequence[Fused], rank: int) -> int:
    """Of a block: inputs and outputs of its fused layers, and their low-rank parts both ways."""
    return sum(each.columns + sum(each.parts) + 2 * rank * len(each.parts) for each in fused)


def owed_bytes(rows: int, blocks: int, columns: int, item: int) -> int:
    """What a pass of so many rows owes; 0 where it pays at once. `columns`: of everything owed in one block."""
    held = rows * blocks * columns * item
    return held if rows <= ROWS_MAX and held <= BYTES_MAX else 0


def pay(
    owed: Sequence[Owed],
    parts: tuple[int, ...],
    into: Sequence[Sequence[tuple[Tensor, Tensor]]],
    scale: float,
) -> None:
    """Of one fused layer in all blocks, whose projections have `parts` output rows.

    Adds A += d_low' x and B += scale dy' low; `into` holds (A, B) of each block's projections, float32.
    """
    x, low, dy, d_low = (
        torch.stack([getattr(each, name) for each in owed]) for name in ("x", "low", "dy", "d_low")
    )
    rank = low.shape[-1] // len(parts)
    d_a = torch.bmm(d_low.transpose(1, 2), x)
    d_b = torch.bmm(dy.transpose(1, 2), low)
    torch._foreach_add_(
        [a for block in into for a, _ in block],
        list(d_a.view(-1, rank, x.shape[-1]).unbind()),
    )
    at = 0
    for index, rows in enumerate(parts):
        own = d_b[:, at : at + rows, index * rank : (index + 1) * rank]
        torch._foreach_add_([block[index][1] for block in into], own.unbind(), alpha=scale)
        at += rows
