"""What the ledger counts about itself, for Prometheus. No label ever names a session or a request."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gristmill_contracts import metrics as names
from gristmill_contracts.label_values import LabelValues
from gristmill_ledger.budget_metrics import BudgetMetrics
from gristmill_ledger.rating_metrics import RatingMetrics
from gristmill_ledger.recon_metrics import ReconMetrics


class Metrics:
    """One registry for each application, so that two in one process do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.label_overflow = Counter(
            names.LABEL_OVERFLOW,
            'Label values counted as "other"',
            ["label"],
            registry=self.registry,
        )
        tenants = LabelValues(self.label_overflow.labels("tenant").inc)
        self.budgets = BudgetMetrics(self.registry, tenants)
        self.rating = RatingMetrics(self.registry, tenants)
        self.recon = ReconMetrics(self.registry)
        self._count_usage()
        self._count_inbox()
        self._watch_chains()
        self.commit_seconds = Histogram(
            names.LEDGER_COMMIT_SECONDS,
            "Time of a writing transaction, commit included",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.5, 1, 5),
            registry=self.registry,
        )
        self.producers = Gauge(
            names.LEDGER_PRODUCERS, "Registered producers", registry=self.registry
        )
        self.heartbeat_age_seconds = Gauge(
            names.LEDGER_HEARTBEAT_AGE_SECONDS,
            "Age of the newest heartbeat of any session; -1 before the first",
            registry=self.registry,
        )
        self.heartbeat_age_seconds.set(-1)

    def _count_usage(self) -> None:
        self.events = Counter(
            names.LEDGER_EVENTS,
            "Usage events received, by what became of them",
            ["result"],
            registry=self.registry,
        )
        for result in ("inserted", "duplicate", "conflict"):
            self.events.labels(result)
        self.quarantined = Counter(
            names.LEDGER_QUARANTINED_EVENTS,
            "Usage events stored with something odd about them",
            registry=self.registry,
        )
        self.log_lost = Counter(
            names.LEDGER_LOG_LOST,
            "Registrations of a log that is older than what it was acknowledged for",
            registry=self.registry,
        )
        self.gaps = Counter(
            names.LEDGER_USAGE_GAPS,
            "Gaps in a session's usage that were put on record",
            registry=self.registry,
        )

    def _count_inbox(self) -> None:
        self.inbox_operations = Counter(
            names.LEDGER_INBOX_OPERATIONS,
            "Operations accepted while no meter served, by what became of them",
            ["result"],
            registry=self.registry,
        )
        for result in ("accepted", "taken", "skipped"):
            self.inbox_operations.labels(result)
        self.archived_operations = Counter(
            names.LEDGER_ARCHIVED_OPERATIONS,
            "Ended operations whose results are served after their session's meter has gone",
            registry=self.registry,
        )

    def _watch_chains(self) -> None:
        self.heads_signed = Counter(
            names.LEDGER_HEADS_SIGNED,
            "Heads of chains that this process signed",
            registry=self.registry,
        )
        self.chain_verified = Gauge(
            names.CHAIN_VERIFIED_SEQ,
            "Rows whose hashes this process has computed again, of all tenants",
            registry=self.registry,
        )
        self.chain_unverified = Gauge(
            names.CHAIN_UNVERIFIED_ROWS,
            "Stored rows that it has not come to",
            registry=self.registry,
        )
        self.chain_failures = Counter(
            names.CHAIN_FAILURES, "Tenants whose chain was found broken", registry=self.registry
        )

    def committed(self, seconds: float) -> None:
        self.commit_seconds.observe(seconds)

    def text(self, *, producers: int, heartbeat_us: int | None) -> bytes:
        """The exposition text, with the gauges brought up to date."""
        self.producers.set(producers)
        if heartbeat_us is not None:
            self.heartbeat_age_seconds.set(time.time() - heartbeat_us / 1e6)
        return generate_latest(self.registry)
