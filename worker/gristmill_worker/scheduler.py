"""Who runs next in the engine: training or sampling, and which samples join the batch. Decides, does nothing.

The rule between the two sides: while both wait, each gets half of the engine's time. A piece is never
interrupted, so that one side waits at most for the piece that runs, and for as long as it is ahead.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

Side = Literal["work", "sampling"]
"""work = whole pieces: training operations, opening, snapshots. sampling = single blocks and steps."""

ROWS_MAX: Final = 64
"""Rows of one decode step."""
ROWS_TOGETHER_MIN: Final = 16
"""A large group waits until as many of its rows can begin at once: a few at a time would share little."""
BLOCKS_PER_STEP_MAX: Final = 4
"""Blocks of prompts between two decode steps, so that new prompts do not hold up those who read."""


@dataclass(slots=True, kw_only=True)
class Shares:
    """Engine time of each side. `ahead_s` > 0: work has had more than its half; < 0: sampling has."""

    ahead_s: float = 0.0
    last: Side = "work"

    def next(self, *, work: bool, sampling: bool) -> Side | None:
        """Whose turn it is, given who has something to run; None = nobody has."""
        if not (work and sampling):
            return "work" if work else "sampling" if sampling else None
        if self.ahead_s == 0.0:
            return "sampling" if self.last == "work" else "work"
        return "sampling" if self.ahead_s > 0 else "work"

    def ran(self, side: Side, seconds: float, *, other_waits: bool) -> None:
        """Book a turn. Time that nobody else wanted pays back a lead of the other side, and makes none."""
        before = self.ahead_s
        self.ahead_s += seconds if side == "work" else -seconds
        self.last = side
        if not other_waits:
            bound = max(before, 0.0) if side == "work" else min(before, 0.0)
            self.ahead_s = min(self.ahead_s, bound) if side == "work" else max(self.ahead_s, bound)

    def sampling_ended(self) -> None:
        """Nobody samples any more: what sampling did not use of its half is gone."""
        self.ahead_s = min(self.ahead_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the batch may hold, and holds. A position is one token's keys and values in all layers."""

    rows_max: int = ROWS_MAX
    positions_max: int = 2**20
    adapters_max: int = 8
    tokens_max: int = 2048
    """Of prompts that run in one pass."""
    rows: int = 0
    positions: int = 0
    adapters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a group asks for."""

    rows: int
    """That have not begun yet."""
    prompt: int
    """Positions that its rows share; 0 once they are held."""
    each: int
    """Positions that a row may grow by."""
    adapter: str


def rows_to_begin(need: Need, capacity: Capacity) -> int:
    """How many rows of the first group in line may begin now; 0 = it waits, and nobody passes it.

    Where nothing runs, one row always may: a budget that is too small for it must not block for ever.
    """
    if capacity.rows == 0:
        return max(1, _that_fit(need, capacity))
    another = bool(need.adapter) and need.adapter not in capacity.adapters
    if another and len(capacity.adapters) >= capacity.adapters_max:
        return 0
    fit = _that_fit(need, capacity)
    return fit if fit >= min(need.rows, ROWS_TOGETHER_MIN) else 0


def _that_fit(need: Need, capacity: Capacity) -> int:
    free = capacity.positions_max - capacity.positions - need.prompt
    return max(0, min(need.rows, capacity.rows_max - capacity.rows, free // max(1, need.each)))


def with_begun(capacity: Capacity, need: Need) -> Capacity:
    """What is held once all that a group needs is."""
    return replace(
        capacity,
        rows=capacity.rows + need.rows,
        positions=capacity.positions + need.prompt + need.rows * need.each,
        adapters=capacity.adapters | ({need.adapter} if need.adapter else set()),
    )


def tokens_together(*, rows: int, blocks_since_step: int, block: int, budget: int) -> int:
    """Tokens of several prompts that one pass may run: as many as their blocks would one after another.

    Where nobody reads yet, as many as a pass may have at all.
    """
    return min(budget, block * (BLOCKS_PER_STEP_MAX - blocks_since_step)) if rows else budget


def prefills_now(*, waits: bool, rows: int, blocks_since_step: int) -> bool:
    """Whether the next turn of sampling is a block of a prompt; else it is a decode step."""
    return waits and (rows == 0 or blocks_since_step < BLOCKS_PER_STEP_MAX)


def next_session(waiting: Iterable[str], last: str) -> str | None:
    """Sessions take turns in the order of their names: the first one behind `last`."""
    names = sorted(waiting)
    return next((name for name in names if name > last), names[0] if names else None)
