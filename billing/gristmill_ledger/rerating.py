"""Rates usage again after prices were added or corrected: difference rows, and a run that says why.

Nothing is changed that is written: a run adds, for each row whose prices are others now, the difference.
Only hours that hold such a row are read. A run that broke off is finished by asking again: what it has
done already has no difference left.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, func, select

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_ledger import checks, schema
from gristmill_ledger.counters import lock_counter, set_counter
from gristmill_ledger.rates import UNRATED, Rates, load_rates
from gristmill_ledger.rating import COLUMNS, counts_of, difference, lock_cursor
from gristmill_ledger.registry import require_found, session_books
from gristmill_ledger.rollups import HOUR_US, Rollups, bring_in, hour_of
from gristmill_ledger.schema import rating as tables

_HOUR: Final = tables.usage_rollup_hourly.c
_EVENT: Final = schema.usage_event.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerate:
    """What to rate again: "" = every tenant, every book. Times are of the operation's start."""

    tenant: str = ""
    book: str = ""
    since_us: int = -limits.QUANTITY_MAX
    until_us: int = limits.QUANTITY_MAX
    reason: str = ""
    written_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An hour of a tenant in which a row may have other prices now."""

    tenant: str
    hour_us: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run did, or would do. Amounts are by currency, in pico-units."""

    rows: int = 0
    hours: int = 0
    unpriced: int = 0
    """Rows whose amount is not known afterwards: a token has no price, or the usage is unknown."""
    other_currency: int = 0
    """Rows left as they are, for a difference cannot be told in two currencies."""
    difference_pico: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    tenants: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """(tenant, currency) -> difference."""

    def add(self, other: "Outcome") -> None:
        self.rows += other.rows
        self.hours += other.hours
        self.unpriced += other.unpriced
        self.other_currency += other.other_currency
        for currency, pico in other.difference_pico.items():
            self.difference_pico[currency] += pico
        for key, pico in other.tenants.items():
            self.tenants[key] += pico


def check_rerate(request: Rerate) -> None:
    """Raise InvalidRequestError naming the field that is out of bounds."""
    checks.text("reason", request.reason)
    for name in ("tenant", "book"):
        checks.text(name, getattr(request, name), empty=True)
    for name in ("since_us", "until_us"):
        checks.signed(name, getattr(request, name))
    if request.since_us >= request.until_us:
        raise InvalidRequestError(
            f"since {request.since_us} is not before until {request.until_us}; until is exclusive"
        )


def begin_run(connection: Connection, request: Rerate, *, now_us: int) -> int:
    """Put the decision on record; returns the run's number."""
    number = lock_counter(connection, "rating_run") + 1
    set_counter(connection, "rating_run", number)
    connection.execute(
        tables.rating_run.insert().values(
            id=number,
            tenant=request.tenant,
            book=request.book,
            since_us=request.since_us,
            until_us=request.until_us,
            reason=request.reason,
            written_by=request.written_by,
            started_us=now_us,
        )
    )
    return number


def check_run(connection: Connection, number: int) -> None:
    """Raise NotFoundError for a run that was never begun."""
    run = tables.rating_run.c.id
    found = connection.execute(select(run).where(run == number)).scalar_one_or_none()
    require_found(found, f"run {number} of rating again")


def touched(
    connection: Connection, request: Rerate, default_book: str, *, behind: Place | None = None
) -> list[Place]:
    """The hours that hold a row with other prices than it is rated with, in order.

    behind: only what comes after this one.
    """
    rates = load_rates(connection)
    # Grouped in the database: an hour has many rows of one session, model and rate.
    query = (
        select(_HOUR.tenant, _HOUR.bucket_us, _HOUR.session, _HOUR.model, _HOUR.rate)
        .where(*_conditions(request))
        .distinct()
    )
    rows = connection.execute(query).all()
    books = session_books(connection, {row.session for row in rows})
    found = {
        (row.tenant, row.bucket_us)
        for row in rows
        if _may_differ(rates, row, books.get(row.session, default_book), request)
    }
    last = ("", 0) if behind is None else (behind.tenant, behind.hour_us)
    return [
        Place(tenant=tenant, hour_us=hour_us)
        for tenant, hour_us in sorted(found)
        if behind is None or (tenant, hour_us) > last
    ]


def _conditions(request: Rerate) -> Iterator[ColumnElement[bool]]:
    yield _HOUR.rate != UNRATED
    yield _HOUR.bucket_us >= hour_of(request.since_us)
    yield _HOUR.bucket_us < request.until_us
    if request.tenant:
        yield _HOUR.tenant == request.tenant


