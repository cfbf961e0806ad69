"""How the datums of one request become forward passes. A pure function of lengths and budget."""

from dataclasses import dataclass
from typing import Final

from gristmill_worker.runs import Run

ROWS_MIN: Final = 16
"""Shorter rows take other GEMM kernels; a filler segment keeps the last bits alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Datums of one pass, in the order in which their tokens lie; equal lengths are adjacent."""

    order: tuple[int, ...]
    runs: tuple[Run, ...]
    filler: int = 0
    """Tokens added behind the last datum as a segment of its own. Never counted."""


def plan(lengths: list[int], budget: int, *, packed: bool) -> list[MicroBatch]:
    """Every datum once, longest first. A pass holds at most `budget` tokens, or one datum.

    Unpacked, the datums of a pass are equally long, so that none needs padding.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups: list[list[int]] = []
    held = 0
    for index in order:
        length = lengths[index]
        fits = bool(groups) and held + length <= budget
        if fits and (packed or lengths[groups[-1][0]] == length):
            groups[-1].append(index)
            held += length
        else:
            groups.append([index])
            held = length
    return [_micro_batch(group, lengths, packed=packed) for group in groups]


def _micro_batch(group: list[int], lengths: list[int], *, packed: bool) -> MicroBatch:
    runs: list[Run] = []
    at = 0
    for index in group:
        length = lengths[index]
        if runs and runs[-1].length == length:
            runs[-1] = runs[-1]._replace(segments=runs[-1].segments + 1)
        else:
            runs.append(Run(at, length, 1))
        at += length
    filler = ROWS_MIN - at if packed and at < ROWS_MIN else 0
    if filler:
        runs.append(Run(at, filler, 1))
    return MicroBatch(order=tuple(group), runs=tuple(runs), filler=filler)
