"""Ingest of usage batches: dedupe, numbering and cursor in one transaction; nothing is refused late.

`decide` is pure; `store_batch` reads what it needs, asks it, and writes what it says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, bindparam, select

from gristmill_contracts import limits
from gristmill_contracts.chain import encoding
from gristmill_contracts.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
)
from gristmill_contracts.http import ProducerCursor, UsageBatch
from gristmill_contracts.usage import OPERATION_KINDS, TOKEN_TYPES, UsageEvent
from gristmill_ledger import checks, schema
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.prices import PriceList, load_prices
from gristmill_ledger.registry import session_book

METER_KINDS: Final = ("usage", "attempt")
"""What a meter may post; the other kinds are the ledger's own."""

# Built once: composing a statement costs more than SQLite takes to run it.
_PRODUCER: Final = (
    select(schema.producer).where(schema.producer.c.producer == bindparam("key")).with_for_update()
)
_HEAD: Final = (
    select(schema.tenant_head.c.seq, schema.tenant_head.c.hash)
    .where(schema.tenant_head.c.tenant == bindparam("key"))
    .with_for_update()
)
_KNOWN: Final = select(schema.usage_event.c.event_id, schema.usage_event.c.payload_hash).where(
    schema.usage_event.c.tenant == bindparam("key"),
    schema.usage_event.c.event_id.in_(bindparam("ids", expanding=True)),
)
_REGISTERED: Final = select(schema.session.c.uid).where(
    schema.session.c.tenant == bindparam("key"),
    schema.session.c.uid.in_(bindparam("uids", expanding=True)),
)
_INSERT: Final = schema.usage_event.insert()
_MOVE_HEAD: Final = (
    schema.tenant_head.update()
    .where(schema.tenant_head.c.tenant == bindparam("key"))
    .values(seq=bindparam("last_seq"), hash=bindparam("last_hash"))
)
_MOVE_CURSOR: Final = (
    schema.producer.update()
    .where(schema.producer.c.producer == bindparam("key"))
    .values(acked_seq=bindparam("value"))
)


_UNKNOWN: Final = (None,) * len(TOKEN_TYPES)


class SequenceGapError(ConflictError):
    """A batch begins beyond the next number of its producer. Nothing was stored."""

    def __init__(self, message: str, expected_seq: int) -> None:
        super().__init__(message)
        self.expected_seq = expected_seq


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerState:
    """A registered producer, as its row says."""

    producer: str
    tenant: str
    session: str
    epoch: int
    attempt: int
    acked_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The last row of a tenant's chain; `seq` 0 = no row yet."""

    seq: int
    hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of a batch: each event is in exactly one of the three."""

    new: list[UsageEvent]
    duplicates: list[UsageEvent]
    conflicts: list[UsageEvent]
    acked_seq: int
    digests: dict[str, bytes]
    """Event id -> payload hash, of the new ones too."""
    fenced: bool
    """From a log that no longer owns the session: kept, for it may have been released before its meter
    knew; the cursor is of the owner's log, and stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a commit did, for metrics and logs."""

    cursor: ProducerCursor
    inserted: int
    duplicates: int
    conflicts: list[UsageEvent]
    quarantined: int


def payload_hash(event: UsageEvent) -> bytes:
    """SHA-256 of the event's facts. Where it was posted from (producer_seq, attempt, lease) is left out:
    the same operation posted again by another attempt or from a rebuilt log is the same fact.
    """
    return encoding.payload_hash(_encode_facts(event))


def _encode_facts(event: UsageEvent) -> bytes:
    counts = event.counts
    tokens = _UNKNOWN if counts is None else (
        counts.prefill, counts.cached_prefill, counts.sample, counts.train,
    )  # fmt: skip
    return encoding.encode(
        (
            encoding.VERSION, event.event_id, event.kind, event.n, event.tenant, event.session,
            event.stream, event.number, event.operation, event.model, event.project, event.key,
            event.outcome, *tokens, event.op_start_us, event.op_end_us, event.corrects, event.reason,
        )
    )  # fmt: skip


def check_batch(batch: UsageBatch) -> None:
    """Raise InvalidRequestError naming the first field that no honest meter sends."""
    checks.text("producer", batch.producer)
    checks.quantity("epoch", batch.epoch)
    if batch.first_seq < 1:
        raise InvalidRequestError(f"first_seq is {batch.first_seq}; a log numbers from 1")
    if not batch.events:
        raise InvalidRequestError("the batch holds no event; send at least one")
    for index, event in enumerate(batch.events):
        _check_event(f"events[{index}]", event)
        if event.producer_seq != batch.first_seq + index:
            raise InvalidRequestError(
                f"events[{index}].producer_seq is {event.producer_seq}, not "
                f"{batch.first_seq + index}; a batch is contiguous from first_seq"
            )


