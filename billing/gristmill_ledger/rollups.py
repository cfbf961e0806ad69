"""Sums of usage rows by hour, day and month: what they are keyed by, and how a change is brought in.

`Rollups` is pure: rows in, differences out. `bring_in` adds the differences to what is stored.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from sqlalchemy import Connection, Table, case, delete, insert, update
from sqlalchemy.dialects import postgresql, sqlite

from gristmill_contracts import limits
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger.driver import is_postgresql
from gristmill_ledger.schema import rating as tables

HOUR_US: Final = 3600 * 10**6
DAY_US: Final = 24 * HOUR_US
MONTHS_FROM_US: Final = -25_508 * DAY_US
"""1900-03-01. Between here and the next, every fourth year is a leap year."""
MONTHS_UNTIL_US: Final = 47_541 * DAY_US
"""2100-03-01."""
LARGE_TOKENS: Final = 2**31
"""A row with more is summed alone: 2^32 smaller ones fit into 64 bits."""
_TEXTS: Final = ("session", "project", "key", "model", "operation", "kind")
KEYS: Final = ("tenant", "bucket_us", *_TEXTS, "odd", "rate", "part")
MEASURES: Final = (
    "events", "unknown", *TOKEN_TYPES, *(f"{name}_with" for name in TOKEN_TYPES),
)  # fmt: skip
Key = tuple[Any, ...]  # Any: texts and integers, in the order of KEYS


ROW: Final = (
    "seq", "kind", "session", "project", "key", "model", "operation", "op_start_us", "quarantined",
    *TOKEN_TYPES,
)  # fmt: skip
"""What of a row of usage_event is summed, and in which order it comes."""
WIDTH: Final = len(ROW)


def hour_of(time_us: int) -> int:
    """Start of the UTC hour."""
    return _bounded(time_us - time_us % HOUR_US)


def day_of(time_us: int) -> int:
    """Start of the UTC day."""
    return _bounded(time_us - time_us % DAY_US)


def month_of(time_us: int) -> int:
    """Start of the UTC month. What is no time of a real operation is in the first or the last month."""
    inside = min(max(time_us, MONTHS_FROM_US), MONTHS_UNTIL_US - 1)
    # Years begin on a 1 March here, so that the leap day is their last; one in four has it.
    day = (inside - MONTHS_FROM_US) // DAY_US
    year = (4 * day + 3) // 1461
    of_year = day - 1461 * year // 4
    first = (153 * ((5 * of_year + 2) // 153) + 2) // 5
    return (day - of_year + first) * DAY_US + MONTHS_FROM_US


def _bounded(time_us: int) -> int:
    return max(time_us, -limits.QUANTITY_MAX)


@dataclass(slots=True, kw_only=True)
class Rollups:
    """Differences to be brought in, of any number of tenants."""

    hours: dict[Key, list[int]] = field(default_factory=dict)
    months: dict[Key, list[int]] = field(default_factory=dict)
    through: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    takes_away: bool = False

    def add(self, tenant: str, row: Sequence[Any], rate: int, sign: int = 1) -> None:
        """Count a row (the columns of ROW) under a rate; with sign -1, no longer."""
        seq, kind, session, project, key, model, operation, start_us, odd, *tokens = row[:WIDTH]
        unknown = tokens[0] is None
        counts = [0] * len(TOKEN_TYPES) if unknown else tokens
        part = 0
        for count in counts:
            if count > LARGE_TOKENS or count < -LARGE_TOKENS:
                part = seq
        rest = (model, operation, kind, int(odd is not None), rate, part)
        values = [1, int(unknown), *counts, *(int(count != 0) for count in counts)]
        hour = (tenant, hour_of(start_us), session, project, key, *rest)
        month = (tenant, month_of(start_us), "", "", "", *rest)
        for sums, place in ((self.hours, hour), (self.months, month)):
            known = sums.get(place)
            if known is None:
                known = sums[place] = [0] * len(MEASURES)
            for index, value in enumerate(values):
                known[index] += sign * value
            self.through[place] = max(self.through[place], seq)
        self.takes_away |= sign < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums without session, project, key and operation: few rows, for questions over many tenants."""

    sums: dict[Key, list[int]]
    through: dict[Key, int]


def totals_of(
    sums: Mapping[Key, Sequence[int]], through: Mapping[Key, int], bucket: Callable[[int], int]
) -> Totals:
    """Add up sums by hour or month whose time is in one `bucket`."""
    totals = Totals(sums={}, through=defaultdict(int))
    for key, values in sums.items():
        tenant, start_us, _session, _project, _key, model, _operation, *rest = key
        place = (tenant, bucket(start_us), "", "", "", model, "", *rest)
        known = totals.sums.setdefault(place, [0] * len(MEASURES))
        for index, value in enumerate(values):
            known[index] += value
        totals.through[place] = max(totals.through[place], through[key])
    return totals


def bring_in(connection: Connection, rollups: Rollups) -> None:
    """Add the differences to all tables of sums; what holds no row any more is removed."""
    hours, months, through = rollups.hours, rollups.months, rollups.through
    by_day, by_month = totals_of(hours, through, day_of), totals_of(months, through, month_of)
    sources = (
        (tables.usage_rollup_hourly, hours, through),
        (tables.usage_rollup_monthly, months, through),
        (tables.usage_total_daily, by_day.sums, by_day.through),
        (tables.usage_total_monthly, by_month.sums, by_month.through),
    )
    for table, sums, last in sources:
        # Sorted: two writers that touch the same rows must lock them in one order.
        rows = [
            dict(zip(KEYS, key, strict=True))
            | dict(zip(MEASURES, values, strict=True))
            | {"through_seq": last[key]}
            for key, values in sorted(sums.items())
            if any(values)
        ]
        if rollups.takes_away:
            _change(connection, table, rows)
        elif rows:
            connection.execute(_upsert(table, on_postgresql=is_postgresql(connection)), rows)


@cache
def _upsert(table: Table, *, on_postgresql: bool) -> Any:  # Any: an insert of either dialect
    """Made once: composing it takes longer than the few rows of a step."""
    dialect = postgresql if on_postgresql else sqlite
    added = dialect.insert(table)
    changes: dict[str, Any] = {  # Any: SQL expressions
        name: table.c[name] + added.excluded[name] for name in MEASURES
    }
    told, known = added.excluded.through_seq, table.c.through_seq
    changes["through_seq"] = case((told > known, told), else_=known)
    return added.on_conflict_do_update(index_elements=list(KEYS), set_=changes)


def _change(connection: Connection, table: Table, rows: Iterable[dict[str, Any]]) -> None:
    """One row at a time: a difference below zero is no row that could be inserted."""
    for row in rows:
        place = [table.c[name] == row[name] for name in KEYS]
        changes: dict[str, Any] = {name: table.c[name] + row[name] for name in MEASURES}
        updated = connection.execute(
            update(table).where(*place).values(**changes).execution_options(preserve_rowcount=True)
        )
        if updated.rowcount == 0:
            connection.execute(insert(table).values(**row))
        elif row["events"] < 0:
            connection.execute(delete(table).where(*place, table.c.events == 0))
