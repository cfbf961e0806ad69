"""The rows that a question is added up from, in SQL: parts of one shape, whatever they are read from."""

from collections.abc import Collection, Iterator
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    FromClause,
    Select,
    Subquery,
    Table,
    Text,
    case,
    cast,
    false,
    func,
    literal,
    literal_column,
    or_,
    select,
    union_all,
)

from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger import schema
from gristmill_ledger.calendars import bucket_column
from gristmill_ledger.rates import BEFORE_ALL, UNRATED
from gristmill_ledger.rollups import LARGE_TOKENS
from gristmill_ledger.schema import rating as tables
from gristmill_ledger.usage_plan import Plan, Span, make_plan
from gristmill_ledger.usage_query import UsageQuery

_EVENT: Final = schema.usage_event.c
_HEAD: Final = schema.tenant_head.c
_CURSOR: Final = tables.rating_cursor.c
_RATED: Final = tables.rated_usage.c
NOTHING: Final[ColumnElement[str]] = literal_column("''", Text)
MONTHLY: Final = (tables.usage_rollup_monthly, tables.usage_total_monthly)
PARTS: Final = ("priced_model", "rate", "priced_by", "epoch", "alone")
Part = Select[*tuple[Any, ...]]  # Any: columns vary with the question


def source(query: UsageQuery, book: str, incomplete: Collection[int]) -> Subquery:
    """Rows with the keys of the question, the PARTS that are summed apart, and measures.

    A row that is rated names its `rate`, and its model where that rate lacks a price (`incomplete`). One
    that is not names the book that will price it, and the newest start of any of its prices: within
    such an epoch every price is constant. `alone` tells rows apart that are too large to be added up.
    """
    plan = make_plan(query)
    parts = [*_rollup_parts(query, plan, incomplete), *_row_parts(query, plan, book)]
    return union_all(*parts).subquery("source")


def counted_types(query: UsageQuery) -> tuple[str, ...]:
    """The token types of which it matters how many operations ran some."""
    if query.token_type is not None:
        return (query.token_type,)
    return TOKEN_TYPES if "token_type" in query.group_by else ()


def plain_keys(query: UsageQuery) -> list[str]:
    """The keys that are columns; token types are, each, columns of their own."""
    return [name for name in query.keys if name != "token_type"]


# --- from the sums -------------------------------------------------------------------------------


def _rollup_parts(query: UsageQuery, plan: Plan, incomplete: Collection[int]) -> Iterator[Part]:
    for span in plan.hours:
        yield _rollup_part(query, plan, incomplete, tables.usage_rollup_hourly, span)
    for span in plan.days:
        yield _rollup_part(query, plan, incomplete, tables.usage_total_daily, span)
    if plan.months is not None:
        table = tables.usage_total_monthly if plan.totals else tables.usage_rollup_monthly
        yield _rollup_part(query, plan, incomplete, table, plan.months)


def _rollup_part(
    query: UsageQuery, plan: Plan, incomplete: Collection[int], table: Table, span: Span
) -> Part:
    sums = table.c
    counted: ColumnElement[int] = sums.events
    if query.token_type is not None:
        counted = sums[f"{query.token_type}_with"] + sums.unknown
    operations = case((sums.kind.in_(("usage", "attempt")), counted), else_=literal_column("0"))
    groups = [
        *_keys(query, plan, table, sums.bucket_us),
        sums.rate,
        case((sums.part == 0, NOTHING), else_=_alone(sums.tenant, sums.part)).label("alone"),
    ]
    if incomplete:
        unpriced = sums.rate.in_(sorted(incomplete))
        groups.append(case((unpriced, sums.model), else_=NOTHING).label("priced_model"))
    measures = {
        "operations": operations,
        "unknown": sums.unknown,
        "quarantined": sums.odd * counted,
        **{name: sums[name] for name in TOKEN_TYPES},
        **{f"{name}_with": sums[f"{name}_with"] for name in counted_types(query)},
    }
    conditions = [*_filters(query, table), *_within(sums.bucket_us, span)]
    if query.token_type is not None:
        conditions.append(counted > 0)
    added = select(*groups, *(func.sum(each).label(name) for name, each in measures.items()))
    # Added up here, by as few columns as there can be: each one more takes SQLite as long again.
    found = added.where(*conditions).group_by(*(each.name for each in groups)).subquery()
    return select(
        *(found.c[f"key_{name}"] for name in plain_keys(query)),
        found.c.priced_model if incomplete else NOTHING.label("priced_model"),
        found.c.rate,
        NOTHING.label("priced_by"),
        literal_column(str(BEFORE_ALL)).label("epoch"),
        found.c.alone,
        *(found.c[name] for name in measures),
    )


# --- from the rows -------------------------------------------------------------------------------


def _row_parts(query: UsageQuery, plan: Plan, book: str) -> Iterator[Part]:
    for span in plan.rows:
        yield _row_part(query, plan, book, span, unrated=False)
    if plan.unrated is not None:
        yield _row_part(query, plan, book, plan.unrated, unrated=True)


