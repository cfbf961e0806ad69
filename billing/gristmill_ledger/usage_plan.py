"""From which sums a question is answered. Pure: a question in, stretches of time out.

Whole months come from the sums by month, whole days from those by day where the question lets them, whole
hours from those by hour, what is left at both ends from the rows themselves, and so do the rows that nobody
has rated yet. Together they hold each row once.
"""

from dataclasses import dataclass
from typing import Final

from gristmill_ledger.calendars import Segment, segments, whole_hours
from gristmill_ledger.rollups import (
    DAY_US,
    HOUR_US,
    MONTHS_FROM_US,
    MONTHS_UNTIL_US,
    day_of,
    hour_of,
    month_of,
)
from gristmill_ledger.usage_query import UsageQuery

MONTH_AND_MORE_US: Final = 32 * 24 * HOUR_US
LAST_MONTH_US: Final = MONTHS_UNTIL_US - MONTH_AND_MORE_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """[since_us, until_us); None = without end."""

    since_us: int | None
    until_us: int | None

    @property
    def empty(self) -> bool:
        since, until = self.since_us, self.until_us
        return since is not None and until is not None and since >= until


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where the sums come from."""

    rows: tuple[Span, ...] = ()
    """From the usage rows, rated or not."""
    unrated: Span | None = None
    """From the rows that no sum holds yet."""
    hours: tuple[Span, ...] = ()
    days: tuple[Span, ...] = ()
    """From the totals by day."""
    months: Span | None = None
    totals: bool = False
    """Whether the months are those of the totals."""
    zone: tuple[Segment, ...]


def make_plan(query: UsageQuery) -> Plan:
    whole = Span(since_us=query.since_us, until_us=query.until_us)
    zone = segments(query.zone, query.since_us, query.until_us)
    if query.bucket == "minute" or not whole_hours(zone):
        return Plan(rows=(whole,), zone=zone)
    middle = _within(whole, HOUR_US)
    if middle.empty:
        return Plan(rows=(whole,), zone=zone)
    months = _whole_months(middle) if _by_month(query, zone) else None
    hours = (middle,) if months is None else _ends(middle, months)
    days: tuple[Span, ...] = ()
    totals = _by_totals(query, zone)
    if totals:
        days = tuple(each for each in (_within(end, DAY_US) for end in hours) if not each.empty)
        hours = tuple(rest for end in hours for rest in _around(end, _within(end, DAY_US)))
    return Plan(
        rows=_ends(whole, middle),
        unrated=middle,
        hours=hours,
        days=days,
        months=months,
        totals=totals,
        zone=zone,
    )


def _within(span: Span, size: int) -> Span:
    """The whole hours or days of a span."""
    since, until = span.since_us, span.until_us
    start_of = hour_of if size == HOUR_US else day_of
    return Span(
        since_us=None if since is None else start_of(since + size - 1),
        until_us=None if until is None else start_of(until),
    )


def _around(whole: Span, middle: Span) -> tuple[Span, ...]:
    return (whole,) if middle.empty else _ends(whole, middle)


def _named(query: UsageQuery) -> set[str]:
    return {*query.group_by, *(name for name, _value in query.filters)}


def _by_month(query: UsageQuery, zone: tuple[Segment, ...]) -> bool:
    """Sums by month know neither session, project nor key, and are of UTC's months."""
    if _named(query) & {"session", "project", "key"}:
        return False
    return query.bucket == "none" or (query.bucket == "month" and _is_utc(zone))


def _by_totals(query: UsageQuery, zone: tuple[Segment, ...]) -> bool:
    """Totals do not know the operation either, and are of UTC's days and months."""
    if _named(query) & {"session", "project", "key", "operation"}:
        return False
    return query.bucket == "none" or (query.bucket in ("day", "month") and _is_utc(zone))


def _is_utc(zone: tuple[Segment, ...]) -> bool:
    return all(part.offset_us == 0 for part in zone)


def _whole_months(span: Span) -> Span | None:
    since, until = span.since_us, span.until_us
    if any(
        time is not None and not MONTHS_FROM_US <= time < LAST_MONTH_US for time in (since, until)
    ):
        return None
    if since is not None and since != month_of(since):
        since = month_of(month_of(since) + MONTH_AND_MORE_US)
    found = Span(since_us=since, until_us=None if until is None else month_of(until))
    return None if found.empty else found


def _ends(whole: Span, middle: Span) -> tuple[Span, ...]:
    """What of `whole` lies before and behind `middle`."""
    ends = []
    if middle.since_us is not None:
        ends.append(Span(since_us=whole.since_us, until_us=middle.since_us))
    if middle.until_us is not None:
        ends.append(Span(since_us=middle.until_us, until_us=whole.until_us))
    return tuple(span for span in ends if not span.empty)
