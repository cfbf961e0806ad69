"""The budgets of resources at the ledger: which ones a spec asks for, and how they are kept so."""

from collections.abc import Mapping
from typing import Final, Protocol

from gristmill_contracts.budgets import TOKENS, BudgetView, PutBudget, ScopeType
from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.limits import QUANTITY_MAX
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_contracts.units import pico_from_decimal

DEFAULT_CURRENCY: Final = "USD"
"""Of a session whose rate card is not known: the currency of the ledger's example prices."""
EXHAUSTED: Final = 100


class BudgetLedger(Protocol):
    """What the ledger is asked about budgets."""

    async def put_budget(self, tenant: str, name: str, budget: PutBudget) -> BudgetView: ...

    async def list_budgets(
        self, tenant: str, scope_type: ScopeType, scope: str
    ) -> list[BudgetView]: ...

    async def end_budget(self, tenant: str, name: str) -> None: ...


def tenant_budgets(tenant: Tenant) -> dict[str, PutBudget]:
    """By name; empty = no bound. A name holds the unit, which never changes of a budget."""
    spec = tenant.spec.budget
    if spec is None:
        return {}
    put = _put(
        "tenant",
        tenant.metadata.name,
        spec.currency,
        pico_from_decimal(spec.hard),
        (spec.soft_percent,),
    )
    return {f"tenant.{spec.currency}": put}


def session_budgets(
    session: TrainingSession, uid: SessionUid, currency: str | None
) -> dict[str, PutBudget]:
    """By name; empty = the tenant's budgets alone. currency: of the session's rate card."""
    spec = session.spec.budget
    wanted: dict[str, PutBudget] = {}
    if spec is not None and spec.max_tokens is not None:
        wanted[f"session-{uid}.{TOKENS}"] = _put("session", uid, TOKENS, spec.max_tokens, (80,))
    if spec is not None and spec.max_cost is not None:
        unit = currency or DEFAULT_CURRENCY
        limit = pico_from_decimal(spec.max_cost)
        wanted[f"session-{uid}.{unit}"] = _put("session", uid, unit, limit, (80,))
    return wanted


def _put(
    scope_type: ScopeType, scope: str, unit: str, limit: int, percents: tuple[int, ...]
) -> PutBudget:
    return PutBudget(
        scope_type=scope_type,
        scope=scope,
        unit=unit,
        # A resource may name more than the ledger's integers hold: that much nobody spends.
        limit=min(limit, QUANTITY_MAX),
        thresholds=tuple(sorted({*percents, EXHAUSTED})),
        source="resource",
        # A limit that is lowered below what was used must block, not stay at the old one.
        below_posted="block",
    )


async def keep_budgets(
    ledger: BudgetLedger,
    tenant: str,
    scope_type: ScopeType,
    scope: str,
    wanted: Mapping[str, PutBudget],
) -> list[BudgetView]:
    """Make the budgets of a resource so, and end those that it asks for no more. Raises the ledger's errors."""
    views = [await ledger.put_budget(tenant, name, put) for name, put in wanted.items()]
    try:
        found = await ledger.list_budgets(tenant, scope_type, scope)
    except NotFoundError:
        # A ledger of the release before, which is about to be upgraded, has none.
        return views
    for known in found:
        if known.source == "resource" and known.name not in wanted:
            await ledger.end_budget(tenant, known.name)
    return views
