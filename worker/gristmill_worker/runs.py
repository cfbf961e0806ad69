"""How several datums lie in one flat token stream. Apart from attention, so that nobody loads transformers for it."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple


class Run(NamedTuple):
    """`segments` consecutive segments of `length` tokens, from token `start` on."""

    start: int
    length: int
    segments: int


def runs_of(lengths: Sequence[int]) -> tuple[Run, ...]:
    """Segments of these lengths in this order; neighbours that are equally long make one run."""
    found: list[Run] = []
    start = 0
    for length, equal in groupby(lengths):
        segments = len(list(equal))
        found.append(Run(start, length, segments))
        start += length * segments
    return tuple(found)