def _may_differ(rates: Rates, row: Any, book: str, request: Rerate) -> bool:
    if request.book and book != request.book:
        return False
    moments = rates.epochs_within(book, row.bucket_us, row.bucket_us + HOUR_US)
    known = rates.known[row.rate]
    return any(rates.at(book, row.model, moment) != known for moment in moments)


def rerate_step(  # noqa: PLR0917
    connection: Connection,
    place: Place,
    request: Rerate,
    default_book: str,
    run: int | None,
    now_us: int,
) -> tuple[Outcome, int]:
    """Rate an hour of a tenant again; `run` None begins one. Returns what was done, and the run."""
    lock_cursor(connection, place.tenant)
    changes = list(_changes(connection, place, request, default_book))
    number = run if run is not None else begin_run(connection, request, now_us=now_us)
    rollups = Rollups()
    added = []
    for change in changes:
        if change.other_currency:
            continue
        rate = change.rates.identify(change.book, change.row.model, change.row.op_start_us)
        rollups.add(place.tenant, change.row, change.row.rate, sign=-1)
        rollups.add(place.tenant, change.row, rate)
        added.append(
            {"tenant": place.tenant, "seq": change.row.seq, "run": number, "rate": rate}
            | {"amount_pico": change.amount, "rated_us": now_us}
        )
    if added:
        connection.execute(tables.rated_usage.insert(), added)
        bring_in(connection, rollups)
    return _outcome(place, changes), number


def preview(connection: Connection, place: Place, request: Rerate, default_book: str) -> Outcome:
    """What `rerate_step` would do."""
    return _outcome(place, list(_changes(connection, place, request, default_book)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A row that has other prices now. `amount`: the difference, None where it is not known."""

    row: Any  # Any: COLUMNS and rate
    rates: Rates
    book: str
    currency: str
    amount: int | None
    other_currency: bool


def _changes(
    connection: Connection, place: Place, request: Rerate, default_book: str
) -> Iterator[Change]:
    rates = load_rates(connection)
    rows = _rated_rows(connection, place, request)
    books = session_books(connection, {row.session for row in rows})
    for row in rows:
        book = books.get(row.session, default_book)
        if request.book and book != request.book:
            continue
        old, new = rates.known[row.rate], rates.at(book, row.model, row.op_start_us)
        if old == new:
            continue
        amount, other = None, False
        try:
            amount = difference(old, new, counts_of(row))
        except ValueError:
            other = True
        yield Change(
            row=row, rates=rates, book=book, currency=new.currency or "", amount=amount,
            other_currency=other,
        )  # fmt: skip


def _outcome(place: Place, changes: list[Change]) -> Outcome:
    found = Outcome(hours=1)
    for change in changes:
        if change.other_currency:
            found.other_currency += 1
            continue
        found.rows += 1
        if change.amount is None:
            found.unpriced += 1
            continue
        found.difference_pico[change.currency] += change.amount
        found.tenants[place.tenant, change.currency] += change.amount
    return found


def _rated_rows(
    connection: Connection, place: Place, request: Rerate
) -> list[Any]:  # Any: COLUMNS and rate
    """The rated rows of an hour, each with the rate that is in force."""
    rated = tables.rated_usage.c
    newest = (
        select(rated.tenant, rated.seq, func.max(rated.run).label("run"))
        .join(schema.usage_event, (_EVENT.tenant == rated.tenant) & (_EVENT.seq == rated.seq))
        .where(*_in_hour(place, request))
        .group_by(rated.tenant, rated.seq)
        .subquery()
    )
    query = (
        select(*COLUMNS, rated.rate)
        .join(newest, (newest.c.tenant == _EVENT.tenant) & (newest.c.seq == _EVENT.seq))
        .join(
            tables.rated_usage,
            (rated.tenant == newest.c.tenant)
            & (rated.seq == newest.c.seq)
            & (rated.run == newest.c.run),
        )
        .where(*_in_hour(place, request))
        .order_by(_EVENT.seq)
    )
    return list(connection.execute(query).all())


def _in_hour(place: Place, request: Rerate) -> Iterator[ColumnElement[bool]]:
    yield _EVENT.tenant == place.tenant
    yield _EVENT.op_start_us >= max(place.hour_us, request.since_us)
    yield _EVENT.op_start_us < min(place.hour_us + HOUR_US, request.until_us)
