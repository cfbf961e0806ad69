"""Hours, days and months in a time zone, as SQL and as Python: the same answer from both.

A day or a month is named by its local start, written as if it were UTC: the two midnights of a change
of clocks then have one name, and a day of 25 hours is one day.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from sqlalchemy import ColumnElement, case, literal_column

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_ledger.rollups import DAY_US, HOUR_US, MONTHS_FROM_US, MONTHS_UNTIL_US, month_of
from gristmill_ledger.schema.base import INT64

MINUTE_US: Final = 60 * 10**6
BUCKETS: Final = ("none", "minute", "hour", "day", "month")
SIZES_US: Final = {"minute": MINUTE_US, "hour": HOUR_US, "day": DAY_US}
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_YEAR: Final = 1970
LAST_YEAR: Final = 2100
"""Outside of these years a zone keeps the offset that it had at the end of them."""
WEEK: Final = timedelta(days=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Time before `until_us` (None: all that is left) is `offset_us` ahead of UTC."""

    until_us: int | None
    offset_us: int


def find_zone(name: str) -> ZoneInfo:
    """The zone of an IANA name. Raises InvalidRequestError."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidRequestError(
            f"zone is {name[:80]!r}; write an IANA name such as Europe/Amsterdam, or UTC"
        ) from error


def time_us(moment: datetime) -> int:
    """UTC microseconds of an aware datetime, exact."""
    elapsed = moment - EPOCH
    return elapsed.days * DAY_US + elapsed.seconds * 10**6 + elapsed.microseconds


@lru_cache(maxsize=64)
def _all_segments(name: str) -> tuple[Segment, ...]:
    zone = find_zone(name)
    moment = datetime(FIRST_YEAR, 1, 1, tzinfo=UTC)
    end = datetime(LAST_YEAR, 1, 1, tzinfo=UTC)
    found = []
    offset = _offset(zone, moment)
    while moment < end:
        later = moment + WEEK
        changed = _offset(zone, later)
        if changed != offset:
            found.append(Segment(until_us=_change(zone, moment, later), offset_us=offset))
            offset = changed
        moment = later
    return (*found, Segment(until_us=None, offset_us=offset))


def _offset(zone: ZoneInfo, moment: datetime) -> int:
    offset = moment.astimezone(zone).utcoffset() or timedelta()
    return offset.days * DAY_US + offset.seconds * 10**6


def _change(zone: ZoneInfo, before: datetime, after: datetime) -> int:
    """When the offset of `before` ends, to the second."""
    first = _offset(zone, before)
    low, high = time_us(before) // 10**6, time_us(after) // 10**6
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(zone, EPOCH + timedelta(seconds=middle)) == first:
            low = middle
        else:
            high = middle
    return high * 10**6


def segments(name: str, since_us: int | None, until_us: int | None) -> tuple[Segment, ...]:
    """The offsets of a zone in [since_us, until_us), None = without end."""
    found = []
    start: int | None = None
    for segment in _all_segments(name):
        ended = segment.until_us is not None and since_us is not None
        over = ended and (segment.until_us or 0) <= (since_us or 0)
        ahead = start is not None and until_us is not None and start >= until_us
        if not over and not ahead:
            found.append(segment)
        start = segment.until_us
    last = found[-1]
    return (*found[:-1], Segment(until_us=None, offset_us=last.offset_us))


def whole_hours(parts: tuple[Segment, ...]) -> bool:
    """Whether the zone's hours are UTC's, so that sums by UTC hour can be used."""
    return all(part.offset_us % HOUR_US == 0 for part in parts)


# --- in SQL --------------------------------------------------------------------------------------


def _number(value: int) -> ColumnElement[int]:
    return literal_column(str(value), INT64)


def _floor(value: ColumnElement[int], size: int) -> ColumnElement[int]:
    """The remainder of SQL has the sign of the value; this one is floored below 0 too."""
    unit = _number(size)
    return value - ((value % unit) + unit) % unit


def _offset_at(start: ColumnElement[int], parts: tuple[Segment, ...]) -> ColumnElement[int]:
    if len(parts) == 1:
        return _number(parts[0].offset_us)
    ends = [(start < _number(part.until_us or 0), _number(part.offset_us)) for part in parts[:-1]]
    return case(*ends, else_=_number(parts[-1].offset_us))


def _within(start: ColumnElement[int]) -> ColumnElement[int]:
    """Far enough from the ends of 64 bits that every bucket begins within them."""
    last = limits.QUANTITY_MAX - 40 * DAY_US
    return case(
        (start > _number(last), _number(last)),
        (start < _number(-last), _number(-last)),
        else_=start,
    )


def bucket_column(
    start: ColumnElement[int], bucket: str, parts: tuple[Segment, ...]
) -> ColumnElement[int]:
    """The name of the bucket that a UTC time lies in."""
    start = _within(start)
    offset = _offset_at(start, parts)
    plain = len(parts) == 1 and parts[0].offset_us == 0
    local = start if plain else start + offset
    if bucket == "month":
        return _month_column(local)
    floored = _floor(local, SIZES_US[bucket])
    return floored if plain or bucket == "day" else floored - offset


def _month_column(local: ColumnElement[int]) -> ColumnElement[int]:
    """`rollups.month_of`, in SQL. All operands are positive, for SQL rounds towards 0."""
    inside = case(
        (local < _number(MONTHS_FROM_US), _number(MONTHS_FROM_US)),
        (local >= _number(MONTHS_UNTIL_US), _number(MONTHS_UNTIL_US - 1)),
        else_=local,
    )
    day = (inside - _number(MONTHS_FROM_US)) // _number(DAY_US)
    year = (_number(4) * day + _number(3)) // _number(1461)
    of_year = day - (_number(1461) * year) // _number(4)
    month = (_number(5) * of_year + _number(2)) // _number(153)
    first = (_number(153) * month + _number(2)) // _number(5)
    return (day - of_year + first) * _number(DAY_US) + _number(MONTHS_FROM_US)


# --- in Python -----------------------------------------------------------------------------------


def bucket_start_us(name: int, bucket: str, zone: ZoneInfo) -> int:
    """When a bucket begins, as UTC microseconds."""
    if bucket not in ("day", "month"):
        return name
    return _utc_of(name, zone)


def bucket_end_us(name: int, bucket: str, zone: ZoneInfo) -> int:
    """When the next bucket begins."""
    if bucket == "month":
        return _utc_of(month_of(name + 32 * DAY_US), zone)
    if bucket == "day":
        return _utc_of(name + DAY_US, zone)
    return name + SIZES_US[bucket]


def _utc_of(local_us: int, zone: ZoneInfo) -> int:
    """The time at which a local clock shows this first; outside the calendar, as UTC."""
    try:
        moment = EPOCH + timedelta(microseconds=local_us)
        return time_us(moment.replace(tzinfo=zone).astimezone(UTC))
    except (OverflowError, ValueError):
        return local_us


def iso_text(moment_us: int, zone: ZoneInfo | None = None) -> str | None:
    """ISO 8601 in the zone, or None where no calendar reaches."""
    try:
        moment = EPOCH + timedelta(microseconds=moment_us)
        if zone is not None and zone.key != "UTC":
            moment = moment.astimezone(zone)
    except OverflowError:
        return None
    return moment.isoformat().replace("+00:00", "Z")
