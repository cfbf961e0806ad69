"""The budget of a tenant: told to the ledger, which enforces it, and shown with what is left of it."""

from dataclasses import dataclass
from typing import Final

from gristmill_contracts import conditions
from gristmill_contracts.budgets import BudgetView
from gristmill_contracts.conditions import condition
from gristmill_contracts.errors import GristmillError, UnavailableError
from gristmill_contracts.resources import Condition
from gristmill_contracts.tenant import Tenant
from gristmill_contracts.units import format_pico
from gristmill_sessions.budgets import BudgetLedger, keep_budgets, tenant_budgets

AWAY_AGAIN_S: Final = 5.0
REFUSED_AGAIN_S: Final = 15.0
LOOK_AGAIN_S: Final = 30.0
"""Nobody tells of a budget that is used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a look at the budget came to."""

    condition: Condition | None
    """None = nobody knows yet."""
    again_s: float | None = None


async def look_at_budget(ledger: BudgetLedger, tenant: Tenant) -> Look:
    """Make the ledger's budget that of the spec, and read what is left of it.

    While the ledger is away the condition stays as it was: what is leased is all that may be spent.
    """
    wanted = tenant_budgets(tenant)
    known = conditions.find(tenant.status.conditions, conditions.BUDGET_AVAILABLE)
    if not wanted and known is not None and known.reason == "Unlimited":
        return Look(condition=known)
    name = tenant.metadata.name
    try:
        views = await keep_budgets(ledger, name, "tenant", name, wanted)
    except UnavailableError:
        return Look(condition=known, again_s=AWAY_AGAIN_S)
    except GristmillError as error:
        refused = condition(
            conditions.BUDGET_AVAILABLE,
            False,
            "BudgetRefused",
            f"the ledger refuses it: {error.message}",
        )
        return Look(condition=refused, again_s=REFUSED_AGAIN_S)
    found = budget_condition(tenant, next(iter(views), None))
    return Look(condition=found, again_s=LOOK_AGAIN_S if views else None)


def budget_condition(tenant: Tenant, view: BudgetView | None) -> Condition:
    """view: the budget as the ledger keeps it; None = the tenant has none. Pure."""
    budget = tenant.spec.budget
    if budget is None or view is None:
        return condition(conditions.BUDGET_AVAILABLE, True, "Unlimited", "the tenant has no budget")
    period = view.period
    used, limit = period.posted + period.late_posted, f"{budget.hard} {budget.currency}"
    if used >= period.limit:
        message = f"{format_pico(used)} of {limit} are used; raise spec.budget.hard"
        return condition(conditions.BUDGET_AVAILABLE, False, "BudgetExhausted", message)
    passed = max(period.thresholds_passed, default=None)
    if passed is None:
        message = f"less than {budget.soft_percent} % of {limit} are used"
        return condition(conditions.BUDGET_AVAILABLE, True, "WithinBudget", message)
    message = f"{passed} % of {limit} are used; operations wait once it is used up"
    return condition(conditions.BUDGET_AVAILABLE, True, "SoftLimitPassed", message)
