"""Making, changing and ending budgets. Each change is a fact; the newest one holds."""

import re
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, func, select

from gristmill_contracts import limits
from gristmill_contracts.budgets import TOKENS, BudgetView, PutBudget, Source
from gristmill_contracts.errors import ConflictError, InvalidRequestError
from gristmill_ledger import checks
from gristmill_ledger.budgets import figures
from gristmill_ledger.budgets.amounts import record_crossings
from gristmill_ledger.budgets.granting import show
from gristmill_ledger.budgets.periods import find_zone
from gristmill_ledger.budgets.views import budget_id, view_budget
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.registry import require_found
from gristmill_ledger.schema import budgets as tables

NAME: Final = re.compile(r"[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,126}[a-zA-Z0-9])?")
CURRENCY: Final = re.compile("[A-Z]{3}")
IDENTITY: Final = ("scope_type", "scope", "unit", "recurrence", "time_zone")
AnyRow = Row[*tuple[Any, ...]]

_budget, _terms, _period = tables.budget.c, tables.budget_terms.c, tables.budget_period.c
_ROW: Final = select(tables.budget).where(_budget.id == bindparam("budget"))
_LOCKED_TERMS: Final = (
    select(tables.budget_terms).where(_terms.budget == bindparam("budget")).with_for_update()
)
_BUMP: Final = (
    tables.budget_version.update()
    .where(tables.budget_version.c.tenant == bindparam("of_tenant"))
    .values(version=tables.budget_version.c.version + 1)
)


def check_name(tenant: str, name: str) -> str:
    """The id of the budget. Raises InvalidRequestError for a name that cannot be one."""
    checks.tenant_name(tenant)
    if not NAME.fullmatch(name):
        raise InvalidRequestError(
            f"budget name {name[:140]!r} is not 1 to 128 letters, digits and inner - _ or ."
        )
    return budget_id(tenant, name)


def check_put(tenant: str, put: PutBudget) -> None:
    """Raise InvalidRequestError naming the first field that is out of bounds."""
    checks.text("scope", put.scope)
    if put.scope_type == "tenant" and put.scope != tenant:
        raise InvalidRequestError(
            f"scope is {put.scope!r}, but a budget of scope_type tenant is of its own tenant {tenant!r}"
        )
    if put.unit != TOKENS and not CURRENCY.fullmatch(put.unit):
        raise InvalidRequestError(
            f"unit {put.unit[:40]!r} is neither {TOKENS!r} nor an ISO 4217 code such as USD"
        )
    checks.quantity("limit", put.limit)
    checks.text("time_zone", put.time_zone)
    try:
        find_zone(put.time_zone)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    _check_thresholds(put.thresholds)


def _check_thresholds(thresholds: tuple[int, ...]) -> None:
    if len(thresholds) > limits.BUDGET_THRESHOLDS_MAX:
        raise InvalidRequestError(
            f"{len(thresholds)} thresholds; send at most {limits.BUDGET_THRESHOLDS_MAX}"
        )
    for percent in thresholds:
        if not 1 <= percent <= 100:
            raise InvalidRequestError(f"threshold {percent} is not 1 to 100 percent of the limit")
    if len(set(thresholds)) != len(thresholds):
        raise InvalidRequestError(f"thresholds {list(thresholds)} name one twice; give each once")


def put_budget(
    connection: Connection, tenant: str, name: str, put: PutBudget, *, by: str, now_us: int
) -> BudgetView:
    """Make a budget or change its limit, mode and thresholds; the same again changes nothing.

    by: the service that asks. Raises InvalidRequestError, ConflictError where the budget is another one,
    is written from a resource, or has posted more than the new limit.
    """
    budget = check_name(tenant, name)
    check_put(tenant, put)
    made = insert_or_skip(
        connection,
        tables.budget,
        id=budget,
        tenant=tenant,
        name=name,
        **{field: getattr(put, field) for field in IDENTITY},
        source=put.source,
        created_us=now_us,
        created_by=by,
    )
    thresholds = ",".join(str(percent) for percent in sorted(put.thresholds))
    terms: dict[str, object] = {"amount": put.limit, "mode": put.mode, "thresholds": thresholds}
    if made:
        connection.execute(tables.budget_terms.insert().values(budget=budget, n=0, **terms))
        _check_room(connection, tenant)
    else:
        row = connection.execute(_ROW, {"budget": budget}).one()
        _check_same(row, put)
    known = connection.execute(_LOCKED_TERMS, {"budget": budget}).one()
    if made or any(getattr(known, field) != value for field, value in terms.items()):
        if not made:
            _check_posted(connection, budget, put, now_us)
        _set_terms(connection, tenant, budget, known.n + 1, terms, by=by, now_us=now_us)
        _tell_thresholds(connection, budget, sorted(put.thresholds), now_us)
    return view_budget(connection, budget, now_us)


