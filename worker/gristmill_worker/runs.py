"""How several datums lie in one flat token stream. Apart from attention, so that nobody loads transformers for it."""

from typing import NamedTuple


class Run(NamedTuple):
    """`segments` consecutive segments of `length` tokens, from token `start` on."""

    start: int
    length: int
    segments: int
