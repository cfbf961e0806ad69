"""Every process tells Prometheus what the contract names, and nothing else."""

import pytest
from prometheus_client import CollectorRegistry

from gristmill_contracts import metrics
from gristmill_gateway.metrics import Metrics as GatewayMetrics
from gristmill_ledger.metrics import Metrics as LedgerMetrics
from gristmill_meter.metrics import Metrics as MeterMetrics
from gristmill_worker.counters import WorkerMetrics

NAMES = {value for name, value in vars(metrics).items() if name.isupper()}
REGISTRIES = {
    "gateway": GatewayMetrics().registry,
    "ledger": LedgerMetrics().registry,
    "meter": MeterMetrics().registry,
    "worker": WorkerMetrics().registry,
}


def told(registry: CollectorRegistry) -> set[str]:
    """Names as they stand in the exposition; a counter's ends with `_total`."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in registry.collect()
    }


def test_all_names_are_told_by_somebody_and_nobody_tells_another() -> None:
    assert set().union(*map(told, REGISTRIES.values())) == NAMES


@pytest.mark.parametrize("part", REGISTRIES)
def test_no_label_names_a_session_a_user_or_a_request(part: str) -> None:
    labels = {
        name
        for collector in REGISTRIES[part]._collector_to_names
        for name in getattr(collector, "_labelnames", ())
    }
    allowed = {"tenant", "model", "token_type", "operation", "kind", "outcome", "replay"}
    assert labels <= allowed | {"status", "result", "label"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_has_our_prefix_and_its_unit_last(name: str) -> None:
    assert name.startswith("gristmill_")
    for unit in ("bytes", "seconds"):
        assert unit not in name or name.endswith(unit)
