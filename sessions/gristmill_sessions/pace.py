"""How soon a new status must be told. What only says how far a start has come may wait for what follows. Pure.

A pod passes through several states in its first seconds, and most of them are over before anybody could
read of them: each would be a write, and some of them a warning about nothing.
"""

from typing import Final

from gristmill_contracts import conditions
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import TrainingSessionStatus
from gristmill_sessions.planner import INFORMATIVE
from gristmill_sessions.wording import NO_CAPACITY

PROGRESS_WAITS_S: Final = 5.0
"""After the last write."""
PROGRESS_WAITS_BUSY_S: Final = 30.0
"""The same while other sessions wait to be started: that comes first."""
HELD_UP_WAITS_S: Final = 2.0
"""The same for a pod that finds no place: most of them do at the second look. It must be said within 5 s."""

PASSING: Final = frozenset(
    {"Creating", "Starting", "PullingImage", "LoadingWeights", "MeterNotReady"}
)
"""Reasons of PodsReady that a start passes through."""
FOLLOWING: Final = frozenset({conditions.READY, conditions.SERVING, conditions.STARTED})
"""They repeat what PodsReady says."""
STARTING: Final = frozenset({"Created", "Scheduled"})
COUNTED: Final = INFORMATIVE | {"conditions", "workers", "state"}


def may_wait_s(
    before: TrainingSessionStatus, after: TrainingSessionStatus, *, busy: bool = False
) -> float:
    """How long after the last write `after` may wait: 0 = it must be told at once.

    More than that only where it is but another step of a start: no condition turns, nothing else is new.
    """
    progress_s = PROGRESS_WAITS_BUSY_S if busy else PROGRESS_WAITS_S
    if before.model_copy(update={name: getattr(after, name) for name in COUNTED}) != after:
        return 0.0
    if before.workers.desired != after.workers.desired or not _still_starts(before, after):
        return 0.0
    known = {each.type: each for each in before.conditions}
    if known.keys() != {each.type for each in after.conditions}:
        return 0.0
    waits = (_waits_s(known[each.type], each, progress_s) for each in after.conditions)
    return min(waits, default=progress_s)


def _still_starts(before: TrainingSessionStatus, after: TrainingSessionStatus) -> bool:
    return before.state == after.state or STARTING.issuperset({before.state, after.state})


def _waits_s(before: Condition, after: Condition, progress_s: float) -> float:
    if (before.status, before.reason, before.message) == (
        after.status,
        after.reason,
        after.message,
    ):
        return progress_s
    if before.status != after.status or after.status == "True":
        return 0.0
    if after.type in FOLLOWING or (after.type == conditions.PODS_READY and after.reason in PASSING):
        return progress_s
    held_up = after.type == conditions.PODS_READY and after.reason in NO_CAPACITY
    return HELD_UP_WAITS_S if held_up else 0.0
