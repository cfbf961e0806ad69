"""Prometheus metrics. Labels come from configuration alone; tenants and models are capped."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from gristmill_contracts import metrics as names
from gristmill_contracts.label_values import LabelValues
from gristmill_meter import frames
from gristmill_meter.frames import Frame
from gristmill_meter.records import Record, SessionState


class Metrics:
    """One registry for a process, so that tests can have many."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tokens = Counter(
            names.METER_TOKENS,
            "Tokens settled by this process",
            ["tenant", "model", "token_type"],
            registry=self.registry,
        )
        self.operations = Counter(
            names.METER_OPERATIONS,
            "Operations that ended, by outcome",
            ["tenant", "op", "outcome"],
            registry=self.registry,
        )
        self.label_overflow = Counter(
            names.LABEL_OVERFLOW,
            'Label values counted as "other"',
            ["label"],
            registry=self.registry,
        )
        self._tenants = LabelValues(self.label_overflow.labels("tenant").inc)
        self._models = LabelValues(self.label_overflow.labels("model").inc)
        self.replayed = Counter(
            names.METER_REPLAYED_OPERATIONS,
            "Operations fed to a worker again after it was lost",
            registry=self.registry,
        )
        self.unacked_events = self._gauge(
            names.SPOOL_UNACKED_EVENTS, "Usage events that the ledger has not acknowledged"
        )
        self.oldest_unacked = self._gauge(
            names.SPOOL_OLDEST_UNACKED_SECONDS, "Age of the oldest unacknowledged usage event"
        )
        self.spool_bytes = self._gauge(names.SPOOL_BYTES, "Bytes written to operation logs")
        self.free_bytes = self._gauge(
            names.SPOOL_VOLUME_FREE_BYTES, "Bytes left on the logs' volume"
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def watch(
        self,
        unacked: Callable[[], float],
        oldest_s: Callable[[], float],
        written: Callable[[], float],
        free: Callable[[], float],
    ) -> None:
        """Read gauges when they are scraped."""
        self.unacked_events.set_function(unacked)
        self.oldest_unacked.set_function(oldest_s)
        self.spool_bytes.set_function(written)
        self.free_bytes.set_function(free)

    def operation_ended(self, state: SessionState, record: Record) -> None:
        self.operations.labels(
            self._tenants.shown(state.tenant),
            record.kind or "refused",
            record.state.lower(),
        ).inc()

    def frame_written(self, state: SessionState, frame: Frame) -> None:
        """Count tokens at the frame that bills them."""
        settles = isinstance(frame, frames.Result | frames.Failed | frames.Claim)
        if not settles or not state.events or state.events[-1][0] != state.frames:
            return
        counts = state.events[-1][1].counts
        tenant, model = self._tenants.shown(state.tenant), self._models.shown(state.model)
        for token_type in ("prefill", "cached_prefill", "sample", "train"):
            amount = getattr(counts, token_type)
            if amount:
                self.tokens.labels(tenant, model, token_type).inc(amount)

    def render(self) -> bytes:
        return generate_latest(self.registry)
