"""Answers GET /v1/explain: every charge down to the operation, the price rows and the place in the chain.

The answer is JSON:

    {"charges": [{"event_id", "kind", "n", "tenant", "project", "session", "session_name", "key", "stream",
                  "number", "operation", "model", "outcome", "attempt", "producer", "producer_seq", "lease",
                  "corrects", "reason", "op_start", "op_start_us", "op_end_us", "ingested_us", "quarantined",
                  "tokens": {"prefill", "cached_prefill", "sample", "train"} | null, "total": n | null,
                  "chain": {"tenant", "seq", "prev_hash", "hash"},
                  "state": "rated" | "pending" | "unpriced" | "unknown" | "not billed",
                  "lines": [{"token_type", "tokens", "price": {"book", "model", "effective_from_us",
                             "micros_per_mtok"} | null, "amount_pico": n | null}],
                  "ratings": [{"run", "reason", "rate", "amount_pico": n | null, "rated_us"}],
                  "amount_pico": n | null, "amount": "0.000123" | null, "currency": "USD" | null}],
     "total_pico": n | null, "total": "0.000123" | null, "currency": "USD" | null,
     "operations_unknown": n, "next_after": seq | null, "lost": [...], "lost_count": n}

`lines` multiply out to `amount_pico`, and so do the `ratings` added up. "pending" rows are stored and not
rated yet: they are shown with the prices that they will have. Totals are of the page; null, never 0, where
a charge of it is not known.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, select

from gristmill_contracts.errors import ConflictError
from gristmill_contracts.units import amount_pico
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger import schema
from gristmill_ledger.calendars import iso_text
from gristmill_ledger.corrections import corrections_of
from gristmill_ledger.gaps import lost_usage
from gristmill_ledger.rates import Rate, Rates, load_rates
from gristmill_ledger.rating import counts_of, is_billed
from gristmill_ledger.registry import require_found, session_books, session_names
from gristmill_ledger.schema import rating as tables
from gristmill_ledger.usage import decimal_text

Json = dict[str, Any]  # Any: JSON
_EVENT: Final = schema.usage_event.c
FACTS: Final = (
    "event_id", "kind", "n", "tenant", "project", "session", "key", "stream", "number", "operation",
    "model", "outcome", "attempt", "producer", "producer_seq", "lease", "corrects", "reason",
    "op_start_us", "op_end_us", "ingested_us", "quarantined",
)  # fmt: skip


def explain_event(connection: Connection, event_id: str, tenant: str | None, book: str) -> Json:
    """One charge, and its corrections behind it. Raises NotFoundError, ConflictError where tenants share the id."""
    conditions = [_EVENT.event_id == event_id]
    # Event ids are unique in a tenant: each is looked up in its own part of the index.
    tenants = select(schema.tenant_head.c.tenant)
    conditions.append(_EVENT.tenant.in_(tenants) if tenant is None else _EVENT.tenant == tenant)
    rows = connection.execute(_rows(conditions).limit(2)).all()
    if len(rows) > 1:
        raise ConflictError(
            f"event {event_id!r} is of {rows[0].tenant!r} and of {rows[1].tenant!r}; name the tenant"
        )
    row = require_found(rows[0] if rows else None, f"usage event {event_id!r}")
    rows = [row, *corrections_of(connection, row)]
    return _answer(connection, rows, book) | {"next_after": None, "lost": [], "lost_count": 0}


def explain_session(  # noqa: PLR0917
    connection: Connection, uid: str, tenant: str | None, after: int, limit: int, book: str
) -> Json:
    """A page of a session's charges, in the order of its tenant's chain. Raises NotFoundError."""
    conditions = [_EVENT.session == uid]
    if tenant is not None:
        conditions.append(_EVENT.tenant == tenant)
    rows = connection.execute(_rows([*conditions, _EVENT.seq > after]).limit(limit + 1)).all()
    if not rows and after == 0:
        names = session_names(connection, {uid})
        require_found(names.get(uid), f"session {uid!r} with usage")
    gap = schema.usage_gap.c
    return (
        _answer(connection, rows[:limit], book)
        | lost_usage(connection, [gap.session == uid])
        | {"next_after": rows[limit - 1].seq if len(rows) > limit else None}
    )


def _rows(conditions: list[ColumnElement[bool]]) -> Any:  # Any: a select of whole rows
    return select(schema.usage_event).where(*conditions).order_by(_EVENT.seq, _EVENT.tenant)


def _answer(connection: Connection, rows: Sequence[Any], book: str) -> Json:
    rates = load_rates(connection)
    books = session_books(connection, {row.session for row in rows})
    names = session_names(connection, {row.session for row in rows})
    ratings = _ratings(connection, rows)
    charges = [
        _charge(
            row,
            rates,
            books.get(row.session, book),
            ratings[row.tenant, row.seq],
        )
        | {"session_name": names.get(row.session)}
        for row in rows
    ]
    return {"charges": charges} | _totals(charges)


def _ratings(
    connection: Connection, rows: Sequence[Any]
) -> defaultdict[tuple[str, int], list[Any]]:
    """Every rating of these rows, oldest first, each with the reason of its run."""
    found: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
    by_tenant: defaultdict[str, list[int]] = defaultdict(list)
    for row in rows:
        by_tenant[row.tenant].append(row.seq)
    rated, run = tables.rated_usage.c, tables.rating_run.c
    for tenant, seqs in by_tenant.items():
        query = (
            select(tables.rated_usage, run.reason)
            .outerjoin(tables.rating_run, run.id == rated.run)
            .where(rated.tenant == tenant, rated.seq.in_(seqs))
            .order_by(rated.seq, rated.run)
        )
        for row in connection.execute(query):
            found[tenant, row.seq].append(row)
    return found


def _charge(row: Any, rates: Rates, book: str, ratings: list[Any]) -> Json:
    counts = counts_of(row)
    rate = None
    if is_billed(row.kind):
        will = rates.at(book, row.model, row.op_start_us)
        rate = rates.known[ratings[-1].rate] if ratings else will
    amount = 0 if rate is None else rate.amount(counts)
    return {
        **{name: getattr(row, name) for name in FACTS},
        "op_start": iso_text(row.op_start_us),
        "tokens": None if counts is None else {name: getattr(counts, name) for name in TOKEN_TYPES},
        "total": None if counts is None else counts.total,
        "chain": {
            "tenant": row.tenant,
            "seq": row.seq,
            "prev_hash": bytes(row.prev_hash).hex(),
            "hash": bytes(row.hash).hex(),
        },
        "state": _state(rate, ratings, amount, known=counts is not None),
        "lines": [] if rate is None else _lines(row, rate),
        "ratings": [
            {
                "run": each.run,
                "reason": each.reason,
                "rate": each.rate,
                "amount_pico": each.amount_pico,
                "rated_us": each.rated_us,
            }
            for each in ratings
        ],
        "amount_pico": amount,
        "amount": None if amount is None else decimal_text(amount),
        "currency": None if rate is None else rate.currency,
    }


def _state(rate: Rate | None, ratings: list[Any], amount: int | None, *, known: bool) -> str:
    if rate is None:
        return "not billed"
    if not known:
        return "unknown"
    if amount is None:
        return "unpriced"
    return "rated" if ratings else "pending"


def _lines(row: Any, rate: Rate) -> list[Json]:
    """One for each token type that the operation ran."""
    lines = []
    for name in TOKEN_TYPES:
        tokens = getattr(row, name)
        if not tokens:
            continue
        price = rate.price(name)
        shown = None
        if price is not None:
            shown = {
                "book": rate.book,
                "model": price.model,
                "effective_from_us": price.effective_from_us,
                "micros_per_mtok": price.micros_per_mtok,
            }
        amount = None if price is None else amount_pico(tokens, price.micros_per_mtok)
        lines.append({"token_type": name, "tokens": tokens, "price": shown, "amount_pico": amount})
    return lines


def _totals(charges: list[Json]) -> Json:
    currencies = {each["currency"] for each in charges if each["currency"] is not None}
    unknown = sum(each["state"] == "unknown" for each in charges)
    amounts = [each["amount_pico"] for each in charges if each["state"] != "unknown"]
    known = None not in amounts and len(currencies) <= 1 and (amounts or not charges)
    total = sum(amounts) if known else None
    return {
        "total_pico": total,
        "total": None if total is None else decimal_text(total),
        "currency": currencies.pop() if len(currencies) == 1 else None,
        "operations_unknown": unknown,
    }
