"""Every process tells Prometheus what the contract names, and nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gristmill_contracts import metrics
from gristmill_gateway.metrics import Metrics as GatewayMetrics
from gristmill_ledger.metrics import Metrics as LedgerMetrics
from gristmill_meter.metrics import Metrics as MeterMetrics
from gristmill_operator.metrics import Metrics as OperatorMetrics
from gristmill_operator.metrics import Snapshot
from gristmill_worker.counters import WorkerMetrics

NAMES = {value for name, value in vars(metrics).items() if name.isupper()}


def operator_registry() -> CollectorRegistry:
    """With what is read at a scrape: of an operator that leads and holds nothing."""
    empty: Any = SimpleNamespace(
        leads=True, in_flight=0, oldest_s=lambda: 0.0, count=lambda _kind: 0,
        list=lambda _kind: [], clock=lambda: 0.0, silent_since={},
    )  # fmt: skip
    registry = OperatorMetrics().registry
    registry.register(Snapshot(cache=empty, queue=Empty(), elector=empty, sweeper=empty))  # type: ignore[arg-type]
    return registry


class Empty:
    """A queue that holds no key."""

    in_flight = 0

    def __len__(self) -> int:
        return 0

    def oldest_s(self) -> float:
        return 0.0


REGISTRIES = {
    "gateway": GatewayMetrics().registry,
    "ledger": LedgerMetrics().registry,
    "meter": MeterMetrics().registry,
    "operator": operator_registry(),
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
    of_the_cluster = {"resource", "state", "verb", "code", "informative"}
    of_budgets = {"budget", "unit", "percent", "reason", "resolution", "currency"}
    assert labels <= allowed | of_the_cluster | of_budgets | {"status", "result", "label"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_has_our_prefix_and_its_unit_last(name: str) -> None:
    assert name.startswith("gristmill_")
    for unit in ("bytes", "seconds"):
        assert unit not in name or name.endswith(unit)
