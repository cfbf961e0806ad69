"""Prometheus metrics of the worker. No label names a session, a tenant or a request."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gristmill_contracts import metrics as names
from gristmill_contracts.operations import Operation, Result, count_result, kind_of
from gristmill_contracts.usage import TOKEN_TYPES

_BUCKETS: Final = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)


class WorkerMetrics:
    """One registry for each process, made once."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.operations = Counter(
            names.WORKER_OPERATIONS,
            "Operations that ran, by kind, outcome and whether they were replays",
            ["kind", "outcome", "replay"],
            registry=self.registry,
        )
        self.tokens = Counter(
            names.WORKER_TOKENS,
            "Tokens of completed operations, by type; replays apart",
            ["token_type", "replay"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            names.WORKER_OPERATION_SECONDS,
            "Time of an operation in the engine",
            ["kind"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.sessions = Gauge(names.WORKER_SESSIONS, "Open sessions", registry=self.registry)
        self.queued = Gauge(
            names.WORKER_QUEUED, "Work that waits for the engine", registry=self.registry
        )

    def count(
        self,
        operation: Operation,
        result: Result | None,
        *,
        failed: bool,
        replay: bool,
        seconds: float,
    ) -> None:
        """Without a result it failed, or (in a replay) had nothing to do: no tokens."""
        kind, again = kind_of(operation), str(replay).lower()
        outcome = "failed" if failed else "completed"
        self.operations.labels(kind, outcome, again).inc()
        self.seconds.labels(kind).observe(seconds)
        if result is not None:
            counts = count_result(operation, result)
            for token_type in TOKEN_TYPES:
                self.tokens.labels(token_type, again).inc(getattr(counts, token_type))
