"""Registration of producers: one for each session log, fenced by its epoch."""

from dataclasses import dataclass

from sqlalchemy import Connection, select

from gristmill_contracts.cluster_http import UsageGap
from gristmill_contracts.errors import (
    ConflictError,
    FencedError,
    ForbiddenError,
    InvalidRequestError,
)
from gristmill_contracts.http import ProducerCursor, RegisterProducer
from gristmill_contracts.units import now_us
from gristmill_ledger import checks, schema
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.decisions import ProducerState
from gristmill_ledger.events import lock_producer
from gristmill_ledger.gaps import LOG_LOST, LOG_TRIMMED, record_gap
from gristmill_ledger.registry import is_registered, session_tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    cursor: ProducerCursor
    log_lost: bool
    """The ledger holds events above the head of this log: its log is gone or older."""


def check_registration(request: RegisterProducer) -> None:
    """Raise InvalidRequestError naming the field that is out of bounds."""
    for field in ("producer", "tenant", "session"):
        checks.text(field, getattr(request, field))
    for field in ("epoch", "attempt", "head_seq", "first_seq"):
        checks.quantity(field, getattr(request, field))
    if request.first_seq > request.head_seq + 1:
        raise InvalidRequestError(
            f"first_seq {request.first_seq} is above head_seq {request.head_seq} and the next; send the "
            "lowest sequence that the log holds"
        )


def register_producer(
    connection: Connection, request: RegisterProducer, *, known_session: bool = False
) -> Registered:
    """Make the producer known, or learn its newer epoch and attempt. The cursor outlives epochs.

    known_session: the session must have been registered before, so that its tenant is not the meter's
    to say; else ForbiddenError.

    It must: a log that is gone is recognised by a head below what the ledger acknowledged. Such a log
    owns nothing: the gap is recorded, and the log that the ledger knew may still come back.
    Raises FencedError for a lower epoch or attempt, ConflictError for another tenant or session.
    """
    if known_session and not is_registered(connection, request.session):
        raise ForbiddenError(
            f"session {request.session} is not registered; whoever starts its meter registers it first"
        )
    owner = session_tenant(connection, request.session)
    if owner is not None and owner != request.tenant:
        raise ConflictError(
            f"session {request.session} belongs to tenant {owner}, not {request.tenant}"
        )
    insert_or_skip(
        connection,
        schema.producer,
        producer=request.producer,
        tenant=request.tenant,
        session=request.session,
        epoch=request.epoch,
        attempt=request.attempt,
        head_seq=request.head_seq,
        acked_seq=0,
        registered_us=now_us(),
    )
    state = lock_producer(connection, request.producer)
    _check_owner(request, state)
    acked_seq = state.acked_seq
    log_lost = acked_seq > request.head_seq
    if log_lost and (request.epoch, request.attempt) == (state.epoch, state.attempt):
        # What the owner's log holds only grows: this is an earlier request of its own that comes late.
        return Registered(
            cursor=ProducerCursor(producer=request.producer, acked_seq=acked_seq), log_lost=False
        )
    owned = {"attempt": request.attempt}
    if log_lost:
        _record_loss(connection, request, acked_seq, request.head_seq, LOG_LOST)
    else:
        owned |= {"epoch": request.epoch, "head_seq": request.head_seq}
        if acked_seq < request.first_seq - 1:
            # It had been acknowledged by this ledger, which has lost it since.
            _record_loss(connection, request, acked_seq, request.first_seq - 1, LOG_TRIMMED)
            owned["acked_seq"] = acked_seq = request.first_seq - 1
    connection.execute(
        schema.producer.update()
        .where(schema.producer.c.producer == request.producer)
        .values(**owned)
    )
    return Registered(
        cursor=ProducerCursor(producer=request.producer, acked_seq=acked_seq),
        log_lost=log_lost,
    )


def _check_owner(request: RegisterProducer, state: ProducerState) -> None:
    """Raise ConflictError or FencedError where the producer is another's."""
    if (state.tenant, state.session) != (request.tenant, request.session):
        raise ConflictError(
            f"producer {request.producer} belongs to session {state.session} of {state.tenant}, "
            f"not {request.session} of {request.tenant}; name another producer"
        )
    if request.epoch < state.epoch:
        raise FencedError(
            f"producer {request.producer} registers epoch {request.epoch}, but epoch "
            f"{state.epoch} owns the session; stop"
        )
    if request.attempt < state.attempt:
        raise FencedError(
            f"attempt {request.attempt} of session {request.session} registers, but attempt "
            f"{state.attempt} owns the session; stop"
        )


def owning_attempt(connection: Connection, uid: str) -> int | None:
    """The newest attempt of a session that has registered; None = none has."""
    table = schema.producer.c
    return connection.execute(
        select(table.attempt).where(table.producer == uid)
    ).scalar_one_or_none()


def _record_loss(
    connection: Connection, request: RegisterProducer, acked_seq: int, head_seq: int, reason: str
) -> None:
    gap = UsageGap(
        attempt=request.attempt,
        acked_seq=acked_seq,
        head_seq=head_seq,
        reason=reason,
        at_us=now_us(),
    )
    record_gap(connection, request.session, gap)
