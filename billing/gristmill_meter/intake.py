"""The way in: an operation, a stream or a refusal becomes an INTENT, durable before it is answered."""

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.errors import ConflictError, LogFullError, UnavailableError
from gristmill_contracts.http import Refuse, Submit, Submitted
from gristmill_contracts.operations import count_before, kind_of
from gristmill_meter import frames
from gristmill_meter.decisions import (
    Accept,
    Duplicate,
    Room,
    on_refuse,
    on_submit,
    resolve_adapter,
)
from gristmill_meter.records import Record
from gristmill_meter.session import Session
from gristmill_meter.worst import worst_counts


async def submit_operation(session: Session, submit: Submit, encoded: bytes) -> Submitted:
    """Accept an operation; `encoded` is its msgpack. Returns once the INTENT is durable."""
    session.check_log()
    decision = on_submit(session.state, submit, session.started, room_of(session, len(encoded)))
    if isinstance(decision, Duplicate):
        return await _submitted_again(session, decision.record)
    _check_accepting(session)
    record = write_intent(session, submit, encoded, decision, streaming=False)
    await session.log.durable(record.accepted_frame)
    return Submitted(stream=record.stream, number=record.number, state=session.visible(record))


async def accept_stream(session: Session, submit: Submit, encoded: bytes) -> Record:
    """Accept a sample whose tokens are streamed by this very request; INTENT durable."""
    session.check_log()
    decision = on_submit(session.state, submit, session.started, room_of(session, len(encoded)))
    if isinstance(decision, Duplicate):
        raise ConflictError(
            f"clientToken {submit.client_token!r} names an operation that has begun; a stream cannot be "
            "read twice, send it with a new token"
        )
    _check_accepting(session)
    record = write_intent(session, submit, encoded, decision, streaming=True)
    session.started.add(record.key)
    await session.log.durable(record.accepted_frame)
    return record


async def refuse_number(session: Session, refuse: Refuse) -> Submitted:
    """Close a number that failed validation. Returns once that is durable."""
    session.check_log()
    decision = on_refuse(session.state, refuse)
    if isinstance(decision, Duplicate):
        return await _submitted_again(session, decision.record)
    _check_accepting(session)
    await session.log.durable(write_refusal(session, refuse))
    return Submitted(stream="train", number=refuse.number, state="Refused")


def write_refusal(session: Session, refuse: Refuse) -> int:
    """Queue a refusal for the log. Returns the number of its frame."""
    refused = frames.Refused(
        number=refuse.number,
        client_token=refuse.client_token,
        message=refuse.message[: limits.DESCRIPTION_CHARS_MAX],
        breaks_accumulation=refuse.breaks_accumulation,
        at_us=session.now_us(),
    )
    return session.write(refused)


def write_intent(
    session: Session, submit: Submit, encoded: bytes, decision: Accept, *, streaming: bool
) -> Record:
    """Queue the INTENT of an accepted operation. It is accepted once its frame is durable."""
    operation = resolve_adapter(session.state, submit.operation)
    if operation is not submit.operation:
        encoded = msgspec.msgpack.encode(operation)
    number = decision.number
    payload, blob = session.log.make_body(f"{submit.stream}-{number}.op", encoded)
    intent = frames.Intent(
        stream=submit.stream,
        number=number,
        kind=kind_of(operation),
        body_hash=submit.body_hash,
        client_token=submit.client_token,
        payload=payload,
        counts=count_before(operation),
        room_bytes=decision.room_bytes,
        streaming=streaming,
        key=submit.key,
        worst=worst_counts(operation, session.context_length),
        may_wait=submit.may_wait,
        at_us=session.now_us(),
    )
    session.write(intent, blob)
    return session.state.records[submit.stream, number]


async def _submitted_again(session: Session, record: Record) -> Submitted:
    await session.log.durable(record.accepted_frame)
    return Submitted(
        stream=record.stream,
        number=record.number,
        state=session.visible(record),
        duplicate=True,
    )


def _check_accepting(session: Session) -> None:
    if not session.admitted:
        raise UnavailableError(
            f"session {session.state.uid} waits for the ledger to take its registration; send the "
            "request again"
        )
    if not (session.serves or session.draining or session.stopping):
        raise UnavailableError(
            f"session {session.state.uid} first takes what waits in its inbox; send the request again"
        )
    if session.draining:
        raise UnavailableError("the meter is going down; send the request again")
    if session.stopping:
        raise UnavailableError(
            f"session {session.state.uid} is stopping; it takes no new operations"
        )
    if session.log.full:
        raise LogFullError("the log's volume is full; enlarge it or wait")


def room_of(session: Session, payload_bytes: int) -> Room:
    """What the volume has for an operation of that size."""
    return Room(
        free_bytes=session.disk.free_bytes(),
        free_bytes_min=session.settings.log_free_bytes_min,
        context_length=session.context_length,
        payload_bytes=payload_bytes,
        promised_bytes=session.log.unwritten_bytes + session.others_bytes(),
        now_us=session.now_us() if session.serves else 0,
    )
