"""Sums by hour, day and month are the sums of the rows, however usage arrives and whenever it is rated."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from gristmill_contracts.usage import TOKEN_TYPES, Counts, UsageEvent
from gristmill_ledger.database import Database
from gristmill_ledger.rating import rate_behind, rows_behind, shares
from gristmill_ledger.rollups import DAY_US, HOUR_US, day_of, hour_of, month_of
from gristmill_testing.ledger import START_US, make_event
from gristmill_testing.ledger_store import (
    NOW_US,
    post,
    rate_all,
    register,
    stored_rows,
    usage,
)  # fmt: skip

TABLES = {
    "usage_rollup_hourly": (hour_of, 0),
    "usage_rollup_monthly": (month_of, 3),
    "usage_total_daily": (day_of, 4),
    "usage_total_monthly": (month_of, 4),
}
"""Table -> what its buckets are, and how many of the first keys below it leaves out."""
KEYS = ("session", "project", "key", "operation", "model", "kind")
HUGE = 2**63 - 1


def events_of(dice: random.Random, size: int, tenant: str = "acme") -> list[UsageEvent]:
    """Events of a few sessions over five weeks, among them late, odd, unknown and enormous ones."""
    return [
        make_event(
            number,
            tenant=tenant,
            session=dice.choice(("s-1", "s-2")),
            project=dice.choice(("", "rl")),
            key=dice.choice(("", "AKIA1", "AKIA2")),
            model=dice.choice(("tiny", "large")),
            operation=dice.choice(("sample", "forward_backward", "unheard_of")),
            kind=dice.choice(("usage", "usage", "usage", "attempt")),
            counts=None
            if dice.random() < 0.1
            else Counts(
                **{name: dice.choice((0, dice.randrange(5000), HUGE)) for name in TOKEN_TYPES}
            ),
            op_start_us=START_US
            - dice.choice((0, 1, 3, 35 * 24)) * HOUR_US
            + dice.randrange(HOUR_US),
        )
        for number in range(1, size + 1)
    ]


def summed(rows: list[dict[str, Any]], bucket: Any, without: int) -> Counter[Any]:
    """Sums of rows of usage_event by what a rollup is keyed by, in plain Python."""
    sums: Counter[Any] = Counter()
    for row in rows:
        keys = [row[name] for name in KEYS]
        keys[:without] = [""] * without
        place = (row["tenant"], bucket(row["op_start_us"]), *keys, int(bool(row["quarantined"])))
        sums[place, "events"] += 1
        sums[place, "unknown"] += row["prefill"] is None
        for name in TOKEN_TYPES:
            sums[place, name] += row[name] or 0
            sums[place, f"{name}_with"] += bool(row[name])
    return +sums


def rolled_up(database: Database, table: str) -> Counter[Any]:
    sums: Counter[Any] = Counter()
    for row in stored_rows(database, table):
        place = (row["tenant"], row["bucket_us"], *(row[name] for name in KEYS), row["odd"])
        for name in ("events", "unknown", *TOKEN_TYPES, *(f"{name}_with" for name in TOKEN_TYPES)):
            sums[place, name] += row[name]
    return +sums


def check_i5(database: Database) -> None:
    """I5: sum(events) = sum(rollups) = sum(rated), at the cursor."""
    cursors = {row["tenant"]: row["seq"] for row in stored_rows(database, "rating_cursor")}
    rows = [r for r in stored_rows(database) if r["seq"] <= cursors.get(r["tenant"], 0)]
    for table, (bucket, without) in TABLES.items():
        assert rolled_up(database, table) == summed(rows, bucket, without), table
    rated = {(row["tenant"], row["seq"]) for row in stored_rows(database, "rated_usage")}
    assert rated == {(r["tenant"], r["seq"]) for r in rows if r["kind"] != "attempt"}


def answers(database: Database) -> list[Any]:
    """What is told, in several ways that read different sums."""
    questions: list[dict[str, str | int]] = [
        {},
        {"bucket": "month", "group_by": "tenant"},
        {"bucket": "day", "group_by": "model,operation", "include_attempts": "true"},
        {"bucket": "hour", "group_by": "session,key,token_type", "token_type": "sample"},
        {"since": START_US - HOUR_US + 7, "until": START_US + HOUR_US // 2, "group_by": "project"},
        {"bucket": "day", "zone": "Asia/Kolkata", "group_by": "key"},
        {"bucket": "month", "zone": "Europe/Amsterdam"},
        {"bucket": "day", "group_by": "tenant", "include_attempts": "true"},
        {"bucket": "month", "group_by": "operation"},
        {"since": START_US - 34 * DAY_US, "until": START_US + 3 * DAY_US + 5},
        {"group_by": "model", "token_type": "train"},
    ]
    return [usage(database, **question)["rows"] for question in questions]


@pytest.mark.parametrize("seed", range(4))
def test_sums_equal_the_rows_for_any_arrival(database: Database, seed: int) -> None:
    """Batches of two producers and tenants, some again, some late; rated in steps of any size."""
    dice = random.Random(seed)
    for tenant in ("acme", "bolt"):
        register(database, tenant, tenant=tenant)
    waiting = {tenant: events_of(dice, 60, tenant) for tenant in ("acme", "bolt")}
    sent: dict[str, int] = dict.fromkeys(waiting, 0)
    while any(sent[tenant] < len(waiting[tenant]) for tenant in waiting):
        tenant = dice.choice(sorted(waiting))
        first = max(0, sent[tenant] - dice.choice((0, 0, 5)))
        batch = waiting[tenant][first : sent[tenant] + dice.randrange(1, 20)]
        if batch:
            post(database, batch, tenant)
            sent[tenant] = max(sent[tenant], first + len(batch))
        if dice.random() < 0.5:
            size = dice.randrange(1, 30)
            database.write_now(
                lambda c, size=size: rate_behind(c, book="default", now_us=NOW_US, rows_max=size)
            )
        check_i5(database)
    before = answers(database)
    rate_all(database, rows_max=7)
    check_i5(database)
    assert database.read_now(rows_behind) == 0
    assert answers(database) == before


@pytest.mark.parametrize(
    ("rows_max", "parts"),
    [
        (250, {"deep": 250}),
        (1000, {"deep": 900, "next": 100}),
        (1200, {"deep": 900, "next": 280, "last": 20}),
        (5000, {"deep": 900, "next": 280, "last": 30}),
    ],
)
def test_who_lags_most_is_rated_first_and_whole(rows_max: int, parts: dict[str, int]) -> None:
    assert shares([("deep", 900), ("next", 280), ("last", 30)], rows_max) == parts


def test_an_answer_is_the_same_before_during_and_after_rating(database: Database) -> None:
    register(database)
    post(database, events_of(random.Random(5), 90))
    before = answers(database)
    for _ in range(3):
        database.write_now(lambda c: rate_behind(c, book="default", now_us=NOW_US, rows_max=30))
        assert answers(database) == before
    assert database.read_now(rows_behind) == 0


def test_a_late_event_is_found_whatever_was_summed_before(database: Database) -> None:
    register(database)
    post(database, [make_event(1, counts=Counts(train=1))])
    rate_all(database)
    late_us = START_US - 20 * DAY_US
    post(database, [make_event(2, counts=Counts(train=10), op_start_us=late_us)])
    for _ in range(2):
        (row,) = usage(database, until=late_us + HOUR_US)["rows"]
        assert (row["train"], row["cost_pico"]) == (10, 10 * 600_000)
        (row,) = usage(database)["rows"]
        assert row["train"] == 11
        assert rate_all(database) in (0, 1)
    check_i5(database)


def test_a_step_that_fails_leaves_nothing_behind(database: Database) -> None:
    """As a follower that is killed before its commit: the next one begins where the last commit was."""
    register(database)
    post(database, events_of(random.Random(2), 20))

    class KilledError(Exception):
        pass

    def killed(connection: Any) -> None:
        rate_behind(connection, book="default", now_us=NOW_US, rows_max=15)
        raise KilledError

    with pytest.raises(KilledError):
        database.write_now(killed)
    assert stored_rows(database, "rated_usage") == stored_rows(database, "rate") == []
    assert rate_all(database, rows_max=15) == 20
    check_i5(database)


def test_two_followers_rate_each_row_once(database: Database, another_database: Database) -> None:
    for tenant in ("acme", "bolt"):
        register(database, tenant, tenant=tenant)
        post(database, events_of(random.Random(3), 80, tenant), tenant)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda d: rate_all(d, rows_max=9), (database, another_database)))
    assert sum(done) == 160
    check_i5(database)


def test_quantities_that_no_sum_holds_are_summed_exactly(database: Database) -> None:
    register(database)
    post(database, [make_event(n, counts=Counts(train=HUGE, sample=1)) for n in range(1, 5)])
    rate_all(database)
    (row,) = usage(database)["rows"]
    assert (row["train"], row["sample"], row["operations"]) == (4 * HUGE, 4, 4)
    assert row["cost_pico"] == 4 * (HUGE * 600_000 + 400_000)
    amounts = [each["amount_pico"] for each in stored_rows(database, "rated_usage")]
    assert amounts == [HUGE * 600_000 + 400_000] * 4


@given(st.dates(date(1900, 3, 1), date(2100, 2, 28)), st.integers(0, DAY_US - 1))
def test_months_are_the_calendars(day: date, rest_us: int) -> None:
    start = (day - date(1970, 1, 1)).days * DAY_US
    first = (day.replace(day=1) - date(1970, 1, 1)).days * DAY_US
    assert month_of(start + rest_us) == first


@given(st.integers(-HUGE, HUGE))
def test_any_time_has_an_hour_and_a_month(time_us: int) -> None:
    assert -HUGE <= hour_of(time_us) <= time_us
    assert time_us - hour_of(time_us) < HOUR_US
    assert -HUGE <= month_of(time_us) <= HUGE


@settings(max_examples=30)
@given(
    since=st.integers(-40 * 24 * 60, 120),
    minutes=st.integers(1, 45 * 24 * 60),
    bucket=st.sampled_from(("none", "hour", "day", "month")),
    group=st.sampled_from(("", "model", "operation", "tenant,token_type")),
)
def test_any_range_is_answered_from_sums_as_from_rows(
    two: tuple[Database, Database], since: int, minutes: int, bucket: str, group: str
) -> None:
    rated, unrated = two
    since_us = START_US + since * 60 * 10**6
    question: dict[str, str | int] = {
        "since": since_us,
        "until": since_us + minutes * 60 * 10**6,
        "bucket": bucket,
        "group_by": group,
    }
    assert usage(rated, **question) == usage(unrated, **question)


@pytest.fixture
def two(database: Database, other_ledger: Database) -> tuple[Database, Database]:
    for each in (database, other_ledger):
        register(each)
        post(each, events_of(random.Random(11), 100))
    rate_all(database)
    return database, other_ledger


EDGES = (-HUGE, -HUGE + DAY_US, -HUGE + 60 * DAY_US, -1, 0, HUGE - 60 * DAY_US, HUGE - 1, HUGE)


@pytest.mark.parametrize("bucket", ["none", "hour", "day", "month"])
def test_times_that_no_calendar_reaches_are_summed_as_they_are_read(
    database: Database, bucket: str
) -> None:
    register(database)
    post(database, [make_event(n, op_start_us=at_us) for n, at_us in enumerate(EDGES, 1)])
    before = usage(database, bucket=bucket)["rows"]
    assert sum(row["operations"] for row in before) == len(EDGES)
    rate_all(database)
    check_i5(database)
    assert usage(database, bucket=bucket)["rows"] == before


def test_totals_are_what_questions_over_all_tenants_are_answered_from(database: Database) -> None:
    """The finer sums lie about the days and months that the question spans: nobody asks them."""
    register(database)
    days = (0, 3, 40, 80)
    post(database, [
        make_event(n, counts=Counts(train=1), op_start_us=START_US + day * DAY_US)
        for n, day in enumerate(days, 1)
    ])  # fmt: skip
    rate_all(database)
    until = START_US + 90 * DAY_US
    questions: list[dict[str, str | int]] = [
        {"group_by": "tenant"},
        {"group_by": "model", "bucket": "month"},
        {"bucket": "day"},
        {"since": day_of(START_US), "until": day_of(until), "group_by": "tenant"},
    ]
    before = [usage(database, **question)["rows"] for question in questions]
    with database.engine.begin() as connection:
        for table in ("usage_rollup_hourly", "usage_rollup_monthly"):
            connection.execute(text(f"DELETE FROM {table}"))
    assert [usage(database, **question)["rows"] for question in questions] == before
    assert [len(rows) for rows in before] == [1, 4, 4, 1]
    assert usage(database, group_by="operation")["rows"] == []


def test_a_rollup_says_through_which_row_it_is(database: Database) -> None:
    register(database)
    post(database, [make_event(n) for n in range(1, 4)])
    rate_all(database, rows_max=2)
    post(database, [make_event(n) for n in range(4, 6)])
    rate_all(database)
    for table in TABLES:
        (row,) = stored_rows(database, table)
        assert (row["events"], row["through_seq"]) == (5, 5)


def test_rollups_are_state_and_what_was_rated_is_not(database: Database) -> None:
    register(database)
    post(database, [make_event(1)])
    rate_all(database)
    with database.engine.begin() as connection:
        connection.execute(text("DELETE FROM usage_rollup_hourly"))
    assert stored_rows(database, "rated_usage")


def test_who_lags_most_is_rated_first(database: Database) -> None:
    """A tenant that posts all the time never keeps the others waiting."""
    for tenant, size in (("acme", 3), ("zeta", 40)):
        register(database, tenant, tenant=tenant)
        post(database, [make_event(n, tenant=tenant) for n in range(1, size + 1)], tenant)
    database.write_now(lambda c: rate_behind(c, book="default", now_us=NOW_US, rows_max=10))
    assert [row["tenant"] for row in stored_rows(database, "rating_cursor")] == ["zeta"]
