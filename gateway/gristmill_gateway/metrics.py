"""Prometheus metrics of the gateway. Labels come from fixed sets: never a tenant, session or request."""

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gristmill_contracts import metrics as names

SECONDS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One registry for a process, so that tests can have many."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            names.GATEWAY_REQUESTS,
            "Requests answered",
            ["operation", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            names.GATEWAY_REQUEST_SECONDS,
            "Time from a request's headers to its answer; held polls among them",
            ["operation"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.open_requests = Gauge(
            names.GATEWAY_OPEN_REQUESTS, "Requests being worked on or held", registry=self.registry
        )
        self.refused_numbers = Counter(
            names.GATEWAY_REFUSED_NUMBERS,
            "Training submits that failed validation and whose sequence number was closed",
            registry=self.registry,
        )
        self.held_body_bytes = Gauge(
            names.GATEWAY_HELD_BODY_BYTES,
            "Bytes of request bodies in memory",
            registry=self.registry,
        )

        self.held_submits = Gauge(
            names.GATEWAY_HELD_SUBMITS,
            "Submits that wait for their session's pod",
            registry=self.registry,
        )
        self.watches_away = Gauge(
            names.GATEWAY_WATCHES_AWAY,
            "Kinds of resources whose changes do not arrive just now",
            registry=self.registry,
        )

    def watch(
        self,
        *,
        held_body_bytes: Callable[[], float],
        held_submits: Callable[[], float],
        watches_away: Callable[[], float],
    ) -> None:
        """Read gauges when they are scraped."""
        self.held_body_bytes.set_function(held_body_bytes)
        self.held_submits.set_function(held_submits)
        self.watches_away.set_function(watches_away)

    def render(self) -> bytes:
        return generate_latest(self.registry)
