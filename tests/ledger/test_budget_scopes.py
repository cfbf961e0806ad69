"""Whose usage a budget bounds: that of its tenant, project, session or key, in tokens or money, and no other."""

from dataclasses import dataclass
from typing import Any

import pytest

from gristmill_contracts.http import RegisterSession
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger.database import Database
from gristmill_ledger.prices import put_price_book
from gristmill_ledger.registry import register_session
from gristmill_testing import budget_store as budgets
from gristmill_testing.budget_store import figures
from gristmill_testing.ledger import START_US, make_event
from gristmill_testing.ledger_store import NOW_US, post, register

MICROS = 3
"""Price of every token: what a budget in USD counts in place of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """Of whom an operation is."""

    tenant: str = "acme"
    project: str = "rl"
    session: str = "s-1"
    key: str = "GM1"


BOUND = Who()
NEIGHBOURS = {
    "tenant": Who(tenant="bolt", session="s-bolt"),
    "project": Who(project="sft", session="s-2"),
    "session": Who(session="s-3"),
    "key": Who(key="GM2"),
}
"""By scope: who differs from BOUND in that, and in nothing that another scope could tell apart."""
SCOPES = {"tenant": "acme", "project": "rl", "session": "s-1", "key": "GM1"}


@pytest.fixture(autouse=True)
def sessions(database: Database) -> None:
    prices = [Price(model="*", token_type=name, micros_per_mtok=MICROS) for name in TOKEN_TYPES]
    book = PriceBook(name="card", currency="USD", effective_from_us=0, prices=prices)
    database.write_now(lambda c: put_price_book(c, "card", book))
    for who in {each.session: each for each in (BOUND, *NEIGHBOURS.values())}.values():
        message = RegisterSession(
            uid=SessionUid(who.session), tenant=TenantName(who.tenant), project=who.project,
            name=who.session, model="tiny", rank=8, created_us=START_US, price_book="card",
        )  # fmt: skip
        database.write_now(lambda c, message=message: register_session(c, message))  # type: ignore[misc]
        register(database, who.session, tenant=who.tenant, session=who.session)


def held(database: Database, who: Who, seq: int, need: int) -> dict[str, int]:
    """The budgets that an operation is held of, and how much of each."""
    want = budgets.tokens(need)
    lease = budgets.take(
        database, seq, need, session=SessionUid(who.session), key=who.key, want=want
    )
    return {hold.budget: hold.amount for hold in lease.holds}


def use(database: Database, who: Who, number: int, tokens: int) -> None:
    """Usage that nobody held anything for."""
    event = make_event(
        number, tenant=who.tenant, project=who.project, session=who.session, key=who.key,
        counts=Counts(train=tokens),
    )  # fmt: skip
    post(database, [event], who.session)


@pytest.mark.parametrize(("unit", "price"), [("tokens", 1), ("USD", MICROS)])
@pytest.mark.parametrize("scope_type", SCOPES)
def test_a_budget_bounds_what_is_of_its_scope_and_nothing_else(
    database: Database, scope_type: str, unit: str, price: int
) -> None:
    put: dict[str, Any] = {
        "scope_type": scope_type,
        "scope": SCOPES[scope_type],
        "unit": unit,
        "now_us": START_US,
    }
    other = NEIGHBOURS[scope_type]
    budgets.put(database, 100 * price, "b", **put)
    assert held(database, BOUND, 1, 60) == {"acme/b": 60 * price}
    assert held(database, other, 2, 10**6) == {}
    found = budgets.denied(database, 3, 41, session=SessionUid(BOUND.session), key=BOUND.key)
    assert (found.budget, found.limit, found.reserved) == ("acme/b", 100 * price, 60 * price)
    use(database, BOUND, 1, 30)
    use(database, other, 2 if other.session == BOUND.session else 1, 10**6)
    assert figures(database, "b") == (0, 30 * price, 60 * price, 0)
    # What is raised lets the rest go on, to the token.
    budgets.put(database, 131 * price, "b", **put)
    assert held(database, BOUND, 4, 41) == {"acme/b": 41 * price}
    assert budgets.view(database, "b", now_us=NOW_US).period.available == 0


@pytest.mark.parametrize("scope_type", SCOPES)
def test_a_lower_scope_cannot_spend_what_a_higher_one_has_no_more(
    database: Database, scope_type: str
) -> None:
    """Each budget that applies must have it; none of the others is held of meanwhile."""
    for name, scope in SCOPES.items():
        limit = 10 if name == scope_type else 1000
        budgets.put(database, limit, name, scope_type=name, scope=scope)
    assert budgets.denied(database, 1, 11, key=BOUND.key).budget == f"acme/{scope_type}"
    assert [figures(database, name) for name in SCOPES] == [(0, 0, 0, 0)] * len(SCOPES)
    assert held(database, BOUND, 2, 10) == {f"acme/{name}": 10 for name in SCOPES}
