"""Answers GET /v1/usage: exact token sums from the facts, and what they cost.

The answer is JSON:

    {"rows": [{<bucket_start, bucket_start_us when bucketed>, <each group_by key>,
               <session_name when grouped by session>, <kind with include_attempts>,
               "prefill": n, "cached_prefill": n, "sample": n, "train": n, "total": n,
               "operations": n, "operations_unknown": n, "operations_quarantined": n,
               "cost_pico": n | null, "cost": "0.000123" | null, "cost_reason": text | null,
               "currency": "USD" | null}],
     "next_cursor": text | null, "currency": "USD" | null, "price_book": "default",
     "lost": [{"tenant", "session", "attempt", "acked_seq", "head_seq": n | null,
               "events": n | null, "reason", "at_us"}], "lost_count": n}

`total` is derived. Tokens of operations whose usage is unknown are in no sum: `operations_unknown`
counts them, and where nothing else is in a row its tokens are null. `cost_pico` (10^-12 of the
currency) is the exact sum of tokens x price at the start of each operation; null, never 0, where a
price or the usage is not known, or where a row mixes currencies. Each session is priced by its own
book, else by the ledger's, `price_book`; the answer's `currency` is that of all its rows. With a token_type filter, or grouped by it, the row holds that type
alone and `operations` counts those that ran some of it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    case,
    func,
    literal,
    literal_column,
    select,
    tuple_,
)

from gristmill_contracts.units import PICO_PER_UNIT, amount_pico
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger import schema
from gristmill_ledger.gaps import lost_usage
from gristmill_ledger.prices import PriceList, load_prices
from gristmill_ledger.registry import session_names
from gristmill_ledger.usage_query import BUCKETS_US, UsageQuery, make_cursor

Json = dict[str, Any]  # Any: one row of the JSON answer
HALF_BITS: Final = 32
NO_PRICE_YET: Final = -1


@dataclass(slots=True, kw_only=True)
class Sums:
    """Totals of one group: per token type its tokens, operations and cost."""

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKEN_TYPES, 0))
    with_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKEN_TYPES, 0))
    cost_pico: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKEN_TYPES, 0))
    currencies: set[str] = field(default_factory=set)
    unpriced: dict[str, list[str]] = field(default_factory=dict)
    """Token type -> models that ran some of it at a time without a price."""
    operations: int = 0
    unknown: int = 0
    quarantined: int = 0

    @property
    def all_unknown(self) -> bool:
        return 0 < self.operations == self.unknown


def usage_page(connection: Connection, query: UsageQuery, book: str) -> Json:
    """One page of the answer, as described above."""
    prices = PriceBooks(connection=connection)
    rows: list[Json] = []
    next_cursor = None
    with connection.execution_options(stream_results=True).execute(
        _statement(query, book)
    ) as found:
        for row in _rows(query, found, prices):
            if len(rows) == query.limit:
                next_cursor = make_cursor(query, _place(query, rows[-1]))
                break
            rows.append(row)
    _dress(connection, query, rows)
    return lost_usage(connection, list(_gap_conditions(query))) | {
        "rows": rows,
        "next_cursor": next_cursor,
        "currency": _common_currency(rows, prices.of(book).currency),
        "price_book": book,
    }


def _common_currency(rows: list[Json], default: str | None) -> str | None:
    """The currency of all rows; null where they differ. An answer without costs has the default's."""
    found = {row["currency"] for row in rows if row["currency"] is not None}
    return found.pop() if len(found) == 1 else None if found else default


@dataclass(slots=True, kw_only=True)
class PriceBooks:
    """The price books that an answer needs, each read once."""

    connection: Connection
    lists: dict[str, PriceList] = field(default_factory=dict)

    def of(self, book: str) -> PriceList:
        if book not in self.lists:
            self.lists[book] = load_prices(self.connection, book)
        return self.lists[book]


