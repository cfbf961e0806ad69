"""Usage against budgets: what was held is posted, what was not is late, and nothing is refused."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from sqlalchemy.exc import DBAPIError

from gristmill_contracts import limits
from gristmill_contracts.errors import ConflictError, GristmillError, NotFoundError
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.usage import Counts, UsageEvent
from gristmill_ledger.budgets.settle import settle
from gristmill_ledger.database import Database
from gristmill_ledger.heartbeats import store_heartbeats
from gristmill_ledger.schema import budgets as tables
from gristmill_testing import budget_store as budgets
from gristmill_testing.budget_store import decide, figures, give_back, put, session, sweep, take
from gristmill_testing.ledger import START_US, make_event, make_heartbeat
from gristmill_testing.ledger_store import NOW_US, post, register, stored_rows

LEASE_US = int(limits.BUDGET_LEASE_S * 1e6)
EXPIRED_US = NOW_US + LEASE_US
DAY_US = 86_400_000_000


def spent(number: int, amount: int, lease: str = "", **changes: object) -> UsageEvent:
    return make_event(number, counts=Counts(train=amount), lease=lease, key="GMKEY", **changes)


def together(*works: Callable[[], object]) -> list[object]:
    """Results, or the errors of our own, of works that begin at once."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> object:
        barrier.wait()
        try:
            return work()
        except GristmillError as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


def test_usage_is_taken_off_the_hold_that_it_names(database: Database) -> None:
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    post(database, [spent(1, 30, lease.id), spent(2, 20, lease.id)], "s-1")
    assert figures(database) == (50, 0, 50, 0)
    give_back(database, lease.id)
    assert figures(database) == (50, 0, 0, 0)
    (row,) = stored_rows(database, "reservation_resolution")
    assert (row["kind"], row["posted"], row["voided"]) == ("voided", 50, 50)


def test_a_hold_that_is_used_up_has_ended(database: Database) -> None:
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    post(database, [spent(1, 100, lease.id)], "s-1")
    assert figures(database) == (100, 0, 0, 0)
    (row,) = stored_rows(database, "reservation_resolution")
    assert (row["kind"], row["reason"]) == ("posted", "used_up")
    assert give_back(database, lease.id).rest == {}


def test_f42_usage_that_is_posted_again_counts_once(database: Database) -> None:
    """A settlement that timed out is sent again: posted = what was used, nothing stays reserved."""
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 60, want=budgets.tokens(60))
    for _ in range(3):
        post(database, [spent(1, 60, lease.id)], "s-1")
    assert figures(database) == (60, 0, 0, 0)


def test_usage_without_a_hold_counts_as_late(database: Database) -> None:
    session(database)
    put(database, 10_000, now_us=START_US)
    post(database, [spent(1, 30), spent(2, 5, "no-such-lease")], "s-1")
    assert figures(database) == (0, 35, 0, 0)


def test_usage_over_its_hold_is_late_and_lowers_what_is_left(database: Database) -> None:
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    post(database, [spent(1, 130, lease.id)], "s-1")
    assert figures(database) == (100, 30, 0, 0)


def test_what_began_before_a_budget_does_not_count(database: Database) -> None:
    session(database)
    put(database, 10_000, now_us=NOW_US)
    post(database, [spent(1, 30)], "s-1")
    post(database, [spent(2, 7, op_start_us=NOW_US, op_end_us=NOW_US)], "s-1")
    assert figures(database) == (0, 7, 0, 0)


def test_usage_of_another_session_is_not_taken_off_a_hold(database: Database) -> None:
    session(database)
    session(database, "s-2")
    put(database, 10_000, now_us=START_US)
    lease = take(database, 1, 1)
    post(database, [spent(1, 30, lease.id, session="s-2")], "s-2")
    assert figures(database) == (0, 30, 100, 0)


def test_an_attempt_is_not_billed_and_spends_no_budget(database: Database) -> None:
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    post(database, [spent(1, 30, lease.id, kind="attempt", n=1)], "s-1")
    assert figures(database) == (0, 0, 100, 0)


def test_unknown_usage_is_never_freed_without_a_decision(database: Database) -> None:
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    unknown = make_event(1, counts=None, outcome="unknown", lease=lease.id)
    post(database, [unknown, spent(2, 10, lease.id)], "s-1")
    assert give_back(database, lease.id, {"acme/all": 40}).rest == {"acme/all": 40}
    give_back(database, lease.id)
    assert figures(database) == (10, 0, 0, 40)
    decide(database, lease.id, "acme/all", "post")
    assert figures(database) == (10, 40, 0, 0)