def end_budget(
    connection: Connection, tenant: str, name: str, *, source: Source, by: str, now_us: int
) -> None:
    """Nothing is held of it any more; what is held settles. A budget that has ended stays so until it is put.

    Raises NotFoundError, or ConflictError for one that is written from a resource.
    """
    budget = check_name(tenant, name)
    row = require_found(
        connection.execute(_ROW, {"budget": budget}).one_or_none(), f"budget {budget}"
    )
    _check_source(row, source)
    known = connection.execute(_LOCKED_TERMS, {"budget": budget}).one()
    if known.amount is None:
        return
    terms: dict[str, object] = {
        "amount": None, "mode": known.mode, "thresholds": known.thresholds,
    }  # fmt: skip
    _set_terms(connection, tenant, budget, known.n + 1, terms, by=by, now_us=now_us)


def _check_room(connection: Connection, tenant: str) -> None:
    """Those of sessions do not count: there are as many as sessions, and they end with them."""
    standing = tables.budget.join(tables.budget_terms, _terms.budget == _budget.id)
    count = connection.execute(
        select(func.count())
        .select_from(standing)
        .where(
            _budget.tenant == tenant,
            _budget.scope_type != "session",
            _terms.amount.is_not(None),
        )
    ).scalar_one()
    if count > limits.BUDGETS_PER_TENANT_MAX:
        raise ConflictError(
            f"tenant {tenant} has {limits.BUDGETS_PER_TENANT_MAX} budgets, the most there may be; end one"
        )


def _check_same(row: AnyRow, put: PutBudget) -> None:
    _check_source(row, put.source)
    for field in IDENTITY:
        recorded, sent = getattr(row, field), getattr(put, field)
        if recorded != sent:
            raise ConflictError(
                f"budget {row.id} has {field} {recorded!r}, not {sent!r}; that never changes: use another "
                "name, and end this one"
            )


def _check_source(row: AnyRow, source: Source) -> None:
    if row.source == "resource" and source != "resource":
        raise ConflictError(
            f"budget {row.id} is written from the resource of {row.scope_type} {row.scope}; change "
            "spec.budget there"
        )
    if row.source != source:
        raise ConflictError(
            f"budget {row.id} was made by hand; end it, and use another name for that of a resource"
        )


def _check_posted(connection: Connection, budget: str, put: PutBudget, now_us: int) -> None:
    known = figures.seen(connection, budget, now_us)
    used = known.posted + known.late_posted
    if put.below_posted == "refuse" and put.limit < used and put.limit < known.limit:
        raise ConflictError(
            f"budget {budget} has {show(known.unit, used)} posted in this period, more than the new limit "
            f"of {show(known.unit, put.limit)}; set at least that, or say that it "
            "is to block (`--block`)"
        )


def _set_terms(
    connection: Connection,
    tenant: str,
    budget: str,
    n: int,
    terms: dict[str, object],
    *,
    by: str,
    now_us: int,
) -> None:
    """Record the change, and bring the running period and those after it up to date."""
    connection.execute(
        tables.budget_limit.insert().values(budget=budget, n=n, set_us=now_us, set_by=by, **terms)
    )
    connection.execute(
        tables.budget_terms.update().where(_terms.budget == budget).values(n=n, **terms)
    )
    if terms["amount"] is not None:
        connection.execute(
            tables.budget_period.update()
            .where(_period.budget == budget, _period.end_us > now_us)
            .values(limit_amount=terms["amount"])
        )
    insert_or_skip(connection, tables.budget_version, tenant=tenant, version=0)
    connection.execute(_BUMP, {"of_tenant": tenant})


def _tell_thresholds(
    connection: Connection, budget: str, thresholds: list[int], now_us: int
) -> None:
    """A limit that is lowered may lie below what was used: its thresholds are passed at once."""
    known = figures.seen(connection, budget, now_us)
    used = known.posted + known.late_posted
    if used > 0:
        period = (budget, known.start_us)
        record_crossings(connection, period, (0, used, known.limit), tuple(thresholds), now_us)
