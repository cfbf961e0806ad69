"""Rates usage rows once they are stored, and brings them into the rollups, in one transaction.

A tenant's rows are numbered without a gap in the order of their commits. So what is above the cursor is
exactly what is not rated yet: late, repeated and reordered deliveries, restarts and several processes
change nothing about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, select

from gristmill_contracts import limits
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger import schema
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.driver import change_all, insert_all
from gristmill_ledger.rates import UNRATED, Rate, Rates, load_rates
from gristmill_ledger.registry import session_books
from gristmill_ledger.rollups import ROW, Rollups, bring_in
from gristmill_ledger.schema import rating as tables

FIRST_RUN: Final = 0
SHARE_ROWS: Final = 50
"""Rows of a tenant that are worth its own few statements."""
_EVENT: Final = schema.usage_event.c
COLUMNS: Final[tuple[Any, ...]] = tuple(_EVENT[name] for name in ROW)
_ROWS: Final[Any] = (  # Any: a select of COLUMNS
    select(*COLUMNS)
    .where(
        _EVENT.tenant == bindparam("key"),
        _EVENT.seq > bindparam("after"),
        _EVENT.seq <= bindparam("through"),
    )
    .order_by(_EVENT.seq)
)
_LAG: Final = schema.tenant_head.c.seq - func.coalesce(tables.rating_cursor.c.seq, 0)
_BEHIND: Final = (
    select(schema.tenant_head.c.tenant, _LAG.label("lag"))
    .outerjoin(tables.rating_cursor, tables.rating_cursor.c.tenant == schema.tenant_head.c.tenant)
    .where(_LAG > 0)
    .order_by(_LAG.desc(), schema.tenant_head.c.tenant)
    .limit(bindparam("most"))
)
_ALL_BEHIND: Final = select(func.coalesce(func.sum(_LAG), 0)).outerjoin_from(
    schema.tenant_head,
    tables.rating_cursor,
    tables.rating_cursor.c.tenant == schema.tenant_head.c.tenant,
)
_CURSOR: Final = (
    select(tables.rating_cursor.c.seq)
    .where(tables.rating_cursor.c.tenant == bindparam("key"))
    .with_for_update()
)
_HEAD: Final = select(schema.tenant_head.c.seq).where(
    schema.tenant_head.c.tenant == bindparam("key")
)
_MOVE: Final = (
    tables.rating_cursor.update()
    .where(tables.rating_cursor.c.tenant == bindparam("key"))
    .values(seq=bindparam("value"))
)
_MOVE_ALL: Final = (
    "UPDATE rating_cursor AS known SET seq = told.seq "
    "FROM unnest(%s::text[], %s::bigint[]) AS told (tenant, seq) WHERE known.tenant = told.tenant"
)
"""Their rows are locked already, so that the order does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a step did. `rows`: how many were rated; `unpriced`: how many of them have no amount, though
    their usage is known."""

    rows: int
    unpriced: int
    more: bool


def is_billed(kind: str) -> bool:
    """An attempt ran, but its result can never be released."""
    return kind != "attempt"


def counts_of(row: Any) -> Counts | None:  # Any: a row with the token columns
    """None where the usage is unknown."""
    if row.prefill is None:
        return None
    return Counts(**{name: getattr(row, name) for name in TOKEN_TYPES})


def rows_behind(connection: Connection) -> int:
    """How many stored rows are not rated yet."""
    return int(connection.execute(_ALL_BEHIND).scalar_one())


def shares(lags: Sequence[tuple[str, int]], rows_max: int) -> dict[str, int]:
    """How many rows of which tenant are rated at once: all of who lags most, then of the next.

    lags: tenants and rows behind, the most first. A tenant costs its statements however few its rows are,
    so that many rows of few tenants take the least time.
    """
    parts: dict[str, int] = {}
    left = rows_max
    for tenant, lag in lags:
        if left == 0:
            break
        parts[tenant] = min(lag, left)
        left -= parts[tenant]
    return parts


def rate_behind(connection: Connection, *, book: str, now_us: int, rows_max: int) -> Progress:
    """Rate what is stored and not rated yet, of a few tenants and at most `rows_max` rows.

    book: prices sessions without a book of their own.
    """
    most = min(limits.RATING_TENANTS_MAX, max(1, rows_max // SHARE_ROWS))
    lags = [(row.tenant, row.lag) for row in connection.execute(_BEHIND, {"most": most})]
    if not lags:
        return Progress(rows=0, unpriced=0, more=False)
    parts = shares(lags, rows_max)
    more = len(lags) == most or len(parts) < len(lags)
    taken = {}
    # Sorted: two followers that meet lock the tenants in one order.
    for tenant, part in sorted(parts.items()):
        rows, head = _take(connection, tenant, part)
        if rows:
            taken[tenant] = rows
            more |= rows[-1].seq < head
    books = session_books(connection, {row.session for rows in taken.values() for row in rows})
    step = Step(rates=load_rates(connection), books=books, default_book=book, now_us=now_us)
    for tenant, rows in taken.items():
        step.rate(tenant, rows)
    step.write(connection)
    done = sum(len(rows) for rows in taken.values())
    return Progress(rows=done, unpriced=step.unpriced, more=more)


def _take(connection: Connection, tenant: str, rows_max: int) -> tuple[Sequence[Any], int]:
    """The next rows of a tenant, which nobody else rates meanwhile, and its head."""
    after = lock_cursor(connection, tenant)
    head = connection.execute(_HEAD, {"key": tenant}).scalar_one()
    through = min(head, after + rows_max)
    return connection.execute(
        _ROWS, {"key": tenant, "after": after, "through": through}
    ).all(), head


def lock_cursor(connection: Connection, tenant: str) -> int:
    """Up to which row the tenant is rated; nobody else moves it until the transaction ends."""
    seq: int | None = connection.execute(_CURSOR, {"key": tenant}).scalar_one_or_none()
    if seq is None:
        insert_or_skip(connection, tables.rating_cursor, tenant=tenant, seq=0)
        seq = connection.execute(_CURSOR, {"key": tenant}).scalar_one()
    return seq


@dataclass(slots=True, kw_only=True)
class Step:
    """What one transaction rates, of all its tenants: each table is written once, not once for each tenant."""

    rates: Rates
    books: Mapping[str, str]
    default_book: str
    now_us: int
    unpriced: int = 0
    _rollups: Rollups = field(default_factory=Rollups)
    _rated: list[dict[str, Any]] = field(default_factory=list)  # Any: rows of rated_usage
    _moved: list[dict[str, Any]] = field(default_factory=list)  # Any: parameters of _MOVE

    def rate(self, tenant: str, rows: Sequence[Any]) -> None:  # Any: COLUMNS
        """Rate the next rows of a tenant: at least one."""
        rates, rollups, rated = self.rates, self._rollups, self._rated
        for row in rows:
            # As a tuple: by name each of these columns costs as much as all the arithmetic.
            seq, kind, session, _project, _key, model, _operation, start_us, _odd, *tokens = row
            if not is_billed(kind):
                rollups.add(tenant, row, UNRATED)
                continue
            book = self.books.get(session, self.default_book)
            rate = rates.identify(book, model, start_us)
            amount = rates.amount(rate, tokens)
            self.unpriced += tokens[0] is not None and amount is None
            rollups.add(tenant, row, rate)
            rated.append(
                {"tenant": tenant, "seq": seq, "run": FIRST_RUN, "rate": rate}
                | {"amount_pico": amount, "rated_us": self.now_us}
            )
        self._moved.append({"key": tenant, "value": rows[-1].seq})

    def write(self, connection: Connection) -> None:
        insert_all(connection, tables.rated_usage, self._rated)
        bring_in(connection, self._rollups)
        if self._moved:
            change_all(connection, _MOVE, _MOVE_ALL, self._moved)


def difference(old: Rate, new: Rate, counts: Counts | None) -> int | None:
    """What a re-rating adds, in pico-units; None where the new amount is not known.

    Raises ValueError where the two are in different currencies: there is no difference then.
    """
    before, after = old.amount(counts), new.amount(counts)
    if before is not None and after is not None and old.currency != new.currency:
        raise ValueError(f"{old.currency} and {new.currency} have no difference")
    return None if after is None else after - (before or 0)
