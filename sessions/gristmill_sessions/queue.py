"""Who of a tenant's sessions may hold pods now, and who waits at which place. Pure.

First come, first served on `quota.maxRunning`: a session that holds a place keeps it until it is over, so two
observers that see the same sessions never give one place away twice.
"""

from collections.abc import Iterable

from gristmill_contracts import conditions
from gristmill_contracts.session import TrainingSession

OVER = (conditions.FAILED, conditions.EXPIRED, conditions.STOPPED)


def is_over(session: TrainingSession) -> bool:
    """It came to its end, and never holds pods again."""
    return any(conditions.is_true(session.status.conditions, type_) for type_ in OVER)


def holds_place(session: TrainingSession) -> bool:
    """It has been given an attempt, and is not over."""
    return session.status.attempt > 0 and not is_over(session)


def positions(sessions: Iterable[TrainingSession], max_running: int | None) -> dict[str, int]:
    """Resource uid -> place in the queue (1 = next), for those of one tenant that must wait."""
    if max_running is None:
        return {}
    all_of_them = list(sessions)
    free = max_running - sum(holds_place(each) for each in all_of_them)
    waiting = sorted(
        (each for each in all_of_them if may_wait(each)),
        key=lambda each: (each.metadata.creation_time_us, each.metadata.uid),
    )
    return {each.metadata.uid: index for index, each in enumerate(waiting[max(0, free) :], start=1)}


def may_wait(session: TrainingSession) -> bool:
    """It wants a place: what is stopped, deleted, over or refused does not stand in others' way."""
    meta, accepted = (
        session.metadata,
        conditions.find(session.status.conditions, conditions.ACCEPTED),
    )
    refused = accepted is not None and accepted.status == "False"
    wanted = session.spec.desired_state != "Stopped" and meta.deletion_time_us is None
    return wanted and not refused and not holds_place(session) and not is_over(session)
