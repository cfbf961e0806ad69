"""Every process tells Prometheus what the contract lists, and nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gristmill_contracts import limits, metric_shapes, metrics
from gristmill_contracts.label_values import OTHER, LabelValues
from gristmill_contracts.metric_shapes import SHAPES, Shape
from gristmill_gateway.metrics import Metrics as GatewayMetrics
from gristmill_ledger.metrics import Metrics as LedgerMetrics
from gristmill_meter.metrics import Metrics as MeterMetrics
from gristmill_operator.metrics import Metrics as OperatorMetrics
from gristmill_operator.metrics import Snapshot
from gristmill_worker.counters import WorkerMetrics

NAMES = {value for name, value in vars(metrics).items() if name.isupper()}
LABELS = {
    "tenant", "model", "token_type", "op", "operation", "kind", "outcome", "replay", "status", "result", "label",
    "resource", "state", "verb", "code", "informative",
    "budget", "unit", "percent", "reason", "resolution", "currency", "pair",
}  # fmt: skip


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


REGISTRIES: dict[metric_shapes.Part, CollectorRegistry] = {
    "gateway": GatewayMetrics().registry,
    "ledger": LedgerMetrics().registry,
    "meter": MeterMetrics().registry,
    "operator": operator_registry(),
    "worker": WorkerMetrics().registry,
}


def shapes_of(registry: CollectorRegistry) -> dict[str, Shape]:
    """By name as it stands in the exposition; a counter's ends with `_total`."""
    found = {}
    for collector in registry._collector_to_names:
        for family in collector.collect():
            labels = getattr(collector, "_labelnames", getattr(family, "_labelnames", ()))
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = Shape(family.type, tuple(labels))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("part", REGISTRIES)
def test_a_process_tells_what_is_listed_for_it(part: metric_shapes.Part) -> None:
    assert shapes_of(REGISTRIES[part]) == SHAPES[part]


def test_every_name_is_told_by_somebody() -> None:
    assert set().union(*SHAPES.values()) == NAMES


def test_no_label_names_a_session_a_user_or_a_request() -> None:
    used = {label for part in SHAPES.values() for shape in part.values() for label in shape.labels}
    assert used <= LABELS


@pytest.mark.parametrize(
    ("part", "name", "kind", "labels"),
    [
        ("meter", "meter_tokens_total", "counter", "tenant model token_type"),
        ("meter", "meter_operations_total", "counter", "tenant op outcome"),
        ("ledger", "ledger_events_total", "counter", "result"),
        ("ledger", "ledger_commit_seconds", "histogram", ""),
        ("meter", "spool_unacked_events", "gauge", ""),
        ("meter", "spool_oldest_unacked_seconds", "gauge", ""),
        ("meter", "spool_bytes", "gauge", ""),
        ("ledger", "budget_limit", "gauge", "tenant budget unit"),
        ("ledger", "budget_posted", "gauge", "tenant budget unit"),
        ("ledger", "budget_reserved", "gauge", "tenant budget unit"),
        ("ledger", "budget_denials_total", "counter", "tenant reason"),
        ("ledger", "reservations_expired_total", "counter", "resolution"),
        ("ledger", "recon_diff_tokens", "gauge", "pair kind"),
        ("ledger", "chain_verified_seq", "gauge", ""),
        ("ledger", "chain_failures_total", "counter", ""),
        ("ledger", "rated_cost_total", "gauge", "tenant currency"),
        ("ledger", "label_overflow_total", "counter", "label"),
        ("meter", "label_overflow_total", "counter", "label"),
    ],
)
def test_what_dashboards_of_others_may_build_on_is_there(
    part: metric_shapes.Part, name: str, kind: str, labels: str
) -> None:
    assert SHAPES[part][f"gristmill_{name}"] == (kind, tuple(labels.split()))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_has_our_prefix_and_its_unit_last(name: str) -> None:
    assert name.startswith("gristmill_")
    for unit in ("bytes", "seconds"):
        assert unit not in name or name.endswith(unit)


def test_f64_junk_values_share_a_series_and_each_is_counted_once() -> None:
    counted = []
    values = LabelValues(lambda: counted.append(1))
    for _ in range(2):
        shown = {values.shown(f"junk-{n}") for n in range(10_000)}
    assert len(shown) == limits.METRIC_LABEL_VALUES_MAX + 1
    assert OTHER in shown
    assert values.shown("junk-0") == "junk-0"
    assert len(counted) == 10_000 - limits.METRIC_LABEL_VALUES_MAX


def test_values_past_all_bounds_are_not_remembered() -> None:
    counted = []
    values = LabelValues(lambda: counted.append(1), values_max=0)
    for n in range(limits.METRIC_OTHER_VALUES_MAX + 10):
        assert values.shown(str(n)) == OTHER
    assert len(counted) == limits.METRIC_OTHER_VALUES_MAX