def test_usage_of_any_size_is_stored(database: Database) -> None:
    session(database)
    put(database, 10_000, now_us=START_US)
    most = limits.QUANTITY_MAX
    post(database, [spent(n, most) for n in (1, 2, 3)], "s-1")
    assert figures(database) == (0, most, 0, 0)
    assert budgets.denied(database, 1, 1).posted == most


def test_corrections_are_late_usage_in_either_direction(database: Database) -> None:
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    post(database, [spent(1, 60, lease.id)], "s-1")
    at = {"op_start_us": NOW_US, "op_end_us": NOW_US}
    corrections = [
        spent(1, -20, lease.id, kind="adjustment", n=1, corrects="x", reason="r", **at),
        spent(1, -50, lease.id, kind="void", n=2, corrects="x", reason="r", **at),
    ]
    database.write_now(lambda c: settle(c, "acme", corrections, NOW_US, book="default"))
    assert figures(database) == (60, -70, 40, 0)
    assert budgets.view(database).period.available == 10_000 - 60 + 70 - 40


def test_usage_in_money_is_posted_at_the_price_of_its_start(database: Database) -> None:
    session(database)
    put(database, 10**12, unit="USD")
    lease = take(database, 1, 1)
    event = make_event(1, counts=Counts(prefill=10, sample=5), lease=lease.id)
    post(database, [event], "s-1")
    prices = lease.prices
    assert figures(database)[0] == 10 * prices["prefill"] + 5 * prices["sample"]


def test_f40_usage_at_the_end_of_a_period_adds_to_the_next_one(database: Database) -> None:
    """10 settlements of 1 on either side of midnight, at once: each is in its own day, none is lost."""
    midnight = START_US
    session(database)
    for n in range(1, 21):
        register(database, f"p-{n}", session="s-1")
    put(database, 10_000, recurrence="day", now_us=midnight - DAY_US)

    def settle_one(n: int) -> None:
        at = {"op_start_us": midnight - 11 + n, "op_end_us": midnight}
        post(database, [spent(n, 1, producer_seq=1, **at)], f"p-{n}")

    together(*(partial(settle_one, n) for n in range(1, 21)))
    periods = stored_rows(database, "budget_period")
    used = {row["start_us"]: row["posted"] + row["late_posted"] for row in periods}
    assert used == {midnight - DAY_US: 10, midnight: 10}


def test_an_operation_belongs_to_the_day_that_its_hold_is_of(database: Database) -> None:
    midnight = START_US + DAY_US
    session(database)
    put(database, 10_000, recurrence="day", now_us=START_US)
    lease = take(database, 1, 1, now_us=midnight - 5)
    post(
        database, [spent(1, 30, lease.id, op_start_us=midnight + 3, op_end_us=midnight + 9)], "s-1"
    )
    assert figures(database, now_us=midnight - 1) == (30, 0, 70, 0)
    assert figures(database, now_us=midnight) == (0, 0, 0, 0)


def test_f32_of_8_settlers_of_one_hold_one_wins(
    database: Database, another_database: Database
) -> None:
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    post(database, [spent(1, 40, lease.id)], "s-1")
    sweep(database, EXPIRED_US)
    both = (database, another_database)
    works: list[Callable[[], object]] = []
    for n in range(4):
        works.append(partial(give_back, both[n % 2], lease.id))
        works.append(partial(decide, both[n % 2], lease.id, "acme/all", "post"))
    results = together(*works)
    assert not [each for each in results if isinstance(each, NotFoundError)]
    (row,) = stored_rows(database, "reservation_resolution")
    late = 60 if row["kind"] == "posted" else 0
    assert figures(database) == (40, late, 0, 0)
    assert row["posted"] + row["voided"] == 100


def test_the_database_takes_one_resolution_of_a_hold(database: Database) -> None:
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    give_back(database, lease.id)
    row = stored_rows(database, "reservation_resolution")[0]
    with pytest.raises(DBAPIError), database.engine.begin() as connection:
        connection.execute(
            tables.reservation_resolution.insert().values(**row | {"kind": "posted"})
        )


