"""Budgets and suspense as they are shown: pages with cursors, and the running period of each."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import Connection, Row, bindparam, select

from gristmill_contracts.budgets import (
    BudgetPage,
    BudgetView,
    PeriodView,
    SuspensePage,
    SuspenseView,
)
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_ledger.budgets import figures
from gristmill_ledger.budgets.decide import Figures
from gristmill_ledger.budgets.figures import read_thresholds
from gristmill_ledger.budgets.names import UnheardOf, find_unheard_of
from gristmill_ledger.budgets.periods import FOR_EVER_US
from gristmill_ledger.registry import require_found
from gristmill_ledger.schema import budgets as tables

AnyRow = Row[*tuple[Any, ...]]

_budget, _terms = tables.budget.c, tables.budget_terms.c
_crossing, _balance = tables.budget_crossing.c, tables.reservation_balance.c
_suspense = tables.reservation_suspense.c
_BUDGETS: Final = select(tables.budget, _terms.amount, _terms.mode, _terms.thresholds).join(
    tables.budget_terms, _terms.budget == _budget.id
)
_ONE: Final = _BUDGETS.where(_budget.id == bindparam("budget"))
_PASSED: Final = (
    select(_crossing.budget, _crossing.start_us, _crossing.limit_amount, _crossing.percent)
    .where(
        _crossing.budget.in_(bindparam("budgets", expanding=True)),
        _crossing.start_us.in_(bindparam("starts", expanding=True)),
    )
    .order_by(_crossing.percent)
)


def budget_id(tenant: str, name: str) -> str:
    return f"{tenant}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetQuery:
    """Which budgets a page shows. None = whatever it is."""

    tenant: str | None
    scope_type: str | None
    scope: str | None
    ended: bool
    """Those that have ended as well."""
    after: str | None
    limit: int


def view_budget(connection: Connection, budget: str, now_us: int) -> BudgetView:
    """A budget with its running period. Raises NotFoundError."""
    row = connection.execute(_ONE, {"budget": budget}).one_or_none()
    return _views(connection, [require_found(row, f"budget {budget}")], now_us)[0]


def list_budgets(connection: Connection, query: BudgetQuery, now_us: int) -> BudgetPage:
    """Budgets by id, those behind `after`."""
    statement = _BUDGETS.order_by(_budget.id).limit(query.limit + 1)
    for field in ("tenant", "scope_type", "scope"):
        if (value := getattr(query, field)) is not None:
            statement = statement.where(_budget[field] == value)
    if not query.ended:
        statement = statement.where(_terms.amount.is_not(None))
    if query.after is not None:
        statement = statement.where(_budget.id > query.after)
    rows = connection.execute(statement).all()
    shown = rows[: query.limit]
    return BudgetPage(
        budgets=_views(connection, shown, now_us),
        next_after=shown[-1].id if len(rows) > query.limit else None,
    )


def list_suspense(
    connection: Connection, *, tenant: str | None, after: str | None, limit: int
) -> SuspensePage:
    """What is in suspense now, by lease and budget. `after`: `next_after` of the page before."""
    statement = (
        select(tables.reservation_balance, _suspense.reason, _suspense.at_us, _budget.unit)
        .join(
            tables.reservation_suspense,
            (_suspense.lease == _balance.lease) & (_suspense.budget == _balance.budget),
        )
        .join(tables.budget, _budget.id == _balance.budget)
        .where(_balance.suspended == 1)
        .order_by(_balance.lease, _balance.budget)
        .limit(limit + 1)
    )
    if tenant is not None:
        statement = statement.where(_budget.tenant == tenant)
    if after is not None:
        lease, _, budget = after.partition("/")
        behind = (_balance.lease > lease) | ((_balance.lease == lease) & (_balance.budget > budget))
        statement = statement.where(behind)
    rows = connection.execute(statement).all()
    shown = rows[:limit]
    return SuspensePage(
        suspense=[_suspended(row) for row in shown],
        next_after=f"{shown[-1].lease}/{shown[-1].budget}" if len(rows) > limit else None,
    )


def _suspended(row: AnyRow) -> SuspenseView:
    return SuspenseView(
        lease=row.lease,
        budget=row.budget,
        unit=row.unit,
        session=SessionUid(row.session),
        attempt=row.attempt,
        period_start_us=row.start_us,
        amount=row.rest,
        since_us=row.at_us,
        reason=row.reason,
    )


def _views(connection: Connection, rows: Sequence[AnyRow], now_us: int) -> list[BudgetView]:
    running = figures.seen_all(connection, [row.id for row in rows], now_us)
    unheard_of = find_unheard_of(connection, rows)
    starts = {now.start_us for now in running.values()}
    passed: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    found = connection.execute(_PASSED, {"budgets": sorted(running), "starts": sorted(starts)})
    for row in found:
        passed[row.budget, row.start_us, row.limit_amount].append(row.percent)
    views = []
    for row in rows:
        now = running[row.id]
        told = passed[row.id, now.start_us, now.limit]
        views.append(_view(row, now, told, unheard_of.get(row.id, "")))
    return views


def _view(
    row: AnyRow, now: Figures, passed: list[int], unheard_of: UnheardOf | Literal[""]
) -> BudgetView:
    return BudgetView(
        id=row.id,
        tenant=TenantName(row.tenant),
        name=row.name,
        scope_type=row.scope_type,
        scope=row.scope,
        unit=row.unit,
        limit=now.limit,
        mode=row.mode,
        recurrence=row.recurrence,
        time_zone=row.time_zone,
        thresholds=read_thresholds(row.thresholds),
        source=row.source,
        created_us=row.created_us,
        ended=row.amount is None,
        period=PeriodView(
            start_us=now.start_us,
            end_us=None if now.end_us == FOR_EVER_US else now.end_us,
            limit=now.limit,
            posted=now.posted,
            late_posted=now.late_posted,
            reserved=now.reserved,
            suspense=now.suspense,
            available=max(0, now.left),
            thresholds_passed=tuple(passed),
        ),
        unheard_of=unheard_of,
    )
