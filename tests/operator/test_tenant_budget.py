"""The operator tells the ledger of budgets, and shows what is left of them."""

import pytest

from gristmill_contracts import conditions
from gristmill_contracts.budgets import PutBudget
from gristmill_contracts.errors import ConflictError, NotFoundError, UnavailableError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.resources import Condition, Metadata
from gristmill_contracts.session import (
    BaseModelRef,
    BudgetSpec,
    TrainingSession,
    TrainingSessionSpec,
)
from gristmill_contracts.tenant import Tenant, TenantBudget, TenantSpec, TenantStatus
from gristmill_operator.tenant_budget import look_at_budget
from gristmill_sessions.budgets import keep_budgets, session_budgets
from gristmill_testing.operator_bench import BookingLedger

USD = 10**12


def tenant(hard: str | None, known: str = "") -> Tenant:
    budget = None if hard is None else TenantBudget(hard=hard, soft_percent=80)
    noted = [
        Condition(type=conditions.BUDGET_AVAILABLE, status="True", reason=known, message="before")
    ]
    return Tenant(
        metadata=Metadata(name="acme", namespace=""),
        spec=TenantSpec(budget=budget),
        status=TenantStatus(conditions=noted if known else []),
    )


@pytest.mark.parametrize(
    ("posted", "status", "reason"),
    [
        (0, "True", "WithinBudget"),
        (79 * USD // 100, "True", "WithinBudget"),
        (80 * USD // 100, "True", "SoftLimitPassed"),
        (USD, "False", "BudgetExhausted"),
        (2 * USD, "False", "BudgetExhausted"),
    ],
)
async def test_the_condition_says_what_is_left(posted: int, status: str, reason: str) -> None:
    ledger = BookingLedger(posted=posted)
    look = await look_at_budget(ledger, tenant("1.00"))
    assert look.condition is not None
    assert (look.condition.status, look.condition.reason) == (status, reason)
    assert look.again_s is not None
    put = ledger.budgets["acme", "tenant.USD"]
    assert (put.limit, put.below_posted, put.source) == (USD, "block", "resource")


async def test_a_budget_that_is_taken_away_ends() -> None:
    ledger = BookingLedger()
    await look_at_budget(ledger, tenant("1.00"))
    look = await look_at_budget(ledger, tenant(None, "WithinBudget"))
    assert look.condition is not None
    assert look.condition.reason == "Unlimited"
    assert ledger.budgets == {}


async def test_a_tenant_without_a_budget_asks_the_ledger_once() -> None:
    ledger = BookingLedger(refusal=UnavailableError("away"))
    look = await look_at_budget(ledger, tenant(None, "Unlimited"))
    assert look.again_s is None


async def test_while_the_ledger_is_away_the_condition_stays() -> None:
    ledger = BookingLedger(refusal=UnavailableError("away"))
    look = await look_at_budget(ledger, tenant("1.00", "WithinBudget"))
    assert look.condition is not None
    assert look.condition.message == "before"
    assert look.again_s is not None


async def test_a_budget_that_the_ledger_refuses_is_none_to_spend() -> None:
    ledger = BookingLedger(refusal=ConflictError("made by hand"))
    look = await look_at_budget(ledger, tenant("1.00"))
    assert look.condition is not None
    assert (look.condition.status, look.condition.reason) == ("False", "BudgetRefused")


async def test_a_ledger_that_knows_no_budgets_yet_keeps_nobody_from_starting() -> None:
    ledger = BookingLedger(refusal=NotFoundError("no route"))
    assert await keep_budgets(ledger, "acme", "session", "u", {}) == []
    spec = TrainingSessionSpec(
        base_model_ref=BaseModelRef(name="tiny"), budget=BudgetSpec(max_tokens=1)
    )
    session = TrainingSession(metadata=Metadata(name="run"), spec=spec)
    wanted = session_budgets(session, SessionUid("u"), None)
    with pytest.raises(NotFoundError):
        await keep_budgets(ledger, "acme", "session", "u", wanted)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (None, {}),
        (BudgetSpec(max_tokens=7), {"session-u.tokens": ("tokens", 7)}),
        (BudgetSpec(max_cost="12.5"), {"session-u.EUR": ("EUR", 12_500_000_000_000)}),
        (BudgetSpec(max_cost="999999999"), {"session-u.EUR": ("EUR", 2**63 - 1)}),
    ],
)
def test_the_budget_of_a_session_is_in_tokens_or_in_the_currency_of_its_card(
    budget: BudgetSpec | None, expected: dict[str, tuple[str, int]]
) -> None:
    spec = TrainingSessionSpec(base_model_ref=BaseModelRef(name="tiny"), budget=budget)
    session = TrainingSession(metadata=Metadata(name="run"), spec=spec)
    wanted: dict[str, PutBudget] = session_budgets(session, SessionUid("u"), "EUR")
    assert {name: (put.unit, put.limit) for name, put in wanted.items()} == expected