def test_a_lease_that_ran_out_frees_nothing_until_its_usage_has_come(database: Database) -> None:
    session(database)
    put(database, 100)
    lease = take(database, 1, 100)
    assert sweep(database, EXPIRED_US - 1).suspended == 0
    assert sweep(database, EXPIRED_US).suspended == 1
    assert sweep(database, EXPIRED_US).suspended == 0
    assert figures(database) == (0, 0, 0, 100)
    assert budgets.denied(database, 2, 1, now_us=EXPIRED_US).reserved == 100
    post(database, [spent(1, 70, lease.id)], "s-1")
    assert figures(database) == (70, 0, 0, 30)
    give_back(database, lease.id)
    assert figures(database) == (70, 0, 0, 0)
    # What comes after all is stored, and seen.
    post(database, [spent(2, 5, lease.id)], "s-1")
    assert figures(database) == (70, 5, 0, 0)


def closed(attempt: int, *, acked: int, head: int, state: str = "Closed") -> Heartbeat:
    beat = make_heartbeat("s-1", attempt=attempt)
    beat.view.state = state  # type: ignore[assignment]  # a str of the literal
    beat.acked_seq, beat.head_seq = acked, head
    return beat


@pytest.mark.parametrize(
    ("beat", "freed"),
    [
        (closed(1, acked=9, head=9), True),
        (closed(2, acked=9, head=9), True),
        (closed(1, acked=8, head=9), False),
        (closed(1, acked=9, head=9, state="Draining"), False),
    ],
)
def test_a_session_that_closed_with_all_acknowledged_spends_no_more(
    database: Database, beat: Heartbeat, freed: bool
) -> None:
    session(database)
    put(database, 10_000)
    take(database, 1, 1)
    database.write_now(lambda c: store_heartbeats(c, [beat]))
    sweep(database, NOW_US)
    assert figures(database) == (0, 0, 100, 0)
    swept = sweep(database, EXPIRED_US)
    swept = sweep(database, EXPIRED_US) if not swept.resolved else swept
    assert bool(swept.resolved) == freed
    assert figures(database) == ((0, 0, 0, 0) if freed else (0, 0, 0, 100))


def test_a_closed_session_with_unknown_usage_keeps_its_suspense(database: Database) -> None:
    """Everything is acknowledged, and still nobody knows what was spent: somebody decides."""
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    post(database, [make_event(1, counts=None, outcome="unknown", lease=lease.id)], "s-1")
    database.write_now(lambda c: store_heartbeats(c, [closed(1, acked=1, head=1)]))
    for _ in range(2):
        assert not sweep(database, EXPIRED_US).resolved
    assert figures(database) == (0, 0, 0, 100)
    decide(database, lease.id, "acme/all", "void")
    assert figures(database) == (0, 0, 0, 0)


def test_a_decision_is_final(database: Database) -> None:
    session(database)
    put(database, 10_000)
    lease = take(database, 1, 1)
    with pytest.raises(ConflictError, match="still holds"):
        decide(database, lease.id, "acme/all", "void")
    sweep(database, EXPIRED_US)
    assert decide(database, lease.id, "acme/all", "void") is not None
    assert decide(database, lease.id, "acme/all", "void") is None
    with pytest.raises(ConflictError, match="final"):
        decide(database, lease.id, "acme/all", "post")
    with pytest.raises(NotFoundError):
        decide(database, "no-lease", "acme/all", "void")
    (row,) = stored_rows(database, "reservation_resolution")
    assert (row["kind"], row["decided_by"]) == ("voided", "cli")
    assert figures(database) == (0, 0, 0, 0)


def test_a_threshold_is_told_once_for_each_limit(database: Database) -> None:
    session(database)
    put(database, 100, now_us=START_US)
    told = [post(database, [spent(n, 30)], "s-1").settled.crossings for n in range(1, 5)]
    assert [[each.percent for each in crossings] for crossings in told] == [[], [50], [80], [100]]
    assert budgets.view(database).period.thresholds_passed == (50, 80, 100)
    put(database, 200)
    assert budgets.view(database).period.thresholds_passed == (50,)
    (crossing,) = post(database, [spent(5, 40)], "s-1").settled.crossings
    assert (crossing.budget, crossing.percent, crossing.limit, crossing.used) == (
        "acme/all", 80, 200, 160,
    )  # fmt: skip
