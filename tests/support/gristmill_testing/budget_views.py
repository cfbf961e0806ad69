"""Budgets as a ledger would show them, for fakes that keep what they were told."""

from gristmill_contracts.budgets import BudgetView, PeriodView, PutBudget
from gristmill_contracts.ids import TenantName


def view_of(tenant: str, name: str, put: PutBudget, posted: int = 0) -> BudgetView:
    """A budget of which `posted` is used."""
    passed = tuple(each for each in put.thresholds if posted * 100 >= put.limit * each)
    period = PeriodView(
        start_us=0, end_us=None, limit=put.limit, posted=posted, late_posted=0, reserved=0,
        suspense=0, available=max(0, put.limit - posted), thresholds_passed=passed,
    )  # fmt: skip
    return BudgetView(
        id=f"{tenant}/{name}", tenant=TenantName(tenant), name=name, scope_type=put.scope_type,
        scope=put.scope, unit=put.unit, limit=put.limit, mode=put.mode, recurrence=put.recurrence,
        time_zone=put.time_zone, thresholds=put.thresholds, source=put.source, created_us=0,
        ended=False, period=period,
    )  # fmt: skip