def _statement(query: UsageQuery, book: str) -> Select[*tuple[Any, ...]]:  # Any: columns vary
    """Sums by (keys, model, book, price epoch), ordered by the keys, from behind the cursor.

    A price epoch is the newest start of any price at the operation's start: within one, every
    price is constant. Sums are of halves, for SQLite's own overflow at 2^63.
    """
    event, own = schema.usage_event.c, schema.session_price_book.c
    priced_by = func.coalesce(own.book, literal(book)).label("priced_by")
    epoch = _epoch(priced_by).label("epoch")
    keys = [_key(query, name) for name in query.keys if name != "token_type"]
    sums: list[ColumnElement[Any]] = [func.count().label("operations")]
    for name in TOKEN_TYPES:
        column = event[name]
        sums += [
            func.coalesce(func.sum(column // 2**HALF_BITS), 0).label(f"{name}_high"),
            func.coalesce(func.sum(column % 2**HALF_BITS), 0).label(f"{name}_low"),
            _count_of(column > 0).label(f"{name}_with"),
        ]
    sums.append(_count_of(event.completeness == "unknown").label("unknown"))
    sums.append(_count_of(event.quarantined.is_not(None)).label("quarantined"))
    statement = select(*keys, event.model.label("priced_model"), priced_by, epoch, *sums)
    statement = statement.select_from(
        schema.usage_event.outerjoin(schema.session_price_book, own.session == event.session)
    )
    statement = statement.where(*_conditions(query, keys))
    parts = (*keys, event.model, priced_by, epoch)
    return statement.group_by(*parts).order_by(*parts)


def _epoch(book: ColumnElement[str]) -> ColumnElement[int]:
    price = schema.price.c
    newest = (
        select(func.max(price.effective_from_us))
        .where(price.book == book, price.effective_from_us <= schema.usage_event.c.op_start_us)
        .correlate(schema.usage_event, schema.session_price_book)
        .scalar_subquery()
    )
    return func.coalesce(newest, NO_PRICE_YET)


def _key(query: UsageQuery, name: str) -> ColumnElement[Any]:  # Any: text or integer
    start = schema.usage_event.c.op_start_us
    if name != "bucket":
        return schema.usage_event.c[name].label(f"key_{name}")
    size: ColumnElement[int] = literal_column(str(BUCKETS_US[query.bucket]))
    # The remainder is of the sign of the time; this one is floored for times before 1970 too.
    return (start - ((start % size) + size) % size).label("key_bucket")


def _count_of(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.sum(case((condition, 1), else_=0))


def _conditions(query: UsageQuery, keys: list[ColumnElement[Any]]) -> Iterator[ColumnElement[bool]]:
    event = schema.usage_event.c
    for name, value in query.filters:
        yield event[name] == value
    if not query.include_attempts:
        yield event.kind == "usage"
    if query.token_type is not None:
        column = event[query.token_type]
        yield (column > 0) | column.is_(None)
    if query.since_us is not None:
        yield event.op_start_us >= query.since_us
    if query.until_us is not None:
        yield event.op_start_us < query.until_us
    if query.after is not None and keys:
        place = tuple_(
            *(literal(part, key.type) for part, key in zip(query.after, keys, strict=False))
        )
        columns = tuple_(*(key.element for key in keys))
        # The last group may have further token types to come.
        yield columns >= place if "token_type" in query.keys else columns > place


def _gap_conditions(query: UsageQuery) -> Iterator[ColumnElement[bool]]:
    """Gaps are of a session and a time; what else is asked for, nobody knows of them."""
    gap = schema.usage_gap.c
    for name, value in query.filters:
        if name in ("tenant", "session"):
            yield gap[name] == value
    if query.since_us is not None:
        yield gap.at_us >= query.since_us
    if query.until_us is not None:
        yield gap.at_us < query.until_us


def _rows(query: UsageQuery, found: Iterable[Row[Any]], prices: PriceBooks) -> Iterator[Json]:
    names = [name for name in query.keys if name != "token_type"]
    for values, parts in groupby(found, key=lambda row: tuple(row[: len(names)])):
        keys: Json = dict(zip(names, values, strict=True))
        sums = _add(parts, prices)
        billed = keys.get("kind") != "attempt"
        if "token_type" not in query.keys:
            yield keys | _measures(sums, _types(query), billed=billed, by_type=query.token_type)
            continue
        for name in _types(query):
            passed = query.after is not None and _passed(query.after, values, name)
            if not passed and (sums.with_tokens[name] or sums.unknown):
                measures = _measures(sums, (name,), billed=billed, by_type=name)
                yield keys | {"token_type": name} | measures


def _types(query: UsageQuery) -> tuple[str, ...]:
    return TOKEN_TYPES if query.token_type is None else (query.token_type,)


def _passed(after: tuple[int | str, ...], values: tuple[Any, ...], token_type: str) -> bool:
    order = TOKEN_TYPES.index
    last = str(after[-1])
    return after[:-1] == values and last in TOKEN_TYPES and order(token_type) <= order(last)


def _add(parts: Iterable[Row[Any]], books: PriceBooks) -> Sums:
    """Sum the parts of one group, each rated by its own book, model and price epoch."""
    sums = Sums()
    for part in parts:
        values = part._mapping
        prices = books.of(values["priced_by"])
        if prices.currency is not None:
            sums.currencies.add(prices.currency)
        sums.operations += int(values["operations"])
        sums.unknown += int(values["unknown"])
        sums.quarantined += int(values["quarantined"])
        for name in TOKEN_TYPES:
            tokens = (int(values[f"{name}_high"]) << HALF_BITS) + int(values[f"{name}_low"])
            sums.tokens[name] += tokens
            sums.with_tokens[name] += int(values[f"{name}_with"])
            price = prices.at(values["priced_model"], name, values["epoch"])
            if price is not None:
                sums.cost_pico[name] += amount_pico(tokens, price)
            elif tokens:
                sums.unpriced.setdefault(name, []).append(values["priced_model"])
    return sums


def _measures(sums: Sums, types: tuple[str, ...], *, billed: bool, by_type: str | None) -> Json:
    """The quantities of a row: of `types` only, the others are 0."""
    known = not sums.all_unknown and (by_type is None or bool(sums.with_tokens[by_type]))
    tokens = {name: sums.tokens[name] if name in types else 0 for name in TOKEN_TYPES}
    cost_pico, reason = _cost(sums, types, known=known, billed=billed)
    return {
        **(tokens if known else dict.fromkeys(TOKEN_TYPES)),
        "total": sum(tokens.values()) if known else None,
        "operations": sums.operations if by_type is None else sums.with_tokens[by_type],
        "operations_unknown": sums.unknown,
        "operations_quarantined": sums.quarantined,
        "cost_pico": cost_pico,
        "cost": None if cost_pico is None else decimal_text(cost_pico),
        "cost_reason": reason,
        "currency": next(iter(sums.currencies)) if len(sums.currencies) == 1 else None,
    }


def _cost(
    sums: Sums, types: tuple[str, ...], *, known: bool, billed: bool
) -> tuple[int | None, str | None]:
    if not billed:
        return 0, "attempts are not billed"
    if not known:
        return None, "the usage is unknown"
    if len(sums.currencies) > 1:
        return None, f"priced in several currencies: {', '.join(sorted(sums.currencies))}"
    missing = [f"{model} {name}" for name in types for model in sums.unpriced.get(name, ())]
    if missing:
        shown = ", ".join(sorted(set(missing))[:5])
        return None, f"no price at the time of the operation: {shown}"
    note = f"{sums.unknown} operations of unknown usage are not in it" if sums.unknown else None
    return sum(sums.cost_pico[name] for name in types), note


def decimal_text(pico: int) -> str:
    """Pico-units as an exact decimal of units: 6 decimals, up to 12 where they are needed."""
    units, rest = divmod(pico, PICO_PER_UNIT)
    decimals = f"{rest:012d}"
    return f"{units}.{decimals[:6]}{decimals[6:].rstrip('0')}"


def _place(query: UsageQuery, row: Json) -> tuple[int | str, ...]:
    return tuple(row[name] for name in query.keys)


def _dress(connection: Connection, query: UsageQuery, rows: list[Json]) -> None:
    """Add what people read: names of sessions and the time of buckets."""
    names = {}
    if "session" in query.keys:
        names = session_names(connection, {row["session"] for row in rows})
    for row in rows:
        if "session" in query.keys:
            row["session_name"] = names.get(row["session"])
        if "bucket" in query.keys:
            row["bucket_start_us"] = row.pop("bucket")
            row["bucket_start"] = iso_text(row["bucket_start_us"])


def iso_text(time_us: int) -> str | None:
    """UTC in ISO 8601, or None where no calendar reaches."""
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)
    except OverflowError:
        return None
    return moment.isoformat().replace("+00:00", "Z")
