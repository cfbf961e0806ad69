"""What GET /v1/usage may be asked. Pure: text in, `UsageQuery` or InvalidRequestError out."""

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.usage import OPERATION_KINDS, TOKEN_TYPES
from gristmill_ledger import checks
from gristmill_ledger.calendars import BUCKETS, find_zone, time_us

GROUP_KEYS: Final = ("tenant", "project", "session", "key", "model", "operation", "token_type")
FILTERS: Final = ("tenant", "project", "session", "key", "model", "operation")
PARAMETERS: Final = (
    *FILTERS, "token_type", "since", "until", "group_by", "bucket", "zone", "cursor", "limit",
    "include_attempts", "include_internal",
)  # fmt: skip
MAY_BE_EMPTY: Final = ("project", "key", "group_by")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """A checked question. Times are [since_us, until_us), by the start of the operation.

    zone: IANA name; days and months are those of its calendar.
    """

    filters: tuple[tuple[str, str], ...] = ()
    token_type: str | None = None
    since_us: int | None = None
    until_us: int | None = None
    group_by: tuple[str, ...] = ()
    bucket: str = "none"
    zone: str = "UTC"
    limit: int = 1000
    include_attempts: bool = False
    include_internal: bool = False
    """Also facts that are in no bill: the time of devices."""
    after: tuple[int | str, ...] | None = None
    """Keys of the last row of the page before."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the columns that order and identify a row, token_type last."""
        plain = tuple(name for name in self.group_by if name != "token_type")
        return (
            *(("bucket",) if self.bucket != "none" else ()),
            *plain,
            *(("kind",) if self.include_attempts else ()),
            *(("token_type",) if "token_type" in self.group_by else ()),
        )

    @property
    def digest(self) -> str:
        """Identifies the question without the page, so that a cursor fits only its own."""
        question = repr(replace(self, after=None, limit=0))
        return hashlib.sha256(question.encode()).hexdigest()[:16]


def parse_usage_query(items: Iterable[tuple[str, str]]) -> UsageQuery:
    """Read the query string's pairs. Raises InvalidRequestError naming the parameter."""
    given: dict[str, str] = {}
    for name, value in items:
        if name not in PARAMETERS:
            raise InvalidRequestError(
                f"unknown parameter {name!r}; usage knows {', '.join(PARAMETERS)}"
            )
        if name in given:
            raise InvalidRequestError(f"parameter {name!r} is given twice; give it once")
        given[name] = checks.text(name, value, empty=name in MAY_BE_EMPTY)
    query = UsageQuery(
        filters=tuple((name, given[name]) for name in FILTERS if name in given),
        token_type=_one_of("token_type", given.get("token_type"), TOKEN_TYPES),
        since_us=read_time("since", given.get("since")),
        until_us=read_time("until", given.get("until")),
        group_by=_group_by(given.get("group_by", "")),
        bucket=_one_of("bucket", given.get("bucket", "none"), BUCKETS) or "none",
        zone=find_zone(given.get("zone", "UTC")).key,
        limit=page_limit(given.get("limit"), default=1000, most=limits.USAGE_PAGE_MAX),
        include_attempts=_one_of(
            "include_attempts", given.get("include_attempts", "false"), ("true", "false")
        )
        == "true",
        include_internal=_one_of(
            "include_internal", given.get("include_internal", "false"), ("true", "false")
        )
        == "true",
    )
    _one_of("operation", given.get("operation"), OPERATION_KINDS)
    if None not in (query.since_us, query.until_us) and _empty_range(query):
        raise InvalidRequestError(
            f"since {given['since']} is not before until {given['until']}; until is exclusive"
        )
    return _with_cursor(query, given.get("cursor"))


def _empty_range(query: UsageQuery) -> bool:
    return (query.since_us or 0) >= (query.until_us or 0)


def page_limit(text: str | None, *, default: int, most: int) -> int:
    """A page size of 1 to `most`."""
    if text is None:
        return default
    limit = checks.whole_number("limit", text)
    if not 1 <= limit <= most:
        raise InvalidRequestError(f"limit is {text[:40]!r}; it must be 1 to {most}")
    return limit


def _one_of(name: str, value: str | None, allowed: tuple[str, ...]) -> str | None:
    if value is not None and value not in allowed:
        raise InvalidRequestError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


def _group_by(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    for name in names:
        _one_of("group_by", name, GROUP_KEYS)
    if len(set(names)) < len(names):
        raise InvalidRequestError(f"group_by {text!r} names a key twice; name it once")
    return names


def read_time(name: str, text: str | None) -> int | None:
    """Microseconds since 1970, from digits or from ISO 8601. A time without a zone is UTC."""
    if text is None:
        return None
    if text.isascii() and text.isdecimal():
        return checks.whole_number(name, text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"{name} is {text!r}; write ISO 8601 like 2026-11-30T00:00:00Z, or microseconds"
        ) from error
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return time_us(moment)


def make_cursor(query: UsageQuery, place: tuple[int | str, ...]) -> str:
    """Where the next page begins: behind the row with these keys."""
    text = json.dumps([query.digest, *place])
    return base64.urlsafe_b64encode(text.encode()).decode()


def _with_cursor(query: UsageQuery, cursor: str | None) -> UsageQuery:
    if cursor is None:
        return query
    refusal = InvalidRequestError(
        f"cursor {cursor[:80]!r} is not one of this question; pass next_cursor of the page before, "
        "with the same parameters"
    )
    try:
        place = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise refusal from error
    kinds = [str, *(int if key == "bucket" else str for key in query.keys)]
    if not isinstance(place, list) or [type(part) for part in place] != kinds:
        raise refusal
    if place[0] != query.digest or "\0" in "".join(map(str, place)):
        raise refusal
    if "bucket" in query.keys:
        checks.signed("cursor", place[1])
    return replace(query, after=tuple(place[1:]))
