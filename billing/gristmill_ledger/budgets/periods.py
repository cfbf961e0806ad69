"""When the periods of a budget begin and end, in its time zone. Pure.

A day begins at local midnight, whatever the clocks do: on the days of a change it has 23 or 25 hours.
Where midnight is skipped, it begins with the first moment after it; where it comes twice, with the first.
"""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gristmill_contracts import limits
from gristmill_contracts.budgets import Recurrence

EPOCH: Final = datetime.fromtimestamp(0, UTC)
FOR_EVER_US: Final = limits.QUANTITY_MAX
"""End of a period that never ends."""
LAST_US: Final = 253_370_764_800_000_000
"""9999-01-01: what lies behind it belongs to its day, for the calendar ends there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Half-open: from `start_us` until before `end_us`, in UTC microseconds."""

    start_us: int
    end_us: int


def find_zone(name: str) -> ZoneInfo:
    """The zone of an IANA name. Raises ValueError for another text."""
    try:
        return ZoneInfo(name)
    # A name that is a path, a folder or not in the encoding of paths is one that is not known.
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(
            f"time zone {name[:80]!r} is not known; write it as UTC or Europe/Amsterdam"
        ) from error


def period_at(recurrence: Recurrence, time_zone: str, at_us: int) -> Period:
    """The period that holds the moment `at_us`. Raises ValueError for an unknown time zone."""
    if recurrence == "once":
        return Period(start_us=0, end_us=FOR_EVER_US)
    at_us = min(max(at_us, 0), LAST_US)
    zone = find_zone(time_zone)
    day = (EPOCH + timedelta(microseconds=at_us)).astimezone(zone).date()
    first = _first_day(recurrence, day)
    return _between(time_zone, first, _next_first(recurrence, first))


@lru_cache(maxsize=4096)
def _between(time_zone: str, first: date, following: date) -> Period:
    return Period(
        start_us=_midnight_us(time_zone, first), end_us=_midnight_us(time_zone, following)
    )


def _first_day(recurrence: Recurrence, day: date) -> date:
    if recurrence == "week":
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if recurrence == "month" else day


def _next_first(recurrence: Recurrence, first: date) -> date:
    if recurrence == "month":
        return (first + timedelta(days=31)).replace(day=1)
    return first + timedelta(days=7 if recurrence == "week" else 1)


def _midnight_us(time_zone: str, day: date) -> int:
    # fold 0: the first of two midnights; of a midnight that is skipped, the moment of the jump.
    local = datetime(day.year, day.month, day.day, tzinfo=find_zone(time_zone), fold=0)
    delta = local.astimezone(UTC) - EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
