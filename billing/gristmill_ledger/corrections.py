"""Corrections of usage: an `adjustment` or a `void` row for a recorded decision. Nothing that is stored changes.

A correction is of the operation that it corrects: priced at its start, counted in its hour and its budgets,
with signed tokens. What is left of an operation is never below 0.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import Connection, select

from gristmill_contracts import limits
from gristmill_contracts.errors import ConflictError, InvalidRequestError
from gristmill_contracts.ids import OpId, SessionUid, TenantName, event_id
from gristmill_contracts.usage import TOKEN_TYPES, Counts, UsageEvent
from gristmill_ledger import checks, schema
from gristmill_ledger.budgets.settle import settle
from gristmill_ledger.chain.rows import NewRow, append_rows, lock_head
from gristmill_ledger.decisions import encode_event
from gristmill_ledger.rating import counts_of
from gristmill_ledger.registry import require_found

_EVENT: Final = schema.usage_event.c
PRODUCER: Final = "ledger"
"""Of rows that no meter posted. They have no place in a log: 0."""

NO_TOKENS: Final = Counts()
Tokens = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correct:
    """A decision on one event. `delta`: signed tokens by type; a void takes away all that is left."""

    event: str
    tenant: str = ""
    kind: Literal["adjustment", "void"]
    delta: Counts = NO_TOKENS
    reason: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """`seq`: the row in the tenant's chain. `again`: the same decision was on record already."""

    event_id: str
    tenant: str
    seq: int
    delta: Tokens
    left: Tokens
    again: bool


def check_correction(request: Correct) -> None:
    """Raise InvalidRequestError naming the first field that is out of bounds."""
    checks.text("event", request.event)
    checks.text("reason", request.reason)
    checks.text("by", request.by)
    checks.text("reason", _recorded(request))
    tokens = _tokens(request.delta)
    for name, value in tokens.items():
        checks.signed(name, value)
    if request.kind == "void" and any(tokens.values()):
        raise InvalidRequestError("a void takes away all that is left; give it no tokens")
    if request.kind == "adjustment" and not any(tokens.values()):
        raise InvalidRequestError("an adjustment of 0 tokens changes nothing; say by how many")


def correct(connection: Connection, request: Correct, *, book: str, now_us: int) -> Corrected:
    """Store the correction. The same decision on the same event again is the one that is on record.

    Raises NotFoundError, ConflictError where tenants share the id, where nothing is left to void or where
    less than nothing would be left, InvalidRequestError for what is not billed.
    """
    original = _original(connection, request)
    head = lock_head(connection, original.tenant)
    earlier = corrections_of(connection, original)
    left = _left(original, earlier)
    known = next((row for row in earlier if _is_same(row, request, left)), None)
    if known is not None:
        return _told(known, original, earlier, again=True)
    delta = _delta(request, left)
    event = _event(original, request, delta, n=len(earlier) + 1)
    encoded = encode_event(event)
    row = NewRow(
        values=encoded.values,
        facts=encoded.facts,
        payload_hash=encoded.digest,
        producer=PRODUCER,
        producer_seq=0,
        attempt=event.attempt,
        lease="",
        completeness="final",
        quarantined=None,
    )
    append_rows(connection, head, [row], now_us)
    settle(connection, original.tenant, [event], now_us, book=book)
    earlier = corrections_of(connection, original)
    return _told(earlier[-1], original, earlier, again=False)


def _original(connection: Connection, request: Correct) -> Any:  # Any: a row of usage_event
    tenants = select(schema.tenant_head.c.tenant)
    mine = _EVENT.tenant == request.tenant if request.tenant else _EVENT.tenant.in_(tenants)
    query = select(schema.usage_event).where(_EVENT.event_id == request.event, mine)
    rows = connection.execute(query.limit(2)).all()
    if len(rows) > 1:
        raise ConflictError(
            f"event {request.event!r} is of {rows[0].tenant!r} and of {rows[1].tenant!r}; name the tenant"
        )
    row = require_found(rows[0] if rows else None, f"usage event {request.event[:80]!r}")
    if row.kind != "usage":
        raise InvalidRequestError(
            f"event {request.event} is of kind {row.kind}; only usage is corrected: name the event that it "
            "is of"
        )
    return row


def corrections_of(connection: Connection, original: Any) -> list[Any]:  # Any: rows of usage_event
    """Corrections of an event, oldest first."""
    query = (
        select(schema.usage_event)
        .where(
            _EVENT.session == original.session,
            _EVENT.tenant == original.tenant,
            _EVENT.corrects == original.event_id,
        )
        .order_by(_EVENT.seq)
    )
    return list(connection.execute(query))


def _recorded(request: Correct) -> str:
    return f"{request.by}: {request.reason}"


def _is_same(row: Any, request: Correct, left: Tokens) -> bool:  # Any: a row of usage_event
    if (row.kind, row.reason) != (request.kind, _recorded(request)):
        return False
    if request.kind == "void":
        return not any(left.values())
    return counts_of(row) == request.delta


def _tokens(counts: Counts | None) -> Tokens:
    return {name: 0 if counts is None else getattr(counts, name) for name in TOKEN_TYPES}


def _left(original: Any, earlier: list[Any]) -> Tokens:  # Any: rows of usage_event
    """What the operation counts with its corrections; of unknown usage, what these alone say."""
    rows = [_tokens(counts_of(row)) for row in (original, *earlier)]
    return {name: sum(row[name] for row in rows) for name in TOKEN_TYPES}


def _delta(request: Correct, left: Tokens) -> Counts:
    if request.kind == "void":
        if not any(left.values()):
            raise ConflictError(f"nothing is left of event {request.event} that could be voided")
        return Counts(**{name: -tokens for name, tokens in left.items()})
    for name, change in _tokens(request.delta).items():
        if not 0 <= left[name] + change <= limits.QUANTITY_MAX:
            raise ConflictError(
                f"event {request.event} has {left[name]} {name} tokens left; {change:+} would make that "
                f"{left[name] + change}"
            )
    return request.delta


def _event(original: Any, request: Correct, delta: Counts, n: int) -> UsageEvent:  # Any: as above
    uid = SessionUid(original.session)
    operation = OpId(uid, original.stream, original.number)
    return UsageEvent(
        event_id=event_id(operation, request.kind, n),
        producer_seq=0,
        kind=request.kind,
        n=n,
        tenant=TenantName(original.tenant),
        session=uid,
        stream=original.stream,
        number=original.number,
        operation=original.operation,
        model=original.model,
        project=original.project,
        attempt=original.attempt,
        outcome=original.outcome,
        counts=delta,
        op_start_us=original.op_start_us,
        op_end_us=original.op_end_us,
        key=original.key,
        corrects=original.event_id,
        reason=_recorded(request),
    )


def _told(row: Any, original: Any, earlier: list[Any], *, again: bool) -> Corrected:
    return Corrected(
        event_id=row.event_id,
        tenant=row.tenant,
        seq=row.seq,
        delta=_tokens(counts_of(row)),
        left=_left(original, earlier),
        again=again,
    )
