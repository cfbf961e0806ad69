"""Reads what is compared: heartbeats with their points, sums of usage, gaps, holds."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, bindparam, func, select, text

from gristmill_contracts.http import Heartbeat
from gristmill_contracts.reconciliation import NOTHING, LogPoint, Tally, tally_name
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger import schema
from gristmill_ledger.decisions import METER_KINDS
from gristmill_ledger.reconcile.compare import Difference, Session, Stored
from gristmill_ledger.schema import budgets

PAGE: Final = 100
"""Sessions that are read in one snapshot of the database."""
EVENTS_NAMED_MAX: Final = 1000
HALF: Final = 2**32
"""Sums are added up in two halves: whole ones may pass the 64 bits of SQLite."""

_event, _beat, _producer = schema.usage_event.c, schema.heartbeat.c, schema.producer.c
_hold, _balance = budgets.reservation.c, budgets.reservation_balance.c
_open, _lease = budgets.reservation_open.c, budgets.budget_lease.c

_OF_LOG: Final = (
    _event.session == bindparam("uid"),
    _event.producer == bindparam("uid"),
    _event.producer_seq > bindparam("after"),
    _event.producer_seq <= bindparam("seq"),
    _event.kind.in_(METER_KINDS),
)
_FENCED: Final = func.coalesce(_event.quarantined, "").contains("fenced_attempt")


def _halves(name: str) -> tuple[ColumnElement[Any], ColumnElement[Any]]:  # Any: integers
    column = func.coalesce(_event[name], 0)
    return func.sum(column // HALF).label(f"{name}_high"), func.sum(column % HALF).label(name)


_SUMS: Final = (
    select(
        _event.kind,
        _event.operation,
        _FENCED.label("fenced"),
        func.count().label("operations"),
        *(half for name in TOKEN_TYPES for half in _halves(name)),
    )
    .where(*_OF_LOG)
    .group_by(_event.kind, _event.operation, text("fenced"))
)
_UNKNOWN: Final = (
    select(_event.event_id)
    .where(*_OF_LOG, _event.completeness == "unknown")
    .order_by(_event.event_id)
    .limit(EVENTS_NAMED_MAX)
)
_ACKED: Final = select(_producer.acked_seq).where(_producer.producer == bindparam("uid"))
_LEAKED: Final = (
    select(_open.lease, _open.budget)
    .outerjoin(
        budgets.reservation_balance,
        (_balance.lease == _open.lease) & (_balance.budget == _open.budget),
    )
    .where(_balance.lease.is_(None))
    .order_by(_open.lease, _open.budget)
)
"""Of the holds that have not ended those that do not live either. What has ended is not read: there is
nearly always nothing else."""
_HOLD: Final = (
    select(_hold.lease, _hold.budget, _hold.amount, _lease.tenant, _lease.session)
    .join(budgets.budget_lease, _lease.id == _hold.lease)
    .where(_hold.lease == bindparam("in_lease"), _hold.budget == bindparam("of_budget"))
)
_SUSPENDED: Final = (
    select(_balance.lease, _balance.budget, _balance.rest, _lease.tenant, _lease.session)
    .join(budgets.budget_lease, _lease.id == _balance.lease)
    .where(_balance.suspended == 1)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What is looked at: all, or one tenant's, or one session's."""

    tenant: str = ""
    session: str = ""

    def covers(self, tenant: str, session: str) -> bool:
        return self.tenant in ("", tenant) and self.session in ("", session)

    @property
    def text(self) -> str:
        if self.session:
            return f"session {self.session}"
        return f"tenant {self.tenant}" if self.tenant else "all"


def beats_after(connection: Connection, after: str, session: str = "") -> list[Heartbeat]:
    """A page of heartbeats, in the order of their sessions' ids."""
    query = select(_beat.body).where(_beat.session > after)
    if session:
        query = query.where(_beat.session == session)
    bodies = connection.execute(query.order_by(_beat.session).limit(PAGE)).scalars()
    return [msgspec.msgpack.decode(body, type=Heartbeat) for body in bodies]


def session_of(connection: Connection, beat: Heartbeat) -> Session | None:
    """What is compared of a session; None where its meter tells nothing."""
    if beat.recon is None:
        return None
    return Session(
        tenant=beat.tenant,
        uid=beat.view.uid,
        point=beat.recon,
        told_us=beat.at_us,
        stored=stored_of(connection, beat.view.uid, beat.recon.log),
    )


