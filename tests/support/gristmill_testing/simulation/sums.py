"""I5: what the ledger has summed up and rated is what its rows say, as far as it says it has come."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger.rollups import day_of, hour_of, month_of

Row = dict[str, Any]  # Any: column values
MEASURES: Final = ("events", "unknown", *TOKEN_TYPES)
BUCKETS: Final[dict[str, Callable[[int], int]]] = {
    "usage_rollup_hourly": hour_of,
    "usage_rollup_monthly": month_of,
    "usage_total_daily": day_of,
    "usage_total_monthly": month_of,
}


def wrong_sums(rows_of: Callable[[str], Iterable[Row]]) -> Iterator[str]:
    """What is wrong, in words. rows_of: all rows of a table."""
    through = {row["tenant"]: row["seq"] for row in rows_of("rating_cursor")}
    rows = [row for row in rows_of("usage_event") if row["seq"] <= through.get(row["tenant"], 0)]
    for table, bucket in BUCKETS.items():
        summed, expected = _summed(rows_of(table)), _expected(rows, bucket)
        for place in sorted(summed.keys() | expected.keys()):
            if summed[place] != expected[place]:
                yield f"{table} has {summed[place]} of {place}, the rows say {expected[place]}"
    rated = Counter((row["tenant"], row["seq"]) for row in rows_of("rated_usage"))
    billed = Counter((row["tenant"], row["seq"]) for row in rows if row["kind"] != "attempt")
    for place in sorted(rated.keys() | billed.keys()):
        if rated[place] != billed[place]:
            yield f"row {place} was rated {rated[place]} times, not {billed[place]}"


def _summed(rows: Iterable[Row]) -> Counter[tuple[Any, ...]]:
    sums: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        for name in MEASURES:
            sums[row["tenant"], row["kind"], row["bucket_us"], name] += row[name]
    return +sums


def _expected(rows: Iterable[Row], bucket: Callable[[int], int]) -> Counter[tuple[Any, ...]]:
    sums: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        place = (row["tenant"], row["kind"], bucket(row["op_start_us"]))
        sums[*place, "events"] += 1
        sums[*place, "unknown"] += row["prefill"] is None
        for name in TOKEN_TYPES:
            sums[*place, name] += row[name] or 0
    return +sums
