"""The way out: a result leaves only behind a durable record of its tokens."""

import copy
from collections.abc import Awaitable, Callable

from gristmill_contracts import limits
from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.http import Problem
from gristmill_contracts.usage import Counts
from gristmill_meter import frames
from gristmill_meter.records import Key, Record
from gristmill_meter.session import Session
from gristmill_meter.views import EncodedOperationView, operation_view


async def _still_there() -> bool:
    return False


async def poll_operation(
    session: Session,
    key: Key,
    wait_s: float,
    gone: Callable[[], Awaitable[bool]] = _still_there,
) -> EncodedOperationView:
    """An operation's state, held until it has ended or `wait_s` is over.

    A keyless result is billed here, by a CLAIM that is durable before it leaves. `gone` says whether
    the caller has left meanwhile: then nothing is claimed. Raises NotFoundError for an operation that
    does not exist, or whose result is no longer kept.
    """
    session.check_log()
    record = session.state.records.get(key)
    if record is None:
        raise _unknown(session, key)
    session.polls_held += 1
    try:
        await session.hold(key, wait_s if session.polls_held <= limits.HELD_POLLS_MAX else 0)
        return await _release(session, session.state.records.get(key, record), gone)
    finally:
        session.polls_held -= 1
        session.pulse.ring()


def _unknown(session: Session, key: Key) -> NotFoundError:
    state = session.state
    last = state.next_number - 1 if key[0] == "train" else state.log_number
    if key[0] == "log" and key[1] >= limits.INBOX_LOG_NUMBER_MIN:
        last = state.inbox_number
    if 1 <= key[1] <= last:
        return NotFoundError(
            f"operation {key[0]}/{key[1]} of session {state.uid} ended long ago; results are kept for "
            f"{session.settings.result_retention_s:.0f} s"
        )
    return NotFoundError(f"session {state.uid} has no operation {key[0]}/{key[1]}")


async def _release(
    session: Session, record: Record, gone: Callable[[], Awaitable[bool]]
) -> EncodedOperationView:
    state = session.visible(record)
    if state != "Completed":
        return operation_view(record, state)
    if record.claim != "expired":
        _check_kept(session, record)
    result = await _read(session, record)
    if record.claim == "waiting" and await gone():
        return operation_view(record, "InProgress")
    if record.claim == "waiting":
        session.write(frames.Claim(number=record.number, at_us=session.now_us()))
    await session.log.durable(record.claim_frame)
    if not session.may_release:  # Another attempt may have begun to. It is billed, and stays there.
        return operation_view(record, "InProgress")
    if record.claim == "expired":
        return operation_view(unfetched(record), "Failed")
    return operation_view(record, "Completed", result)


async def _read(session: Session, record: Record) -> bytes:
    if record.result is None:
        return b""
    return await session.log.read_result(record.result, record.settled_frame)


def _check_kept(session: Session, record: Record) -> None:
    kept_s = session.settings.result_retention_s
    age_s = (session.now_us() - record.ended_us) / 1e6
    if record.result is None or age_s >= kept_s:
        raise NotFoundError(
            f"the result of operation {record.stream}/{record.number} is {age_s:.0f} s old; results are "
            f"kept for {kept_s:.0f} s"
        )


def unfetched(record: Record) -> Record:
    """As the record of a failed operation, for the view alone."""
    shown = copy.copy(record)
    shown.error = Problem(
        code="operation_failed",
        message="the result was not fetched in time and was discarded, unbilled; submit it again",
    )
    shown.counts = Counts()
    return shown