def stored_of(connection: Connection, uid: str, log: LogPoint) -> Stored | None:
    """What the ledger holds within the numbers of a point; None = the log never registered."""
    acked_seq = connection.execute(_ACKED, {"uid": uid}).scalar_one_or_none()
    if acked_seq is None:
        return None
    bounds = {"uid": uid, "after": log.after, "seq": log.seq}
    all_rows: defaultdict[str, Tally] = defaultdict(lambda: NOTHING)
    unfenced: defaultdict[str, Tally] = defaultdict(lambda: NOTHING)
    for row in connection.execute(_SUMS, bounds):
        name, tally = tally_name(row.kind, row.operation), _tally(row)
        all_rows[name] += tally
        if not row.fenced:
            unfenced[name] += tally
    return Stored(
        acked_seq=acked_seq,
        told=dict(all_rows),
        told_unfenced=dict(unfenced),
        unknown_events=tuple(connection.execute(_UNKNOWN, bounds).scalars()),
    )


def _tally(row: Any) -> Tally:  # Any: a row of _SUMS
    tokens = (
        int(row._mapping[f"{name}_high"]) * HALF + int(row._mapping[name]) for name in TOKEN_TYPES
    )
    return Tally(row.operations, *tokens)


# --- the ledger's own ----------------------------------------------------------------------------


def gaps(connection: Connection, scope: Scope) -> Iterator[Difference]:
    """Usage on record as lost: nobody knows it."""
    table = schema.usage_gap.c
    for row in connection.execute(_scoped(select(schema.usage_gap), table, scope)):
        known = row.head_seq is not None and row.head_seq >= row.acked_seq
        yield Difference(
            pair="meter-ledger",
            kind="unknown",
            tenant=row.tenant,
            session=row.session,
            subject=f"gap {row.id[:16]}",
            delta=Tally(row.acked_seq - row.head_seq) if known else NOTHING,
            detail=f"usage behind {row.acked_seq} was given up: {row.reason}",
        )


def dead_letters(connection: Connection, scope: Scope) -> Iterator[Difference]:
    """Events whose id is taken by another payload. The producer of a log is its session."""
    table = schema.dead_letter.c
    query = select(
        table.tenant, table.event_id, table.payload_hash, table.producer, table.producer_seq,
        table.producer.label("session"),
    )  # fmt: skip
    if scope.tenant:
        query = query.where(table.tenant == scope.tenant)
    if scope.session:
        query = query.where(table.producer == scope.session)
    for row in connection.execute(query):
        yield Difference(
            pair="meter-ledger",
            kind="mismatch",
            tenant=row.tenant,
            session=row.session,
            subject=f"event {row.event_id} as {bytes(row.payload_hash).hex()[:16]}",
            detail=f"producer sequence {row.producer_seq} says otherwise than the row that is stored",
        )


def orphan_holds(connection: Connection, scope: Scope) -> Iterator[Difference]:
    """Holds whose meter went silent, and holds that neither live nor ended."""
    for row in connection.execute(_scoped(_SUSPENDED, _lease, scope)):
        yield _orphan(row, "its meter went silent: what of it was spent is not known")
    for held in connection.execute(_LEAKED).all():
        place = {"in_lease": held.lease, "of_budget": held.budget}
        for row in connection.execute(_scoped(_HOLD, _lease, scope), place):
            yield _orphan(row, "it was taken, and neither lives nor has ended")


def _orphan(row: Any, detail: str) -> Difference:  # Any: a row of _SUSPENDED or _HOLD
    return Difference(
        pair="ledger",
        kind="orphan_reservation",
        tenant=row.tenant,
        session=row.session,
        subject=hold_subject(row.lease, row.budget),
        amount=row[2],
        detail=detail,
    )


def hold_subject(lease: str, budget: str) -> str:
    return f"lease {lease} of {budget}"


def _scoped(query: Select[Any], columns: Any, scope: Scope) -> Select[Any]:  # Any: columns vary
    if scope.tenant:
        query = query.where(columns.tenant == scope.tenant)
    if scope.session:
        query = query.where(columns.session == scope.session)
    return query


def own_differences(connection: Connection, scope: Scope) -> Sequence[Difference]:
    """What the ledger's tables say without anybody else."""
    return [
        *gaps(connection, scope),
        *dead_letters(connection, scope),
        *orphan_holds(connection, scope),
    ]
