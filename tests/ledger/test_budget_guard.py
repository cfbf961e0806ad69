"""One statement looks at what is left and takes it: figures that were read before decide nothing."""

from collections.abc import Callable

import pytest

from gristmill_contracts import limits
from gristmill_contracts.usage import Counts
from gristmill_ledger.budgets import figures
from gristmill_ledger.budgets.amounts import try_reserve
from gristmill_ledger.budgets.decide import Grant
from gristmill_ledger.database import Database
from gristmill_testing import budget_store as budgets
from gristmill_testing.ledger import START_US, make_event
from gristmill_testing.ledger_store import NOW_US, post

LIMIT = 100
EXPIRED_US = NOW_US + int(limits.BUDGET_LEASE_S * 1e6)


def reserved(database: Database) -> None:
    budgets.take(database, 1, 60)


def posted(database: Database) -> None:
    lease = budgets.take(database, 1, 60)
    post(database, [make_event(1, counts=Counts(train=60), lease=lease.id)], "s-1")


def late(database: Database) -> None:
    post(database, [make_event(1, counts=Counts(train=60))], "s-1")


def in_suspense(database: Database) -> None:
    reserved(database)
    budgets.sweep(database, EXPIRED_US)


def lowered(database: Database) -> None:
    budgets.put(database, LIMIT - 60, "b")


@pytest.mark.parametrize("meanwhile", [reserved, posted, late, in_suspense, lowered])
def test_what_went_meanwhile_is_not_given_again(
    database: Database, meanwhile: Callable[[Database], None]
) -> None:
    """Two processes may decide by the same figures; the second one finds nothing left, and holds nothing."""
    budgets.session(database)
    for name in ("a", "b"):
        budgets.put(database, 10 * LIMIT if name == "a" else LIMIT, name, now_us=START_US)
    read = [
        database.write_now(lambda c, name=name: figures.one(c, f"acme/{name}", NOW_US))  # type: ignore[misc]
        for name in ("a", "b")
    ]
    meanwhile(database)
    before = [budgets.figures(database, name) for name in ("a", "b")]
    for amount, fits in ((LIMIT - 60 + 1, False), (LIMIT - 60, True)):
        grants = [Grant(figures=each, amount=amount, floor=amount) for each in read]
        assert database.write_now(lambda c, grants=grants: try_reserve(c, grants)) is fits  # type: ignore[misc]
        if not fits:
            assert [budgets.figures(database, name) for name in ("a", "b")] == before
    assert budgets.view(database, "b").period.available == 0