def _row_part(query: UsageQuery, plan: Plan, book: str, span: Span, *, unrated: bool) -> Part:
    own = schema.session_price_book.c
    will = func.coalesce(own.book, literal(book))
    billed = _EVENT.kind != "attempt"
    rate: ColumnElement[int] = literal_column(str(UNRATED))
    if not unrated:
        rate = func.coalesce(rate_in_force(), rate)
    pending = billed & (rate == UNRATED) if not unrated else billed
    unknown = _EVENT.completeness == "unknown"
    statement = select(
        *_keys(query, plan, schema.usage_event, _EVENT.op_start_us),
        _EVENT.model.label("priced_model"),
        rate.label("rate"),
        case((pending, will), else_=NOTHING).label("priced_by"),
        case((pending, _epoch(will)), else_=literal_column(str(BEFORE_ALL))).label("epoch"),
        case((_is_large(), _alone(_EVENT.tenant, _EVENT.seq)), else_=NOTHING).label("alone"),
        _flag(_EVENT.kind.in_(("usage", "attempt"))).label("operations"),
        _flag(unknown).label("unknown"),
        _flag(_EVENT.quarantined.is_not(None)).label("quarantined"),
        *(func.coalesce(_EVENT[name], literal_column("0")).label(name) for name in TOKEN_TYPES),
        *(_flag(_EVENT[name] != 0).label(f"{name}_with") for name in counted_types(query)),
    )
    conditions = [*_filters(query, schema.usage_event), *_within(_EVENT.op_start_us, span)]
    if query.token_type is not None:
        column = _EVENT[query.token_type]
        conditions.append((column != 0) | column.is_(None))
    return statement.select_from(_events(unrated=unrated)).where(*conditions)


def _is_large() -> ColumnElement[bool]:
    return or_(
        *((_EVENT[name] > LARGE_TOKENS) | (_EVENT[name] < -LARGE_TOKENS) for name in TOKEN_TYPES)
    )


def _events(*, unrated: bool) -> FromClause:
    """Tenant by tenant: then the indices of each are used, even where all are asked for."""
    joined = schema.tenant_head.outerjoin(
        tables.rating_cursor, _CURSOR.tenant == _HEAD.tenant
    ) if unrated else schema.tenant_head  # fmt: skip
    matches = _EVENT.tenant == _HEAD.tenant
    if unrated:
        rated = func.coalesce(_CURSOR.seq, 0)
        matches = matches & (_EVENT.seq > rated) & (_HEAD.seq > rated)
    return joined.join(schema.usage_event, matches).outerjoin(
        schema.session_price_book, schema.session_price_book.c.session == _EVENT.session
    )


def rate_in_force() -> ColumnElement[int]:
    """Of the last run that rated the row."""
    return (
        select(_RATED.rate)
        .where(_RATED.tenant == _EVENT.tenant, _RATED.seq == _EVENT.seq)
        .order_by(_RATED.run.desc())
        .limit(1)
        .correlate(schema.usage_event)
        .scalar_subquery()
    )


def _epoch(book: ColumnElement[str]) -> ColumnElement[int]:
    price = schema.price.c
    newest = (
        select(func.max(price.effective_from_us))
        .where(price.book == book, price.effective_from_us <= _EVENT.op_start_us)
        .correlate(schema.usage_event, schema.session_price_book)
        .scalar_subquery()
    )
    return func.coalesce(newest, BEFORE_ALL)


# --- of both -------------------------------------------------------------------------------------


def _keys(
    query: UsageQuery, plan: Plan, table: Table, start: ColumnElement[int]
) -> Iterator[ColumnElement[Any]]:  # Any: text or integer
    for name in plain_keys(query):
        if name == "bucket" and table in MONTHLY:
            # These are asked for UTC's months alone, which theirs are: no row is computed anew.
            yield start.label("key_bucket")
        elif name == "bucket":
            yield bucket_column(start, query.bucket, plan.zone).label("key_bucket")
        else:
            yield table.c[name].label(f"key_{name}")


def _filters(query: UsageQuery, table: Table) -> Iterator[ColumnElement[bool]]:
    for name, value in query.filters:
        yield table.c[name] == value
        if name == "tenant" and table is schema.usage_event:
            yield _HEAD.tenant == value
    if not query.include_attempts:
        yield table.c.kind != "attempt"


def _within(start: ColumnElement[int], span: Span) -> Iterator[ColumnElement[bool]]:
    if span.empty:
        yield false()
    if span.since_us is not None:
        yield start >= span.since_us
    if span.until_us is not None:
        yield start < span.until_us


def _alone(tenant: ColumnElement[str], seq: ColumnElement[int]) -> ColumnElement[str]:
    return tenant + literal_column("'/'", Text) + cast(seq, Text)


def _flag(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return case((condition, literal_column("1")), else_=literal_column("0"))
