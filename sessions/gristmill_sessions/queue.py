"""Who of a tenant's sessions may hold pods now, and who waits at which place. Pure.

First come, first served on `quota.maxRunning`: a session that holds a place keeps it until it is over.
"""

from collections.abc import Collection, Iterable

from gristmill_contracts import conditions
from gristmill_contracts.session import TrainingSession

OVER = (conditions.FAILED, conditions.EXPIRED, conditions.STOPPED)


def position(
    session: TrainingSession,
    sessions: Iterable[TrainingSession],
    max_running: int | None,
    held: Collection[str] = (),
) -> int | None:
    """The place of `session` among the `sessions` of its tenant: 1 = next; None = it may run now.

    held: uids of resources that were given a place which `sessions` may not tell yet. Whoever gives places
    keeps them, or two sessions are given the same one.
    """
    uid = session.metadata.uid
    if max_running is None or uid in held or holds_place(session):
        return None
    others = [each for each in sessions if each.metadata.uid != uid]
    holding = sum(each.metadata.uid in held or holds_place(each) for each in others)
    ahead = sum(
        _order(each) < _order(session)
        for each in others
        if each.metadata.uid not in held and waits(each)
    )
    place = ahead + 1 - max(0, max_running - holding)
    return place if place > 0 else None


def is_over(session: TrainingSession) -> bool:
    """It came to its end, and never holds pods again."""
    return any(conditions.is_true(session.status.conditions, type_) for type_ in OVER)


def holds_place(session: TrainingSession) -> bool:
    """It has been given an attempt, and is not over."""
    return session.status.attempt > 0 and not is_over(session)


def waits(session: TrainingSession) -> bool:
    """It wants a place: what is stopped, deleted, over or refused does not stand in others' way."""
    meta = session.metadata
    accepted = conditions.find(session.status.conditions, conditions.ACCEPTED)
    refused = accepted is not None and accepted.status == "False"
    wanted = session.spec.desired_state == "Running" and meta.deletion_time_us is None
    return wanted and not refused and not holds_place(session) and not is_over(session)


def _order(session: TrainingSession) -> tuple[int, str]:
    return session.metadata.creation_time_us, session.metadata.uid
