"""What the ledger tells Prometheus of rating: what lags, what has no price, what tenants cost so far."""

import time
from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from gristmill_contracts import metrics as names
from gristmill_contracts.label_values import LabelValues
from gristmill_contracts.units import PICO_PER_UNIT

LOOK_AGAIN_S: Final = 15.0
"""How old the costs may be: adding them up reads the sums of all tenants."""
Costs = Mapping[tuple[str, str], int]
"""(tenant, currency) -> pico-units."""


class RatingMetrics:
    """Costs are in units of their currency: for panels of trends. Bills read the ledger."""

    def __init__(self, registry: CollectorRegistry, tenants: LabelValues) -> None:
        self.unpriced = Counter(
            names.LEDGER_UNPRICED_EVENTS,
            "Usage events rated without an amount, for a token had no price",
            registry=registry,
        )
        self.unrated = Gauge(
            names.LEDGER_UNRATED_EVENTS, "Stored usage events not rated yet", registry=registry
        )
        self.cost = Gauge(
            names.RATED_COST,
            "Cost of all usage so far, without what has no price; falls where it is rated again for less",
            ["tenant", "currency"],
            registry=registry,
        )
        self._tenants = tenants
        self._looked_at = float("-inf")

    @property
    def costs_are_old(self) -> bool:
        return time.monotonic() - self._looked_at >= LOOK_AGAIN_S

    def show(self, costs: Costs) -> None:
        """Tenants over the cap share a series; those that cost most come first."""
        self._looked_at = time.monotonic()
        shown: dict[tuple[str, str], int] = {}
        for (tenant, currency), pico in sorted(costs.items(), key=lambda item: -item[1]):
            label = (self._tenants.shown(tenant), currency)
            shown[label] = shown.get(label, 0) + pico
        self.cost.clear()
        for labels, pico in shown.items():
            self.cost.labels(*labels).set(pico / PICO_PER_UNIT)
