"""Sides that take turns at one piece of work, and what each turn took: for benchmarks against a peer."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

OURS = "Gristmill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One piece of work by one side. Processor time is what a busy machine distorts least."""

    tokens: int
    wall_s: float
    cpu_s: float

    def __sub__(self, part: "Turn") -> "Turn":
        """What is left of a piece of work without a part of it that was measured on its own."""
        return Turn(
            tokens=self.tokens - part.tokens,
            wall_s=self.wall_s - part.wall_s,
            cpu_s=self.cpu_s - part.cpu_s,
        )

    @property
    def rate(self) -> float:
        """Tokens a second; 0 where nothing measurable was left of the time."""
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def cpu_rate(self) -> float:
        return self.tokens / self.cpu_s if self.cpu_s > 0 else 0.0


Play = Callable[[int], tuple[Turn, ...]]
"""Does the work of one turn, the seed given, and says what each of its measures took."""


@dataclass(slots=True, kw_only=True)
class Measure:
    """Turns of each side at one thing, ours first."""

    name: str
    sides: dict[str, list[Turn]] = field(default_factory=dict)

    def median(self, side: str) -> float:
        """Tokens a second."""
        return statistics.median(turn.rate for turn in self.sides[side])

    def ratio(self, side: str, *, ours: str = OURS) -> float:
        """How many times the side's tokens a second ours are; 0 where the side has none."""
        peer = self.median(side)
        return self.median(ours) / peer if peer else 0.0

    def cpu_ratio(self, side: str, *, ours: str = OURS) -> float:
        mine, peer = (
            statistics.median(turn.cpu_rate for turn in self.sides[each]) for each in (ours, side)
        )
        return mine / peer if peer else 0.0


def timed(work: Callable[[], int], cpu_s: Callable[[], float]) -> Turn:
    """One run of `work`, which returns its tokens; `cpu_s` is the processor time of whoever does it."""
    gc.collect()
    wall, cpu = time.perf_counter(), cpu_s()
    tokens = work()
    return Turn(tokens=tokens, wall_s=time.perf_counter() - wall, cpu_s=cpu_s() - cpu)


def take_turns(names: Sequence[str], sides: Mapping[str, Play], turns: int) -> list[Measure]:
    """A measure of each name. One turn of every side to warm up, then in turns; who begins changes."""
    measures = [Measure(name=name, sides={side: [] for side in sides}) for name in names]
    for play in sides.values():
        play(1)
    order = list(sides.items())
    for turn in range(turns):
        first = turn % len(order)
        for side, play in order[first:] + order[:first]:
            for measure, taken in zip(measures, play(2 + turn), strict=True):
                measure.sides[side].append(taken)
    return measures
