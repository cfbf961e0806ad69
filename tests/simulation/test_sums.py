"""The audit of sums finds each way in which they may disagree with the rows (I5)."""

from collections.abc import Callable
from typing import Any

import pytest

from gristmill_ledger.rollups import day_of, hour_of, month_of
from gristmill_testing.simulation.sums import MEASURES, wrong_sums

START_US = 1_764_460_800_000_000
Tables = dict[str, list[dict[str, Any]]]


def event(seq: int, **changes: Any) -> dict[str, Any]:
    tokens = {"prefill": 10, "cached_prefill": 0, "sample": 5, "train": 0}
    row = {"tenant": "acme", "seq": seq, "kind": "usage", "op_start_us": START_US}
    return row | tokens | changes


def rollup(bucket_us: int, kind: str, *values: int) -> dict[str, Any]:
    place = {"tenant": "acme", "kind": kind, "bucket_us": bucket_us}
    return place | dict(zip(MEASURES, values, strict=True))


def tables() -> Tables:
    """Two rows of usage, an attempt, and a row that nobody has rated yet."""
    unknown = dict.fromkeys(("prefill", "cached_prefill", "sample", "train"))
    return {
        "usage_event": [event(1), event(2, **unknown), event(3, kind="attempt"), event(4)],
        "rating_cursor": [{"tenant": "acme", "seq": 3}],
        "rated_usage": [{"tenant": "acme", "seq": 1}, {"tenant": "acme", "seq": 2}],
    } | {
        name: [
            rollup(bucket(START_US), "usage", 2, 1, 10, 0, 5, 0),
            rollup(bucket(START_US), "attempt", 1, 0, 10, 0, 5, 0),
        ]
        for name, bucket in (
            ("usage_rollup_hourly", hour_of),
            ("usage_rollup_monthly", month_of),
            ("usage_total_daily", day_of),
            ("usage_total_monthly", month_of),
        )
    }


def test_honest_sums_are_right() -> None:
    assert list(wrong_sums(tables().__getitem__)) == []


@pytest.mark.parametrize(
    ("falsify", "what"),
    [
        (lambda t: t["usage_rollup_hourly"][0].update(sample=6), "usage_rollup_hourly has 6"),
        (lambda t: t["usage_rollup_monthly"][0].update(events=3), "usage_rollup_monthly has 3"),
        (lambda t: t["usage_total_daily"][0].update(prefill=9), "usage_total_daily has 9"),
        (lambda t: t["usage_total_monthly"][0].update(unknown=2), "usage_total_monthly has 2"),
        (lambda t: t["usage_rollup_hourly"].pop(), "usage_rollup_hourly has 0"),
        (lambda t: t["usage_rollup_hourly"][0].update(bucket_us=0), "usage_rollup_hourly"),
        (lambda t: t["rating_cursor"][0].update(seq=4), "usage_rollup_hourly has 10"),
        (lambda t: t["rated_usage"].pop(), "row ('acme', 2) was rated 0 times"),
        (lambda t: t["rated_usage"].append({"tenant": "acme", "seq": 1}), "rated 2 times"),
        (lambda t: t["rated_usage"].append({"tenant": "acme", "seq": 3}), "row ('acme', 3)"),
    ],
)
def test_wrong_sums_are_told(falsify: Callable[[Tables], Any], what: str) -> None:
    falsified = tables()
    falsify(falsified)
    assert any(what in each for each in wrong_sums(falsified.__getitem__))
