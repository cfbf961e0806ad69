"""What rating tells Prometheus: bounded series, whatever the tenants are called."""

from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

from gristmill_contracts import limits
from gristmill_contracts.usage import Counts
from gristmill_ledger.budgets.decide import Figures
from gristmill_ledger.metrics import Metrics
from gristmill_testing.ledger import make_event, running_ledger


def series(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(name + "{")]


def test_f64_junk_tenants_share_a_series_and_are_counted() -> None:
    metrics = Metrics()
    costs = {(f"junk-{n}", "USD"): 10**12 for n in range(10_000)} | {("acme", "USD"): 5 * 10**12}
    for _ in range(2):
        metrics.rating.show(costs)
    text = generate_latest(metrics.registry).decode()
    lines = series(text, "gristmill_rated_cost_total")
    assert len(lines) == limits.METRIC_LABEL_VALUES_MAX + 1
    assert 'gristmill_rated_cost_total{currency="USD",tenant="acme"} 5.0' in lines
    others = 10_001 - limits.METRIC_LABEL_VALUES_MAX
    assert f'gristmill_rated_cost_total{{currency="USD",tenant="other"}} {float(others)}' in lines
    assert f'gristmill_label_overflow_total{{label="tenant"}} {float(others)}' in text


def test_f64_denials_of_junk_tenants_share_a_series() -> None:
    metrics = Metrics()
    for n in range(10_000):
        metrics.budgets.denied(f"junk-{n}", "exhausted")
    lines = series(generate_latest(metrics.registry).decode(), "gristmill_budget_denials_total")
    assert len(lines) == limits.METRIC_LABEL_VALUES_MAX + 1
    others = 10_000 - limits.METRIC_LABEL_VALUES_MAX
    assert (
        f'gristmill_budget_denials_total{{reason="exhausted",tenant="other"}} {float(others)}'
        in lines
    )


def figures(budget: str, **amounts: int) -> Figures:
    """Of a soft limit of 10 tokens of which nothing is used, unless told."""
    fields: dict[str, Any] = {
        "budget": budget, "scope_type": "tenant", "scope": budget.partition("/")[0], "unit": "tokens",
        "recurrence": "once", "time_zone": "UTC", "created_us": 0, "mode": "soft", "thresholds": (),
        "start_us": 0, "end_us": 1, "limit": 10, "posted": 0, "late_posted": 0, "reserved": 0, "suspense": 0,
    }  # fmt: skip
    return Figures(**(fields | amounts))


def test_f64_budgets_of_junk_tenants_are_added_up() -> None:
    metrics = Metrics()
    metrics.budgets.show(
        [figures(f"junk-{n}/all", posted=2, late_posted=1) for n in range(1_000)]
        + [figures("junk-0/second", reserved=3, suspense=4)]
    )
    text = generate_latest(metrics.registry).decode()
    others = 1_000 - limits.METRIC_LABEL_VALUES_MAX
    for name, own, rest in (
        ("limit", 10, 10 * others),
        ("posted", 3, 3 * others),
        ("reserved", 0, 0),
    ):
        lines = series(text, f"gristmill_budget_{name}")
        assert len(lines) == limits.METRIC_LABEL_VALUES_MAX + 2
        labels = '{budget="all",tenant="junk-0",unit="tokens"}'
        assert f"gristmill_budget_{name}{labels} {float(own)}" in lines
        labels = '{budget="other",tenant="other",unit="tokens"}'
        assert f"gristmill_budget_{name}{labels} {float(rest)}" in lines
    assert 'gristmill_budget_reserved{budget="second",tenant="junk-0",unit="tokens"} 7.0' in text


async def test_what_tenants_cost_and_what_has_no_price_is_told(tmp_path: Path) -> None:
    async with running_ledger(tmp_path, price_book="none") as client:
        await client.register("s-1")
        await client.post("s-1", [make_event(1, counts=Counts(train=1))])
        await client.ledger.follower.catch_up()
        _, body = await client.call("GET", "/metrics")
        assert b"gristmill_ledger_unpriced_events_total 1.0" in body
        assert b"gristmill_ledger_unrated_events 0.0" in body
        assert b"gristmill_rated_cost_total{" not in body
    async with running_ledger(tmp_path / "priced") as client:
        await client.register("s-1")
        await client.post("s-1", [make_event(1, counts=Counts(train=1_000_000))])
        _, body = await client.call("GET", "/metrics")
        assert b'gristmill_rated_cost_total{currency="USD",tenant="acme"} 0.6' in body
