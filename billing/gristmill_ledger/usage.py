"""Answers GET /v1/usage: exact token sums from the facts, and what they cost.

The answer is JSON:

    {"rows": [{<bucket_start, bucket_start_us, bucket_end_us when bucketed>, <each group_by key>,
               <session_name when grouped by session>, <kind with include_attempts>,
               "prefill": n, "cached_prefill": n, "sample": n, "train": n, "total": n,
               "operations": n, "operations_unknown": n, "operations_quarantined": n,
               "cost_pico": n | null, "cost": "0.000123" | null, "cost_reason": text | null,
               "currency": "USD" | null}],
     "next_cursor": text | null, "currency": "USD" | null, "price_book": "default",
     "lost": [{"tenant", "session", "attempt", "acked_seq", "head_seq": n | null,
               "events": n | null, "reason", "at_us"}], "lost_count": n,
     <"internal": see device_times, with include_internal>}

`total` is derived. Tokens of operations whose usage is unknown are in no sum: `operations_unknown`
counts them, and where nothing else is in a row its tokens are null. Days and months are those of the
zone that is asked for, and `bucket_start` tells its local time.

`cost_pico` (10^-12 of the currency) is the exact sum of tokens x price at the start of each operation;
null, never 0, where a price or the usage is not known, or where a row mixes currencies. What is rated
costs what it was rated at; what is not, yet, costs what it will be: by the session's own book, else by
the ledger's, `price_book`. The answer's `currency` is that of all its rows. With a token_type filter, or
grouped by it, a row holds that type alone and `operations` counts those that ran some of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    func,
    literal,
    select,
    tuple_,
)

from gristmill_contracts.units import PICO_PER_UNIT, amount_pico
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger import schema
from gristmill_ledger.calendars import bucket_end_us, bucket_start_us, find_zone, iso_text
from gristmill_ledger.device_times import device_times
from gristmill_ledger.gaps import lost_usage
from gristmill_ledger.rates import UNRATED, Rate, Rates, load_rates
from gristmill_ledger.registry import session_names
from gristmill_ledger.usage_query import UsageQuery, make_cursor
from gristmill_ledger.usage_sources import PARTS, counted_types, plain_keys, source

Json = dict[str, Any]  # Any: one row of the JSON answer


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
    rates = load_rates(connection)
    rows: list[Json] = []
    next_cursor = None
    with connection.execution_options(stream_results=True).execute(
        _statement(query, book, rates)
    ) as found:
        for row in _rows(query, found, rates):
            if len(rows) == query.limit:
                next_cursor = make_cursor(query, _place(query, rows[-1]))
                break
            rows.append(row)
    _dress(connection, query, rows)
    internal = {"internal": device_times(connection, query)} if query.include_internal else {}
    return (
        lost_usage(connection, list(_gap_conditions(query)))
        | internal
        | {
            "rows": rows,
            "next_cursor": next_cursor,
            "currency": _common_currency(rows, rates.prices(book).currency),
            "price_book": book,
        }
    )


def cost_so_far(connection: Connection, book: str) -> dict[tuple[str, str], int]:
    """(tenant, currency) -> pico-units of all usage, without what has no price."""
    rates = load_rates(connection)
    found: dict[tuple[str, str], int] = defaultdict(int)
    query = UsageQuery(group_by=("tenant",))
    for row in connection.execute(_statement(query, book, rates)):
        sums = _add([row], rates)
        for currency in sums.currencies:
            found[row[0], currency] += sum(sums.cost_pico.values())
    return dict(found)


def _common_currency(rows: list[Json], default: str | None) -> str | None:
    """The currency of all rows; null where they differ. An answer without costs has the default's."""
    found = {row["currency"] for row in rows if row["currency"] is not None}
    return found.pop() if len(found) == 1 else None if found else default


def _statement(
    query: UsageQuery, book: str, rates: Rates
) -> Select[*tuple[Any, ...]]:  # Any: columns vary
    """Sums by the keys and by what is priced alike, ordered by the keys, from behind the cursor.

    Plain sums fit into SQLite's 64 bits: 2^32 rows of up to 2^31 tokens do, and larger ones are apart.
    """
    rows = source(query, book, rates.incomplete)
    found = rows.c
    keys = [found[f"key_{name}"] for name in plain_keys(query)]
    counted = [f"{name}_with" for name in counted_types(query)]
    names = (*TOKEN_TYPES, *counted, "operations", "unknown", "quarantined")
    sums = [func.sum(found[name]).label(name) for name in names]
    parts = (*keys, *(found[name] for name in PARTS))
    statement = select(*parts, *sums).group_by(*parts).order_by(*parts)
    if query.after is not None and keys:
        place = tuple_(
            *(literal(part, key.type) for part, key in zip(query.after, keys, strict=False))
        )
        columns = tuple_(*keys)
        # The last group may have further token types to come.
        behind = columns >= place if "token_type" in query.keys else columns > place
        statement = statement.where(behind)
    return statement


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


def _rows(query: UsageQuery, found: Iterable[Row[Any]], rates: Rates) -> Iterator[Json]:
    names = plain_keys(query)
    for values, parts in groupby(found, key=lambda row: tuple(row[: len(names)])):
        keys: Json = dict(zip(names, values, strict=True))
        sums = _add(parts, rates)
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


def _add(parts: Iterable[Row[Any]], rates: Rates) -> Sums:
    """Sum the parts of one group, each priced by the rate that it has, or will have."""
    sums = Sums()
    for part in parts:
        values = part._mapping
        rate = _rate_of(values, rates)
        if rate is not None and rate.currency is not None:
            sums.currencies.add(rate.currency)
        sums.operations += int(values["operations"])
        sums.unknown += int(values["unknown"])
        sums.quarantined += int(values["quarantined"])
        for name in TOKEN_TYPES:
            tokens = int(values[name])
            sums.tokens[name] += tokens
            sums.with_tokens[name] += int(values.get(f"{name}_with", 0))
            price = None if rate is None else rate.price(name)
            if price is not None:
                sums.cost_pico[name] += amount_pico(tokens, price.micros_per_mtok)
            elif tokens:
                sums.unpriced.setdefault(name, []).append(values["priced_model"])
    return sums


def _rate_of(values: Any, rates: Rates) -> Rate | None:  # Any: a row's mapping
    """None for what is not billed."""
    if values["rate"] != UNRATED:
        return rates.known[values["rate"]]
    if not values["priced_by"]:
        return None
    return rates.at(values["priced_by"], values["priced_model"], values["epoch"])


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
    units, rest = divmod(abs(pico), PICO_PER_UNIT)
    decimals = f"{rest:012d}"
    sign = "-" if pico < 0 else ""
    return f"{sign}{units}.{decimals[:6]}{decimals[6:].rstrip('0')}"


def _place(query: UsageQuery, row: Json) -> tuple[int | str, ...]:
    return tuple(row[name] for name in query.keys)


def _dress(connection: Connection, query: UsageQuery, rows: list[Json]) -> None:
    """Add what people read: names of sessions and the time of buckets."""
    names = {}
    zone = find_zone(query.zone)
    if "session" in query.keys:
        names = session_names(connection, {row["session"] for row in rows})
    for row in rows:
        if "session" in query.keys:
            row["session_name"] = names.get(row["session"])
        if "bucket" in query.keys:
            name = row.pop("bucket")
            row["bucket_start_us"] = bucket_start_us(name, query.bucket, zone)
            row["bucket_end_us"] = bucket_end_us(name, query.bucket, zone)
            row["bucket_start"] = iso_text(row["bucket_start_us"], zone)
