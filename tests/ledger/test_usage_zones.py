"""Days and months are those of the zone that is asked for, clocks that change included."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.usage import Counts
from gristmill_ledger.calendars import segments, time_us, whole_hours
from gristmill_ledger.database import Database
from gristmill_ledger.rollups import HOUR_US
from gristmill_testing.ledger import make_event
from gristmill_testing.ledger_store import post, rate_all, register, usage


def at(text: str) -> int:
    return time_us(datetime.fromisoformat(text))


def fill(
    database: Database, first: str, hours: int, *, rated: bool, step_us: int = HOUR_US
) -> None:
    """One event of one train token in each hour."""
    register(database)
    start = at(first)
    post(database, [
        make_event(n, op_start_us=start + (n - 1) * step_us, counts=Counts(train=1))
        for n in range(1, hours + 1)
    ])  # fmt: skip
    if rated:
        rate_all(database)


@pytest.mark.parametrize("rated", [True, False])
def test_f52_a_day_of_25_hours_is_one_day(database: Database, rated: bool) -> None:
    fill(database, "2026-10-24T20:00:00Z", 30, rated=rated)
    rows = usage(database, bucket="day", zone="Europe/Amsterdam")["rows"]
    assert [(row["bucket_start"], row["train"]) for row in rows] == [
        ("2026-10-24T00:00:00+02:00", 2),
        ("2026-10-25T00:00:00+02:00", 25),
        ("2026-10-26T00:00:00+01:00", 3),
    ]
    day = rows[1]
    assert day["bucket_end_us"] - day["bucket_start_us"] == 25 * HOUR_US
    assert [row["bucket_end_us"] for row in rows[:2]] == [r["bucket_start_us"] for r in rows[1:]]


@pytest.mark.parametrize("rated", [True, False])
def test_f52_a_day_of_23_hours_is_one_day(database: Database, rated: bool) -> None:
    fill(database, "2026-03-28T22:00:00Z", 26, rated=rated)
    rows = usage(database, bucket="day", zone="Europe/Amsterdam")["rows"]
    assert [(row["bucket_start"], row["train"]) for row in rows] == [
        ("2026-03-28T00:00:00+01:00", 1),
        ("2026-03-29T00:00:00+01:00", 23),
        ("2026-03-30T00:00:00+02:00", 2),
    ]


@pytest.mark.parametrize("rated", [True, False])
def test_the_hour_that_comes_twice_is_two_hours(database: Database, rated: bool) -> None:
    fill(database, "2026-10-25T00:00:00Z", 2, rated=rated)
    rows = usage(database, bucket="hour", zone="Europe/Amsterdam")["rows"]
    assert [(row["bucket_start"], row["train"]) for row in rows] == [
        ("2026-10-25T02:00:00+02:00", 1),
        ("2026-10-25T02:00:00+01:00", 1),
    ]


@pytest.mark.parametrize("rated", [True, False])
def test_a_zone_off_the_hour_splits_utcs_hours(database: Database, rated: bool) -> None:
    """18:30 in UTC is midnight in Kolkata."""
    fill(database, "2026-05-01T18:00:00Z", 4, rated=rated, step_us=HOUR_US // 4)
    rows = usage(database, bucket="day", zone="Asia/Kolkata")["rows"]
    assert [(row["bucket_start"], row["train"]) for row in rows] == [
        ("2026-05-01T00:00:00+05:30", 2),
        ("2026-05-02T00:00:00+05:30", 2),
    ]


@pytest.mark.parametrize("rated", [True, False])
@pytest.mark.parametrize(
    ("zone", "starts"),
    [
        ("UTC", [("2026-02-01T00:00:00Z", 2), ("2026-03-01T00:00:00Z", 2)]),
        ("Asia/Tokyo", [("2026-03-01T00:00:00+09:00", 4)]),
        ("America/New_York", [("2026-02-01T00:00:00-05:00", 4)]),
    ],
)
def test_months_are_of_the_zone(
    database: Database, rated: bool, zone: str, starts: list[tuple[str, int]]
) -> None:
    fill(database, "2026-02-28T22:00:00Z", 4, rated=rated)
    rows = usage(database, bucket="month", zone=zone)["rows"]
    assert [(row["bucket_start"], row["train"]) for row in rows] == starts


def test_a_midnight_that_the_clocks_skip_begins_with_the_first_moment_after_it(
    database: Database,
) -> None:
    """Cairo's clocks went from 00:00 to 01:00 on 2026-04-24."""
    fill(database, "2026-04-23T20:00:00Z", 6, rated=True)
    rows = usage(database, bucket="day", zone="Africa/Cairo")["rows"]
    assert [(row["bucket_start_us"], row["train"]) for row in rows] == [
        (at("2026-04-22T22:00:00Z"), 2),
        (at("2026-04-23T22:00:00Z"), 4),
    ]


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd", "Europe", "é", "a" * 300])
def test_a_zone_that_is_none_is_refused(database: Database, zone: str) -> None:
    with pytest.raises(InvalidRequestError, match="zone"):
        usage(database, zone=zone)


@pytest.mark.parametrize("name", ["UTC", "Europe/Amsterdam", "Asia/Kathmandu", "Pacific/Apia"])
def test_segments_say_what_the_zone_says(name: str) -> None:
    zone = ZoneInfo(name)
    parts = segments(name, None, None)
    assert parts[-1].until_us is None
    for year in range(1971, 2099, 3):
        for month in (1, 4, 7, 11):
            moment = datetime(year, month, 3, 5, tzinfo=UTC)
            offset = moment.astimezone(zone).utcoffset()
            found = next(p for p in parts if p.until_us is None or time_us(moment) < p.until_us)
            assert offset is not None
            assert found.offset_us == offset.total_seconds() * 10**6, moment


def test_only_the_segments_of_the_range_count() -> None:
    """Amsterdam had no whole-hour offset once; Lord Howe has none in summer."""
    since, until = at("2026-01-01T00:00:00Z"), at("2026-12-01T00:00:00Z")
    assert [p.offset_us // HOUR_US for p in segments("Europe/Amsterdam", since, until)] == [1, 2, 1]
    assert whole_hours(segments("Europe/Amsterdam", since, until))
    assert not whole_hours(segments("Australia/Lord_Howe", since, until))