def _check_event(at: str, event: UsageEvent) -> None:
    for field in ("event_id", "tenant", "session", "operation", "model"):
        checks.text(f"{at}.{field}", getattr(event, field))
    for field in ("project", "key", "lease"):
        checks.text(f"{at}.{field}", getattr(event, field), empty=True)
    if event.kind not in METER_KINDS or event.corrects or event.reason:
        raise InvalidRequestError(
            f"{at} is a correction ({event.kind}, corrects {event.corrects[:40]!r}); a meter posts "
            f"{' and '.join(METER_KINDS)}, and corrections are the ledger's own"
        )
    for field in ("producer_seq", "n", "number", "attempt"):
        checks.quantity(f"{at}.{field}", getattr(event, field))
    for field in ("op_start_us", "op_end_us"):
        checks.signed(f"{at}.{field}", getattr(event, field))
    if event.counts is not None:
        for field in TOKEN_TYPES:
            checks.quantity(f"{at}.counts.{field}", getattr(event.counts, field))


def decide(
    batch: UsageBatch,
    state: ProducerState,
    known: Mapping[str, bytes],
    attempt: int | None = None,
) -> Decision:
    """Sort the events of a batch. `known`: event id -> payload hash of rows already stored.

    attempt: of the meter that posts; None = not told. Raises NotFoundError (epoch not registered),
    SequenceGapError, or InvalidRequestError for an event of another tenant.
    """
    fenced = batch.epoch < state.epoch or (attempt is not None and attempt < state.attempt)
    if not fenced and batch.epoch > state.epoch:
        raise NotFoundError(
            f"producer {state.producer} is registered with epoch {state.epoch}, not "
            f"{batch.epoch}; register the new log first"
        )
    if not fenced and batch.first_seq > state.acked_seq + 1:
        raise SequenceGapError(
            f"producer {state.producer} sent from {batch.first_seq}, but {state.acked_seq + 1} "
            "comes next; send from there",
            state.acked_seq + 1,
        )
    seen = dict(known)
    new, duplicates, conflicts = [], [], []
    for event in batch.events:
        if event.tenant != state.tenant:
            raise InvalidRequestError(
                f"event {event.event_id} is of tenant {event.tenant!r}, but producer "
                f"{state.producer} is registered for {state.tenant!r}; register one for each tenant"
            )
        digest = payload_hash(event)
        if event.event_id not in seen:
            seen[event.event_id] = digest
            new.append(event)
        elif seen[event.event_id] == digest:
            duplicates.append(event)
        else:
            conflicts.append(event)
    last_seq = batch.first_seq + len(batch.events) - 1
    return Decision(
        new=new,
        duplicates=duplicates,
        conflicts=conflicts,
        acked_seq=last_seq if fenced else max(state.acked_seq, last_seq),
        digests=seen,
        fenced=fenced,
    )


def oddities(
    event: UsageEvent,
    state: ProducerState,
    *,
    prices: PriceList,
    registered: bool,
    now_us: int,
    fenced: bool = False,
) -> str | None:
    """Why an event is quarantined, or None. It is stored, shown and counted all the same."""
    reasons = ["fenced_attempt"] if fenced else []
    if event.operation not in OPERATION_KINDS:
        reasons.append("unknown_operation")
    if not registered:
        reasons.append("unknown_session")
    if event.session != state.session:
        reasons.append("session_of_another_producer")
    early_us = now_us - limits.EVENT_AGE_S_MAX * 1_000_000
    late_us = now_us + limits.EVENT_AHEAD_S_MAX * 1_000_000
    if not early_us <= event.op_start_us <= late_us or event.op_end_us < event.op_start_us:
        reasons.append("clock")
    if event.counts is None:
        reasons.append("unknown_usage")
    elif any(
        getattr(event.counts, name) and prices.at(event.model, name, event.op_start_us) is None
        for name in TOKEN_TYPES
    ):
        reasons.append("unpriced")
    return ",".join(reasons) or None


