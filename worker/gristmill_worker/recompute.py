"""How many layers keep what their backward pass needs; the others run again there, to the same bits.

Running everything again costs a fourth of a training step. So nothing is, unless what would be kept takes more
than half of the memory that is left.
"""

from collections.abc import Callable, Sequence
from typing import Final

from gristmill_worker import memory
from gristmill_worker.room import KEPT_SHARE
from gristmill_worker.runs import Run
from gristmill_worker.sizes import Sizes

ALWAYS_KEPT_BYTES: Final = 64 * 2**20
"""Less than this is kept without looking."""


def layers_kept(sizes: Sizes, table: Sequence[Run], rank: int, free: int) -> int:
    """Of a pass over these runs, with `free` bytes left. The inputs of all layers are kept in any case."""
    tokens = sum(run.length * run.segments for run in table)
    whole = memory.kept_bytes(sizes, tokens, table, rank)
    if whole <= free // KEPT_SHARE:
        return sizes.layers
    inputs = sizes.layers * tokens * sizes.hidden * sizes.item_bytes
    each = max(1, (whole - inputs) // sizes.layers)
    return min(sizes.layers, max(0, free // KEPT_SHARE - inputs) // each)


class Keeper:
    """The same, asked before each pass. `available`: bytes that could be had now; None = nobody knows."""

    def __init__(self, sizes: Sizes, available: Callable[[], int | None]) -> None:
        self.sizes = sizes
        self.available = available

    def layers(self, table: Sequence[Run], rank: int) -> int:
        tokens = sum(run.length * run.segments for run in table)
        if memory.kept_bytes(self.sizes, tokens, table, rank) <= ALWAYS_KEPT_BYTES:
            return self.sizes.layers
        free = self.available()
        return self.sizes.layers if free is None else layers_kept(self.sizes, table, rank, free)
