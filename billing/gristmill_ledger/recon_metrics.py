"""What the ledger tells Prometheus of the reconciliation: what is open, and since when."""

import time
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from gristmill_contracts import metrics as names
from gristmill_ledger.reconcile.store import OpenSum

KINDS: Final = (
    *(
        (pair, kind)
        for pair in ("worker-meter", "meter-ledger")
        for kind in ("missing", "duplicate", "mismatch", "unknown")
    ),
    ("ledger", "orphan_reservation"),
)


class ReconMetrics:
    """Every pair and kind has a series from the start: an alert must see it leave 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tokens = Gauge(
            names.RECON_DIFF_TOKENS,
            "Tokens of open differences, either way; one may have none",
            ["pair", "kind"],
            registry=registry,
        )
        self.differences = Gauge(
            names.RECON_DIFFS,
            "Differences that nobody has decided on",
            ["pair", "kind"],
            registry=registry,
        )
        self.oldest = Gauge(
            names.RECON_OLDEST_DIFF_AGE_SECONDS, "Age of the oldest of them", registry=registry
        )
        self.run_age = Gauge(
            names.RECON_RUN_AGE_SECONDS,
            "Since when everything was last compared; -1 = it has not been yet",
            registry=registry,
        )
        self.show([], None)

    def show(self, sums: Iterable[OpenSum], run_us: int | None) -> None:
        open_now = {(each.pair, each.kind): each for each in sums}
        for labels in KINDS:
            found = open_now.get(labels)
            self.tokens.labels(*labels).set(0 if found is None else found.tokens)
            self.differences.labels(*labels).set(0 if found is None else found.differences)
        oldest_us = min((each.oldest_us for each in open_now.values()), default=None)
        self.oldest.set(0 if oldest_us is None else max(0.0, time.time() - oldest_us / 1e6))
        self.run_age.set(-1 if run_us is None else max(0.0, time.time() - run_us / 1e6))
