"""Leases: a part of every budget that applies, or of none; renewed, given back, run out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.event import listen, remove

from gristmill_contracts import limits
from gristmill_contracts.errors import ConflictError, FencedError, NotFoundError
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger.budgets import leases
from gristmill_ledger.budgets.decide import lease_amount, passed, worst_prices
from gristmill_ledger.budgets.figures import shown
from gristmill_ledger.database import Database
from gristmill_ledger.prices import PriceList, put_price_book
from gristmill_testing import budget_store as budgets
from gristmill_testing.budget_store import figures, give_back, put, renew, session, sweep, take
from gristmill_testing.ledger import START_US, make_event
from gristmill_testing.ledger_store import NOW_US, post, register, stored_rows

LEASE_US = int(limits.BUDGET_LEASE_S * 1e6)
USD = 10**12


def price(database: Database, micros: int, *, book: str) -> None:
    rows = [Price(model="tiny", token_type=name, micros_per_mtok=micros) for name in TOKEN_TYPES]
    message = PriceBook(name=book, currency="USD", effective_from_us=0, prices=rows)
    database.write_now(lambda c: put_price_book(c, book, message))


@pytest.mark.parametrize(
    ("left", "need", "least", "want", "amount"),
    [
        (10_000, 1, 1, None, 100),  # 1 % of what is left
        (100, 1, 1, None, 1),  # it shrinks toward the limit
        (10_000, 500, 500, None, 500),  # at least the operation that waits
        (10_000, 1, 1, 30, 30),  # no more than is of use
        (10_000, 50, 50, 30, 50),
        (100, 1000, 1, None, 100),  # a stream gets what is left
        (100, 1000, 1000, None, None),  # training all or nothing
        (100, 100, 100, None, 100),
        (99, 100, 100, None, None),
        (0, 0, 0, None, 0),  # what costs nothing is free
        (-5, 0, 0, None, 0),
        (-5, 1, 1, None, None),
    ],
)
def test_how_much_a_lease_holds(
    left: int, need: int, least: int, want: int | None, amount: int | None
) -> None:
    assert lease_amount(left, need=need, least=least, want=want) == amount


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.none() | st.integers(0, 2**63 - 1),
)
def test_a_lease_never_holds_more_than_is_left(
    left: int, need: int, least: int, want: int | None
) -> None:
    least = min(least, need)
    amount = lease_amount(left, need=need, least=least, want=want)
    if amount is None:
        assert least > max(left, 0)
    else:
        assert least <= amount <= max(left, 0)


@pytest.mark.parametrize(
    ("before", "after", "limit", "expected"),
    [
        (0, 49, 100, []),
        (0, 50, 100, [50]),
        (49, 50, 100, [50]),
        (50, 51, 100, []),  # once
        (0, 100, 100, [50, 80, 100]),
        (0, 500, 100, [50, 80, 100]),
        (0, 1, 3, []),
        (0, 2, 3, [50]),  # 1.5 is passed at 2
        (60, 40, 100, []),  # a correction in favour tells nothing
        (0, 5, 0, []),
    ],
)
def test_a_threshold_is_passed_on_the_way_up(
    before: int, after: int, limit: int, expected: list[int]
) -> None:
    assert passed(before, after, limit, (50, 80, 100)) == expected


def test_the_worst_price_of_the_time_of_a_lease_is_reserved_with() -> None:
    rows = {("tiny", name): [(0, 5), (1000, 9), (2000, 7)] for name in TOKEN_TYPES}
    prices = PriceList(book="b", currency="USD", rows=rows)
    far = 10**15
    assert worst_prices(prices, "tiny", far, far) == dict.fromkeys(TOKEN_TYPES, 7)
    assert worst_prices(prices, "tiny", 500, 2500) == dict.fromkeys(TOKEN_TYPES, 9)
    assert worst_prices(prices, "other", 500, 2500) is None


def test_without_a_budget_nothing_is_bounded(database: Database) -> None:
    session(database)
    lease = take(database, 1, budgets.BIG)
    assert (lease.id, lease.holds, lease.expires_in_s) == ("", [], limits.BUDGET_ASK_S)
    assert stored_rows(database, "budget_lease") == []


def test_a_lease_holds_a_part_of_every_budget_that_applies(database: Database) -> None:
    session(database)
    session(database, "s-2")
    put(database, 10_000)
    put(database, 500, "mine", scope_type="session", scope="s-1")
    put(database, 500, "other", scope_type="session", scope="s-2")
    put(database, 300, "key", scope_type="key", scope="GMKEY")
    put(database, 300, "project", scope_type="project", scope="elsewhere")
    lease = take(database, 1, 7)
    assert {hold.budget: (hold.amount, hold.floor) for hold in lease.holds} == {
        "acme/all": (100, 7), "acme/mine": (7, 7), "acme/key": (7, 7),
    }  # fmt: skip
    assert figures(database) == (0, 0, 100, 0)
    assert figures(database, "other") == (0, 0, 0, 0)


def test_a_budget_without_room_denies_and_nothing_is_held_of_the_others(database: Database) -> None:
    session(database)
    put(database, 10_000, "a")
    put(database, 10, "b", scope_type="session", scope="s-1")
    found = budgets.denied(database, 1, 11)
    assert (found.budget, found.limit, found.wanted, found.reason) == (
        "acme/b",
        10,
        11,
        "exhausted",
    )
    assert figures(database, "a") == figures(database, "b") == (0, 0, 0, 0)
    assert take(database, 2, 10).holds[1].amount == 10


def test_the_same_request_sent_again_is_the_same_lease(database: Database) -> None:
    session(database)
    put(database, 10_000)
    first = take(database, 7, 1)
    again = take(database, 7, 1, now_us=NOW_US + 1_000_000)
    assert again.id == first.id
    assert again.holds == first.holds
    assert again.expires_in_s == first.expires_in_s - 1
    assert figures(database) == (0, 0, 100, 0)
    give_back(database, first.id)
    assert take(database, 7, 1).expires_in_s == 0
    with pytest.raises(ConflictError, match="another seq"):
        take(database, 7, 1, key="other")


def test_a_budget_of_0_lets_nothing_begin_but_what_is_free(database: Database) -> None:
    session(database)
    put(database, 0)
    assert budgets.denied(database, 1, 1).limit == 0
    assert take(database, 2, Counts()).holds[0].amount == 0


def test_a_soft_budget_denies_nothing(database: Database) -> None:
    session(database)
    put(database, 5, mode="soft")
    assert take(database, 1, 100).holds[0].amount == 100
    assert figures(database) == (0, 0, 100, 0)


def test_money_is_reserved_at_the_price_of_the_model(database: Database) -> None:
    session(database, price_book="card")
    price(database, 2_000_000, book="card")
    put(database, USD, unit="USD")
    lease = take(database, 1, 1000)
    assert lease.prices == dict.fromkeys(TOKEN_TYPES, 2_000_000)
    (hold,) = lease.holds
    assert (hold.unit, hold.floor, hold.amount) == ("USD", 2_000_000_000, USD // 100)


def test_a_model_without_a_price_is_never_free_of_a_budget_in_money(database: Database) -> None:
    session(database, price_book="card")
    price(database, 1, book="card")
    put(database, USD, unit="EUR")
    assert budgets.denied(database, 1, 1).reason == "currency"
    put(database, USD, "usd", unit="USD")
    budgets.end(database)
    assert budgets.denied(database, 2, 1, model="unheard-of").reason == "unpriced"


def test_a_lease_given_back_frees_what_is_left_of_it(database: Database) -> None:
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    assert give_back(database, lease.id, {"acme/all": 40}).rest == {"acme/all": 40}
    assert figures(database) == (0, 0, 40, 0)
    # An older word that comes late changes nothing: a hold never grows.
    assert give_back(database, lease.id, {"acme/all": 90}).rest == {"acme/all": 40}
    assert give_back(database, lease.id).rest == {}
    assert give_back(database, lease.id).rest == {}
    assert figures(database) == (0, 0, 0, 0)
    (row,) = stored_rows(database, "reservation_resolution")
    assert (row["kind"], row["voided"]) == ("voided", 40)


def test_a_lease_is_renewed_and_runs_out(database: Database) -> None:
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    assert lease.expires_in_s == limits.BUDGET_LEASE_S
    later = NOW_US + LEASE_US // 2
    assert renew(database, lease.id, now_us=later).expires_in_s == limits.BUDGET_LEASE_S
    assert sweep(database, NOW_US + LEASE_US).suspended == 0
    assert sweep(database, later + LEASE_US).suspended == 1
    assert figures(database) == (0, 0, 0, 100)
    # Too late: nobody else may have it, but its meter may not go on with it either.
    assert renew(database, lease.id, now_us=later + LEASE_US + 1).expires_in_s == 0


def test_a_lease_is_spent_no_longer_than_its_period_or_its_prices(database: Database) -> None:
    session(database)
    put(database, 10_000, recurrence="day")
    midnight = START_US + 86_400_000_000
    lease = take(database, 1, 1, now_us=midnight - 10_000_000)
    assert lease.expires_in_s == 10
    assert renew(database, lease.id, now_us=midnight - 4_000_000).expires_in_s == 4
    # What runs is still held after midnight, in the day that it began in.
    assert renew(database, lease.id, now_us=midnight + 1).rest == {"acme/all": 100}
    assert sweep(database, midnight + 5_000_000).suspended == 0


def test_a_lease_belongs_to_its_session_and_newest_attempt(database: Database) -> None:
    session(database)
    session(database, "s-2")
    put(database, 10_000)
    lease = take(database, 1, 1)
    with pytest.raises(NotFoundError):
        give_back(database, lease.id, session="s-2")
    with pytest.raises(NotFoundError):
        give_back(database, "no-lease")
    register(database, "s-1", attempt=2)
    with pytest.raises(FencedError):
        take(database, 2, 1, attempt=1)
    with pytest.raises(FencedError):
        give_back(database, lease.id, attempt=1)
    # The newer attempt has read the log, and answers for the lease of the older one.
    assert give_back(database, lease.id, attempt=2).rest == {}
    assert figures(database) == (0, 0, 0, 0)


def test_a_session_that_nobody_registered_gets_no_lease(database: Database) -> None:
    with pytest.raises(NotFoundError, match="not registered"):
        take(database, 1, 1)


def test_a_lowered_limit_blocks_until_it_drains(database: Database) -> None:
    session(database)
    put(database, 1000)
    lease = take(database, 1, 500)
    put(database, 100)
    assert budgets.denied(database, 2, 1).reserved == 500
    give_back(database, lease.id)
    assert take(database, 3, 100).holds[0].amount == 100
    put(database, 2000)
    assert take(database, 4, 1900).holds[0].amount == 1900


def test_the_version_tells_that_budgets_changed(database: Database) -> None:
    session(database)
    assert take(database, 1, 1).version == 0
    put(database, 10)
    put(database, 10)
    assert take(database, 2, 1).version == 1
    put(database, 20)
    assert take(database, 3, 1).version == 2
    budgets.end(database)
    assert take(database, 4, 1).version == 3


def test_a_batch_is_answered_as_if_each_came_alone(database: Database) -> None:
    session(database)
    put(database, 25)
    requests = [budgets.ask(n, 10) for n in (1, 2, 3, 1)]
    requests.append(budgets.ask(9, 5, session="unknown"))
    found = database.write_now(lambda c: leases.take(c, requests, book="default", now_us=NOW_US))
    assert [type(each).__name__ for each in found] == [
        "Lease", "Lease", "Denied", "Lease", "NotFoundError",
    ]  # fmt: skip
    assert found[0] == found[3]
    assert figures(database) == (0, 0, 20, 0)


def test_f46_a_stream_gets_exactly_what_is_left(database: Database) -> None:
    """100 left, max_tokens 1,000: 100 are held, and posted never passes the limit."""
    session(database)
    put(database, 100)
    lease = take(database, 1, 1000, least=budgets.tokens(1))
    assert lease.holds[0].amount == 100
    assert lease.holds[0].floor == 1000
    post(database, [make_event(1, counts=Counts(sample=100), lease=lease.id)], "s-1")
    assert figures(database) == (100, 0, 0, 0)
    assert budgets.denied(database, 2, 1000, least=budgets.tokens(1)).posted == 100


@pytest.mark.parametrize("count", [8, 64])
def test_f58_leases_that_wait_together_cost_as_many_statements_as_one(
    database: Database, count: int
) -> None:
    """A hot budget is changed once for all of them: its row is what writers would queue for."""
    put(database, 10**9)
    for n in range(count):
        session(database, f"m-{n}")
    requests = [budgets.ask(n, 10, session=f"m-{n}", want=budgets.tokens(10)) for n in range(count)]
    statements: list[str] = []

    def count_one(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        statements.append(statement.split(maxsplit=1)[0])

    listen(database.engine, "before_cursor_execute", count_one)
    found = database.write_now(lambda c: leases.take(c, requests, book="default", now_us=NOW_US))
    remove(database.engine, "before_cursor_execute", count_one)
    assert len(found) == count
    assert statements.count("UPDATE") == 1
    assert statements.count("INSERT") <= 4
    assert len(statements) <= 12
    assert figures(database) == (0, 0, count * 10, 0)


def test_a_tenant_has_no_more_standing_budgets_than_the_bound(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BUDGETS_PER_TENANT_MAX", 2)
    for n in range(5):
        put(database, 1, f"of-session-{n}", scope_type="session", scope=f"s-{n}")
    put(database, 1, "a")
    put(database, 1, "b")
    with pytest.raises(ConflictError, match="end one"):
        put(database, 1, "c")
    budgets.end(database, "a")
    put(database, 1, "c")
    assert len(stored_rows(database, "budget")) == 8


def test_f28_a_limit_that_is_told_twice_is_one_limit(database: Database) -> None:
    """A raise is told as the new limit, never as what to add: an answer that was lost costs nothing."""
    budgets.put(database, 10)
    for _ in range(2):
        assert budgets.put(database, 110).limit == 110
    assert [row["amount"] for row in stored_rows(database, "budget_limit")] == [10, 110]


def test_the_fullest_budgets_come_first_where_not_all_have_series(database: Database) -> None:
    session(database)
    for name, limit in (("low", 1000), ("high", 100), ("nothing", 0), ("huge", 2**63 - 1)):
        budgets.put(database, limit, name, now_us=START_US)
    budgets.put(database, 50, "of-a-session", scope_type="session", scope="s-1", now_us=START_US)
    post(database, [make_event(1, counts=Counts(train=60))], "s-1")
    found = database.read_now(lambda c: shown(c, NOW_US))
    assert [each.budget for each in found] == ["acme/high", "acme/low", "acme/huge", "acme/nothing"]
    assert {each.posted + each.late_posted for each in found} == {60}
