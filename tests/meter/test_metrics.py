"""What the meter tells Prometheus: bounded series, whatever tenants and models are called."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest

from gristmill_contracts import limits
from gristmill_contracts.usage import Counts
from gristmill_meter.frames import Claim
from gristmill_meter.metrics import Metrics

CAP = limits.METRIC_LABEL_VALUES_MAX


def series(metrics: Metrics, name: str) -> list[str]:
    text = generate_latest(metrics.registry).decode()
    return [line for line in text.splitlines() if line.startswith(name + "{")]


def state_of(tenant: str, model: str) -> Any:
    """As the metrics see a session whose newest frame bills 2 tokens."""
    event = SimpleNamespace(counts=Counts(train=2))
    return SimpleNamespace(tenant=tenant, model=model, frames=1, events=[(1, event)])


def test_f64_junk_tenants_and_models_share_a_series_and_are_counted() -> None:
    metrics = Metrics()
    claim = Claim(number=1, at_us=0)
    record: Any = SimpleNamespace(kind="sample", state="Completed")
    for _ in range(2):
        for n in range(10_000):
            metrics.frame_written(state_of("acme", f"junk-{n}"), claim)
            metrics.operation_ended(state_of(f"junk-{n}", "tiny"), record)
    lines = series(metrics, "gristmill_meter_tokens_total")
    assert len(lines) == CAP + 1
    others = 2 * 2 * (10_000 - CAP)
    labels = '{model="other",tenant="acme",token_type="train"}'
    assert f"gristmill_meter_tokens_total{labels} {float(others)}" in lines
    lines = series(metrics, "gristmill_meter_operations_total")
    # One tenant was known before: it had usage.
    assert len(lines) == CAP
    labels = '{op="sample",outcome="completed",tenant="other"}'
    assert f"gristmill_meter_operations_total{labels} {float(2 * (10_001 - CAP))}" in lines
    assert sorted(series(metrics, "gristmill_label_overflow_total")) == [
        f'gristmill_label_overflow_total{{label="model"}} {float(10_000 - CAP)}',
        f'gristmill_label_overflow_total{{label="tenant"}} {float(10_001 - CAP)}',
    ]
