"""Budgets as the database holds them: which ones bound an operation, and the figures of a period."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, Double, Row, and_, bindparam, cast, func, or_, select

from gristmill_contracts import limits
from gristmill_ledger.budgets.decide import Figures
from gristmill_ledger.budgets.periods import period_at
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.lists import among
from gristmill_ledger.schema import budgets as tables

AnyRow = Row[*tuple[Any, ...]]

_budget, _terms, _period = tables.budget.c, tables.budget_terms.c, tables.budget_period.c

_SCOPES: Final = or_(
    _budget.scope_type == "tenant",
    and_(_budget.scope_type == "project", among(_budget.scope, "projects")),
    and_(_budget.scope_type == "session", among(_budget.scope, "sessions")),
    and_(_budget.scope_type == "key", among(_budget.scope, "keys")),
)
_COLUMNS: Final = (
    _budget.id, _budget.scope_type, _budget.scope, _budget.unit, _budget.recurrence,
    _budget.time_zone, _budget.created_us, _terms.amount, _terms.mode, _terms.thresholds,
    _period.start_us, _period.end_us, _period.limit_amount, _period.posted, _period.late_posted,
    _period.reserved, _period.suspense,
)  # fmt: skip
_JOINED: Final = tables.budget.join(tables.budget_terms, _terms.budget == _budget.id).outerjoin(
    tables.budget_period,
    and_(
        _period.budget == _budget.id,
        _period.start_us <= bindparam("at_us"),
        _period.end_us > bindparam("at_us"),
    ),
)
_APPLICABLE: Final = (
    select(*_COLUMNS)
    .select_from(_JOINED)
    .where(_budget.tenant == bindparam("tenant"), _terms.amount.is_not(None), _SCOPES)
    .order_by(_budget.id)
)
_limit = tables.budget_limit.c
_last_limit = (
    select(_limit.amount)
    .where(_limit.budget == _budget.id, _limit.amount.is_not(None))
    .order_by(_limit.n.desc())
    .limit(1)
    .scalar_subquery()
)
# A budget that has ended is shown with the limit that it had.
_ENDED_TOO: Final = [
    func.coalesce(_terms.amount, _last_limit).label("amount") if column is _terms.amount else column
    for column in _COLUMNS
]
_MANY: Final = select(*_ENDED_TOO).select_from(_JOINED).where(among(_budget.id, "budgets"))
_ONE: Final = select(*_ENDED_TOO).select_from(_JOINED).where(_budget.id == bindparam("budget"))
# Of a sum of integers the database might make more than it holds.
_filled = func.coalesce(
    (cast(_period.posted, Double) + cast(_period.late_posted, Double))
    / func.nullif(_terms.amount, 0),
    0.0,
)
_SHOWN: Final = (
    select(*_COLUMNS)
    .select_from(_JOINED)
    .where(_budget.scope_type.in_(("tenant", "project")), _terms.amount.is_not(None))
    .order_by(_filled.desc(), _budget.id)
    .limit(limits.METRIC_LABEL_VALUES_MAX)
)
_LOCK_TERMS: Final = (
    select(_terms.amount).where(_terms.budget == bindparam("budget")).with_for_update()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scopes:
    """What operations of one tenant are of: their projects, sessions and access keys."""

    tenant: str
    projects: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)


def applicable(connection: Connection, scopes: Scopes, at_us: int) -> list[Figures]:
    """The budgets that bound such operations, in id order, with the period that holds `at_us`."""
    parameters = {
        "tenant": scopes.tenant,
        "projects": _named(scopes.projects),
        "sessions": _named(scopes.sessions),
        "keys": _named(scopes.keys),
        "at_us": at_us,
    }
    rows = connection.execute(_APPLICABLE, parameters).all()
    return [
        _figures(row)
        if row.start_us is not None
        else open_period(connection, row.id, _recurring(row), at_us)
        for row in rows
    ]


def one(connection: Connection, budget: str, at_us: int) -> Figures:
    """A budget with the period that holds `at_us`, which is made if it was never used."""
    row = connection.execute(_ONE, {"budget": budget, "at_us": at_us}).one()
    if row.start_us is None:
        return open_period(connection, budget, _recurring(row), at_us)
    return _figures(row)


def seen(connection: Connection, budget: str, at_us: int) -> Figures:
    """`one` for readers: a period that was never used is all zeros, and is not made."""
    row = connection.execute(_ONE, {"budget": budget, "at_us": at_us}).one()
    return _seen(row, at_us)


def seen_all(connection: Connection, budgets: Collection[str], at_us: int) -> dict[str, Figures]:
    """`seen` of several, by id."""
    rows = connection.execute(_MANY, {"budgets": sorted(budgets), "at_us": at_us})
    return {row.id: _seen(row, at_us) for row in rows}


def shown(connection: Connection, at_us: int) -> list[Figures]:
    """Those that have series: of tenants and projects, for sessions have no labels; the fullest ones, where
    they are too many, for somebody may have to act on them.
    """
    return [_seen(row, at_us) for row in connection.execute(_SHOWN, {"at_us": at_us})]


def _seen(row: AnyRow, at_us: int) -> Figures:
    if row.start_us is not None:
        return _figures(row)
    period = period_at(*_recurring(row), at_us)
    made = dict(row._mapping) | {"start_us": period.start_us, "end_us": period.end_us}
    made["limit_amount"] = row.amount or 0
    return _from(made | dict.fromkeys(("posted", "late_posted", "reserved", "suspense"), 0))


def open_period(
    connection: Connection, budget: str, recurring: tuple[Any, str], at_us: int
) -> Figures:
    """Make the period's row, unless somebody was faster.

    The lock makes it take turns with changes of the limit, which reach the rows that they see.
    """
    amount = connection.execute(_LOCK_TERMS, {"budget": budget}).scalar_one()
    period = period_at(*recurring, at_us)
    insert_or_skip(
        connection,
        tables.budget_period,
        budget=budget,
        start_us=period.start_us,
        end_us=period.end_us,
        limit_amount=amount or 0,
        posted=0,
        late_posted=0,
        reserved=0,
        suspense=0,
    )
    row = connection.execute(_ONE, {"budget": budget, "at_us": period.start_us}).one()
    return _figures(row)


def _named(values: Collection[str]) -> list[str]:
    return sorted(value for value in values if value)


def _recurring(
    row: AnyRow,
) -> tuple[Any, str]:  # Any: a Recurrence, as the check of the column says
    return row.recurrence, row.time_zone


def _figures(row: AnyRow) -> Figures:
    return _from(dict(row._mapping))


def _from(fields: dict[str, Any]) -> Figures:  # Any: column values
    fields["budget"] = fields.pop("id")
    fields["limit"] = fields.pop("limit_amount")
    fields["thresholds"] = read_thresholds(fields["thresholds"])
    del fields["amount"]
    return Figures(**fields)


def read_thresholds(text: str) -> tuple[int, ...]:
    """Percents as the column holds them: "50,80,100"."""
    return tuple(int(percent) for percent in text.split(",") if percent)
