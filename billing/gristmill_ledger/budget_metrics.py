"""What the ledger tells Prometheus of budgets. Only those of tenants and projects have a series."""

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from gristmill_contracts import limits
from gristmill_contracts import metrics as names
from gristmill_contracts.budgets import TOKENS
from gristmill_contracts.units import PICO_PER_UNIT
from gristmill_ledger.budgets.decide import Figures

LABELS: Final = ("tenant", "budget", "unit")
OTHER: Final = "other"
REASONS: Final = ("suspended", "drained", "decided")


class BudgetMetrics:
    """Money is told in units of its currency."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
        self._tenants: set[str] = set()

    def denied(self, tenant: str, reason: str) -> None:
        """Tenants over the cap share a series."""
        if len(self._tenants) < limits.METRIC_LABEL_VALUES_MAX:
            self._tenants.add(tenant)
        self.denials.labels(tenant if tenant in self._tenants else OTHER, reason).inc()

    def crossed(self, percent: int) -> None:
        self.thresholds.labels(str(percent)).inc()

    def show(self, budgets: Iterable[Figures]) -> None:
        """Bring the gauges up to date; a budget that is not among them has no series any more."""
        for gauge in (self.limit, self.posted, self.reserved):
            gauge.clear()
        for each in budgets:
            tenant, _, name = each.budget.partition("/")
            labels = (tenant, name, each.unit)
            per_unit = 1 if each.unit == TOKENS else PICO_PER_UNIT
            self.limit.labels(*labels).set(each.limit / per_unit)
            self.posted.labels(*labels).set((each.posted + each.late_posted) / per_unit)
            self.reserved.labels(*labels).set((each.reserved + each.suspense) / per_unit)
