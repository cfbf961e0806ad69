"""Budgets without HTTP: short calls for tests, each in its own transaction."""

from typing import Any

from gristmill_contracts.budgets import (
    BudgetView,
    Decide,
    Denied,
    Lease,
    LeaseAnswer,
    PutBudget,
    Renewed,
    ReturnLease,
    TakeLease,
)
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.usage import Counts
from gristmill_ledger.budgets import leases, returns, suspense
from gristmill_ledger.budgets.definitions import end_budget, put_budget
from gristmill_ledger.budgets.views import view_budget
from gristmill_ledger.database import Database
from gristmill_testing.ledger_store import NOW_US, name_session, register

BIG = 10**15


def tokens(count: int) -> Counts:
    return Counts(train=count)


def session(
    database: Database,
    uid: str = "s-1",
    *,
    tenant: str = "acme",
    attempt: int = 1,
    price_book: str | None = None,
) -> None:
    """A session that is registered, with its log under its own name, as meters do."""
    name_session(database, uid, f"name-{uid}", tenant=tenant, price_book=price_book)
    register(database, uid, tenant=tenant, session=uid, attempt=attempt)


def put(
    database: Database,
    limit: int,
    name: str = "all",
    *,
    tenant: str = "acme",
    now_us: int = NOW_US,
    **changes: Any,
) -> BudgetView:
    """A hard budget in tokens of the whole tenant, unless told."""
    fields: dict[str, Any] = {"scope_type": "tenant", "scope": tenant, "unit": "tokens"}
    message = PutBudget(**(fields | {"limit": limit} | changes))
    return database.write_now(
        lambda c: put_budget(c, tenant, name, message, by="cli", now_us=now_us)
    )


def end(database: Database, name: str = "all", *, now_us: int = NOW_US) -> None:
    database.write_now(
        lambda c: end_budget(c, "acme", name, source="manual", by="cli", now_us=now_us)
    )


def ask(seq: int, need: int | Counts, **changes: Any) -> TakeLease:
    fields: dict[str, Any] = {
        "session": SessionUid("s-1"),
        "attempt": 1,
        "seq": seq,
        "key": "GMKEY",
        "model": "tiny",
        "need": tokens(need) if isinstance(need, int) else need,
    }
    return TakeLease(**(fields | changes))


def answer(
    database: Database, seq: int, need: int | Counts, *, now_us: int = NOW_US, **changes: Any
) -> LeaseAnswer:
    """What the ledger answers to one request. Raises its error."""
    request = ask(seq, need, **changes)
    (found,) = database.write_now(
        lambda c: leases.take(c, [request], book="default", now_us=now_us)
    )
    if isinstance(found, GristmillError):
        raise found
    return found


def take(
    database: Database, seq: int, need: int | Counts, *, now_us: int = NOW_US, **changes: Any
) -> Lease:
    found = answer(database, seq, need, now_us=now_us, **changes)
    assert isinstance(found, Lease), found
    return found


def denied(
    database: Database, seq: int, need: int | Counts, *, now_us: int = NOW_US, **changes: Any
) -> Denied:
    found = answer(database, seq, need, now_us=now_us, **changes)
    assert isinstance(found, Denied), found
    return found


def give_back(
    database: Database,
    lease: str,
    keep: dict[str, int] | None = None,
    *,
    session: str = "s-1",
    attempt: int = 1,
    now_us: int = NOW_US,
) -> Renewed:
    message = ReturnLease(session=SessionUid(session), attempt=attempt, keep=keep or {})
    return database.write_now(lambda c: returns.give_back(c, lease, message, now_us)).renewed


def renew(
    database: Database, lease: str, *, session: str = "s-1", attempt: int = 1, now_us: int = NOW_US
) -> Renewed:
    return database.write_now(lambda c: returns.renew_one(c, lease, session, attempt, now_us))


def sweep(database: Database, now_us: int) -> suspense.Swept:
    return database.write_now(lambda c: suspense.sweep(c, now_us))


def decide(database: Database, lease: str, budget: str, kind: Any, *, now_us: int = NOW_US) -> Any:
    decision = Decide(kind=kind, reason="looked at the node")
    return database.write_now(
        lambda c: suspense.decide_suspense(c, lease, budget, decision, by="cli", now_us=now_us)
    )


def view(database: Database, name: str = "all", *, now_us: int = NOW_US) -> BudgetView:
    return database.read_now(lambda c: view_budget(c, f"acme/{name}", now_us))


def figures(
    database: Database, name: str = "all", *, now_us: int = NOW_US
) -> tuple[int, int, int, int]:
    """posted, late_posted, reserved, suspense of the running period."""
    period = view(database, name, now_us=now_us).period
    return period.posted, period.late_posted, period.reserved, period.suspense