def store_batch(
    connection: Connection,
    batch: UsageBatch,
    *,
    book: str,
    now_us: int,
    attempt: int | None = None,
) -> Stored:
    """Store a checked batch and move its producer's cursor. Raises as `decide` says."""
    state = lock_producer(connection, batch.producer)
    # Before the look: another producer of the tenant may be about to store the same events.
    head = _lock_head(connection, state.tenant)
    known = _known_hashes(connection, state.tenant, [event.event_id for event in batch.events])
    decision = decide(batch, state, known, attempt)
    rows = _rows(connection, decision, state, book=book, now_us=now_us)
    if rows:
        last = _chain(rows, head)
        connection.execute(_INSERT, rows)
        connection.execute(
            _MOVE_HEAD, {"key": state.tenant, "last_seq": last.seq, "last_hash": last.hash}
        )
    for event in decision.conflicts:
        _bury(connection, event, state, now_us)
    if decision.acked_seq > state.acked_seq and not decision.fenced:
        connection.execute(_MOVE_CURSOR, {"key": state.producer, "value": decision.acked_seq})
    return Stored(
        cursor=ProducerCursor(
            producer=state.producer, acked_seq=decision.acked_seq, fenced=decision.fenced
        ),
        inserted=len(rows),
        duplicates=len(decision.duplicates),
        conflicts=decision.conflicts,
        quarantined=sum(row["quarantined"] is not None for row in rows),
    )


def lock_producer(connection: Connection, producer: str) -> ProducerState:
    """The producer's row, locked to the end of the transaction. Raises NotFoundError."""
    row = connection.execute(_PRODUCER, {"key": producer}).one_or_none()
    if row is None:
        raise NotFoundError(f"producer {producer!r} is not registered; register it first")
    return ProducerState(
        producer=producer,
        tenant=row.tenant,
        session=row.session,
        epoch=row.epoch,
        attempt=row.attempt,
        acked_seq=row.acked_seq,
    )


def _known_hashes(connection: Connection, tenant: str, ids: list[str]) -> dict[str, bytes]:
    rows = connection.execute(_KNOWN, {"key": tenant, "ids": ids})
    return {row.event_id: bytes(row.payload_hash) for row in rows}


def _rows(
    connection: Connection, decision: Decision, state: ProducerState, *, book: str, now_us: int
) -> list[dict[str, Any]]:  # Any: column values of several types
    if not decision.new:
        return []
    prices = load_prices(connection, session_book(connection, state.session) or book)
    uids = list({event.session for event in decision.new})
    registered = set(connection.execute(_REGISTERED, {"key": state.tenant, "uids": uids}).scalars())
    shared = {
        "producer": state.producer,
        "ingested_us": now_us,
        "enc_v": encoding.VERSION,
    }
    return [
        shared
        | _row(event)
        | {
            "payload_hash": decision.digests[event.event_id],
            "quarantined": oddities(
                event,
                state,
                prices=prices,
                registered=event.session in registered,
                now_us=now_us,
                fenced=decision.fenced,
            ),
        }
        for event in decision.new
    ]


def _row(event: UsageEvent) -> dict[str, Any]:  # Any: as above
    row = msgspec.structs.asdict(event)
    counts = row.pop("counts")
    row["completeness"] = "unknown" if counts is None else "final"
    for name in TOKEN_TYPES:
        row[name] = None if counts is None else getattr(counts, name)
    return row


def _chain(rows: list[dict[str, Any]], head: Head) -> Head:  # Any: as above
    """Number the rows behind the head and link each to the one before; returns the new head."""
    seq, prev_hash = head.seq, head.hash
    for row in rows:
        seq += 1
        row["seq"], row["prev_hash"] = seq, prev_hash
        facts = encoding.encode([row[name] for name in encoding.FACTS])
        posting = encoding.encode([row[name] for name in encoding.POSTING])
        prev_hash = row["hash"] = encoding.row_hash(prev_hash, facts, posting)
    return Head(seq=seq, hash=prev_hash)


def _lock_head(connection: Connection, tenant: str) -> Head:
    row = connection.execute(_HEAD, {"key": tenant}).one_or_none()
    if row is None:
        insert_or_skip(connection, schema.tenant_head, tenant=tenant, seq=0, hash=encoding.GENESIS)
        row = connection.execute(_HEAD, {"key": tenant}).one()
    return Head(seq=row.seq, hash=bytes(row.hash))


def _bury(connection: Connection, event: UsageEvent, state: ProducerState, now_us: int) -> None:
    insert_or_skip(
        connection,
        schema.dead_letter,
        tenant=state.tenant,
        event_id=event.event_id,
        payload_hash=payload_hash(event),
        reason="payload_conflict",
        producer=state.producer,
        producer_seq=event.producer_seq,
        body=msgspec.msgpack.encode(event),
        received_us=now_us,
    )
