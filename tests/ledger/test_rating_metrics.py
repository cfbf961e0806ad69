"""What rating tells Prometheus: bounded series, whatever the tenants are called."""

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from gristmill_contracts import limits
from gristmill_contracts.usage import Counts
from gristmill_ledger.rating_metrics import RatingMetrics
from gristmill_testing.ledger import make_event, running_ledger


def series(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(name + "{")]


def test_f64_junk_tenants_share_a_series_and_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = RatingMetrics(registry)
    costs = {(f"junk-{n}", "USD"): 10**12 for n in range(10_000)} | {("acme", "USD"): 5 * 10**12}
    for _ in range(2):
        metrics.show(costs)
    text = generate_latest(registry).decode()
    lines = series(text, "gristmill_rated_cost_total")
    assert len(lines) == limits.METRIC_LABEL_VALUES_MAX + 1
    assert 'gristmill_rated_cost_total{currency="USD",tenant="acme"} 5.0' in lines
    others = 10_001 - limits.METRIC_LABEL_VALUES_MAX
    assert f'gristmill_rated_cost_total{{currency="USD",tenant="other"}} {float(others)}' in lines
    assert f'gristmill_label_overflow_total{{label="tenant"}} {float(others)}' in text


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
