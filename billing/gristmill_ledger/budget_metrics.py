"""What the ledger tells Prometheus of budgets. Only those of tenants and projects have a series."""

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from gristmill_contracts import metrics as names
from gristmill_contracts.budgets import TOKENS
from gristmill_contracts.label_values import OTHER, LabelValues
from gristmill_contracts.units import PICO_PER_UNIT
from gristmill_ledger.budgets.decide import Figures

LABELS: Final = ("tenant", "budget", "unit")
REASONS: Final = ("suspended", "drained", "decided")


class BudgetMetrics:
    """Money is told in units of its currency."""

    def __init__(self, registry: CollectorRegistry, tenants: LabelValues) -> None:
        self.limit = Gauge(names.BUDGET_LIMIT, "Limit of a budget", LABELS, registry=registry)
        self.posted = Gauge(
            names.BUDGET_POSTED,
            "Used of a budget in its running period, late usage included",
            LABELS,
            registry=registry,
        )
        self.reserved = Gauge(
            names.BUDGET_RESERVED,
            "Held of a budget in its running period, what is in suspense included",
            LABELS,
            registry=registry,
        )
        self.denials = Counter(
            names.BUDGET_DENIALS,
            "Requests for a lease that a budget had not enough left for",
            ["tenant", "reason"],
            registry=registry,
        )
        self.expired = Counter(
            names.RESERVATIONS_EXPIRED,
            "Holds whose time ran out (suspended), and how they ended after that",
            ["resolution"],
            registry=registry,
        )
        for reason in REASONS:
            self.expired.labels(reason)
        self.thresholds = Counter(
            names.BUDGET_THRESHOLDS_PASSED,
            "Thresholds of budgets that were passed",
            ["percent"],
            registry=registry,
        )
        self.unreserved = Counter(
            names.BUDGET_UNRESERVED_EVENTS,
            "Usage events of which a part was not held when they came",
            registry=registry,
        )
        self._tenants = tenants

    def denied(self, tenant: str, reason: str) -> None:
        """Tenants over the cap share a series."""
        self.denials.labels(self._tenants.shown(tenant), reason).inc()

    def crossed(self, percent: int) -> None:
        self.thresholds.labels(str(percent)).inc()

    def show(self, budgets: Iterable[Figures]) -> None:
        """Bring the gauges up to date; a budget that is not among them has no series any more.

        Those of tenants over the cap are added up, by unit.
        """
        gauges = (self.limit, self.posted, self.reserved)
        for gauge in gauges:
            gauge.clear()
        sums: dict[tuple[str, str, str], list[int]] = {}
        for each in budgets:
            tenant, _, name = each.budget.partition("/")
            label = self._tenants.shown(tenant)
            key = (label, name if label == tenant else OTHER, each.unit)
            found = (each.limit, each.posted + each.late_posted, each.reserved + each.suspense)
            sums[key] = [a + b for a, b in zip(sums.get(key, (0, 0, 0)), found, strict=True)]
        for key, amounts in sums.items():
            per_unit = 1 if key[2] == TOKENS else PICO_PER_UNIT
            for gauge, amount in zip(gauges, amounts, strict=True):
                gauge.labels(*key).set(amount / per_unit)
