"""Days, weeks and months of a time zone, as tables. Pure."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts.budgets import Recurrence
from gristmill_ledger.budgets.periods import FOR_EVER_US, LAST_US, Period, find_zone, period_at

HOUR_US = 3_600_000_000
ZONES = (
    "UTC", "Europe/Amsterdam", "America/New_York", "Asia/Shanghai", "Asia/Kolkata", "America/Havana",
    "Africa/Cairo", "Australia/Lord_Howe", "Pacific/Apia", "America/Sao_Paulo",
)  # fmt: skip


def us(text: str) -> int:
    moment = datetime.fromisoformat(text)
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def period(recurrence: Recurrence, zone: str, at: str) -> Period:
    return period_at(recurrence, zone, us(at))


@pytest.mark.parametrize(
    ("recurrence", "zone", "at", "start", "end"),
    [
        ("day", "UTC", "2026-11-30T14:00:00Z", "2026-11-30T00:00:00Z", "2026-12-01T00:00:00Z"),
        ("day", "UTC", "2026-11-30T00:00:00Z", "2026-11-30T00:00:00Z", "2026-12-01T00:00:00Z"),
        ("day", "UTC", "2026-11-29T23:59:59.999999Z", "2026-11-29T00:00:00Z", "2026-11-30T00:00:00Z"),
        ("week", "UTC", "2026-11-29T12:00:00Z", "2026-11-23T00:00:00Z", "2026-11-30T00:00:00Z"),
        ("week", "UTC", "2026-11-30T00:00:00Z", "2026-11-30T00:00:00Z", "2026-12-07T00:00:00Z"),
        ("month", "UTC", "2026-12-31T23:00:00Z", "2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z"),
        ("month", "UTC", "2028-02-29T12:00:00Z", "2028-02-01T00:00:00Z", "2028-03-01T00:00:00Z"),
        ("month", "Asia/Kolkata", "2026-11-30T18:30:00Z", "2026-12-01T00:00:00+05:30", "2027-01-01T00:00:00+05:30"),
        # Midnight does not exist: the day begins at 01:00.
        ("day", "Africa/Cairo", "2025-04-25T12:00:00Z", "2025-04-25T01:00:00+03:00", "2025-04-26T00:00:00+03:00"),
        # Midnight comes twice: the day begins with the first.
        ("day", "America/Havana", "2026-11-01T12:00:00Z", "2026-11-01T00:00:00-04:00", "2026-11-02T00:00:00-05:00"),
        # The clock goes back at midnight, to 23:00 of the day before, which has 25 hours.
        ("day", "America/Sao_Paulo", "2018-02-18T02:30:00Z", "2018-02-17T00:00:00-02:00", "2018-02-18T00:00:00-03:00"),
        # A whole day was left out.
        ("day", "Pacific/Apia", "2011-12-30T10:00:00Z", "2011-12-31T00:00:00+14:00", "2012-01-01T00:00:00+14:00"),
    ],
)  # fmt: skip
def test_a_period_begins_and_ends_at_local_midnights(
    recurrence: Recurrence, zone: str, at: str, start: str, end: str
) -> None:
    assert period(recurrence, zone, at) == Period(start_us=us(start), end_us=us(end))


def test_f48_a_day_east_of_greenwich_begins_at_its_own_midnight() -> None:
    """2026-08-20T00:00+08:00 is 2026-08-19T16:00Z: not one second later, let alone eight hours."""
    reset = us("2026-08-20T00:00:00+08:00")
    assert period("day", "Asia/Shanghai", "2026-08-19T16:00:00Z").start_us == reset
    assert period_at("day", "Asia/Shanghai", reset - 1).end_us == reset


def test_f50_the_first_microsecond_belongs_to_the_period() -> None:
    found = period("day", "UTC", "2026-08-20T10:01:09.666Z")
    assert found.start_us <= us("2026-08-20T10:01:09.700Z") < found.end_us
    assert period_at("day", "UTC", found.start_us) == found
    assert period_at("day", "UTC", found.end_us - 1) == found
    assert period_at("day", "UTC", found.end_us).start_us == found.end_us


@pytest.mark.parametrize(
    ("at", "hours"),
    [("2026-10-25T12:00:00Z", 25), ("2026-03-29T12:00:00Z", 23), ("2026-06-01T12:00:00Z", 24)],
)
def test_f52_a_day_of_a_clock_change_has_25_or_23_hours(at: str, hours: int) -> None:
    found = period("day", "Europe/Amsterdam", at)
    assert found.end_us - found.start_us == hours * HOUR_US


def test_a_budget_that_never_begins_anew_has_one_period() -> None:
    assert period_at("once", "UTC", -5) == Period(start_us=0, end_us=FOR_EVER_US)


@pytest.mark.parametrize(
    "name", ["", "Mars/Olympus", "../etc/passwd", "/etc/localtime", "a\0b", "Europe"]
)
def test_an_unknown_time_zone_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="time zone"):
        find_zone(name)


@given(
    st.sampled_from(["day", "week", "month"]),
    st.sampled_from(ZONES),
    st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2_000_000_000_000_000)),
)
def test_periods_lie_side_by_side(recurrence: Recurrence, zone: str, at_us: int) -> None:
    """Each moment is in its period, and the next period begins where it ends."""
    found = period_at(recurrence, zone, at_us)
    inside = min(max(at_us, 0), LAST_US)
    assert found.start_us <= inside < found.end_us
    if found.end_us <= LAST_US:
        assert period_at(recurrence, zone, found.end_us).start_us == found.end_us
        assert period_at(recurrence, zone, found.end_us - 1) == found
