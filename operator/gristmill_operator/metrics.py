"""What the operator counts about itself, for Prometheus. No label ever names a tenant or a session."""

import time
from collections import Counter as Tally
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gristmill_contracts import limits
from gristmill_contracts import metrics as names
from gristmill_contracts.resources import parse_time
from gristmill_operator.cache import ObjectCache
from gristmill_operator.ghosts import Sweeper
from gristmill_operator.heartbeats import HeartbeatStream
from gristmill_operator.kinds import SESSIONS, WATCHED
from gristmill_operator.lease import Elector
from gristmill_operator.queue import KeyQueue

SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300)
STATES_TOLD: Final = 16

if len(WATCHED) > limits.METRIC_LABEL_VALUES_MAX:
    raise AssertionError("the kinds are a label's values")


class Metrics:
    """One registry for each operator, so that two in one process do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = self._counter(
            names.OPERATOR_RECONCILES, "Looks at one object, by kind and by how they went",
            "kind", "result",
        )  # fmt: skip
        self.reconcile_seconds = self._histogram(
            names.OPERATOR_RECONCILE_SECONDS, "Time of one look at one object", "kind"
        )
        self.queue_wait_seconds = self._histogram(
            names.OPERATOR_QUEUE_WAIT_SECONDS, "Time that a key waited for a worker"
        )
        self.api_requests = self._counter(
            names.OPERATOR_API_REQUESTS, "Requests to the API server, but for watches",
            "verb", "code",
        )  # fmt: skip
        self.api_request_seconds = self._histogram(
            names.OPERATOR_API_REQUEST_SECONDS, "Time of one request to the API server", "verb"
        )
        self.status_writes = self._counter(
            names.OPERATOR_STATUS_WRITES, "Status writes of sessions, by whether they only inform",
            "informative",
        )  # fmt: skip
        self.watch_events = self._counter(
            names.OPERATOR_WATCH_EVENTS, "Changes that the watches told", "resource"
        )
        self.watch_missed = self._counter(
            names.OPERATOR_WATCH_MISSED, "Objects that a sweep put right", "resource"
        )
        self.watch_restarts = self._counter(
            names.OPERATOR_WATCH_RESTARTS, "How often all watches had to be started again"
        )
        self.events_dropped = self._counter(
            names.OPERATOR_EVENTS_DROPPED, "Events for users that were not posted"
        )
        self.flush_abandoned = self._counter(
            names.OPERATOR_FLUSH_ABANDONED, "Deleted sessions whose usage was given up, as a gap"
        )
        self.start_seconds = Histogram(
            names.OPERATOR_START_SECONDS,
            "Time from a session's creation until it first serves",
            buckets=(0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800),
            registry=self.registry,
        )
        self.loop_lag = Gauge(
            names.OPERATOR_LOOP_LAG_SECONDS,
            "How late the event loop was, at its latest in the last half minute",
            registry=self.registry,
        )

    def request(self, verb: str, code: str, seconds: float) -> None:
        """One request to the API server ended; code "error" = without an answer."""
        self.api_requests.labels(verb, code).inc()
        self.api_request_seconds.labels(verb).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=SECONDS, registry=self.registry)


@dataclass(kw_only=True, eq=False)
class Snapshot(Collector):
    """What is read at the moment of the scrape."""

    cache: ObjectCache
    queue: KeyQueue
    elector: Elector
    sweeper: Sweeper
    heartbeats: HeartbeatStream | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        # A follower only collects keys: nobody waits for them.
        leads = self.elector.leads
        depth, age_s = (len(self.queue), self.queue.oldest_s()) if leads else (0, 0.0)
        yield _gauge(names.OPERATOR_QUEUE_DEPTH, "Keys that wait for a worker", depth)
        yield _gauge(names.OPERATOR_QUEUE_AGE_SECONDS, "Age of the oldest of them", age_s)
        yield _gauge(names.OPERATOR_IN_FLIGHT, "Keys that are worked on", self.queue.in_flight)
        yield _gauge(names.OPERATOR_LEADER, "1 = this process leads", leads)
        yield _gauge(
            names.OPERATOR_LEDGER_ANSWERS,
            "1 = the ledger answered the last poll",
            self.heartbeats is not None and self.heartbeats.ledger_answers,
        )
        yield from self._of_kinds()
        yield self._states()
        yield _gauge(
            names.OPERATOR_FINALIZER_AGE_SECONDS,
            "Age of the oldest deletion of a session that is not done",
            self._oldest_deletion_s(),
        )

    def _of_kinds(self) -> Iterator[GaugeMetricFamily]:
        cached = GaugeMetricFamily(
            names.OPERATOR_CACHED_OBJECTS, "Objects in the cache", labels=["resource"]
        )
        silent = GaugeMetricFamily(
            names.OPERATOR_WATCH_AGE_SECONDS,
            "Since when a watch has missed changes; 0 = it works",
            labels=["resource"],
        )
        now = self.sweeper.clock()
        for kind in WATCHED:
            cached.add_metric([kind.plural], self.cache.count(kind))
            since = self.sweeper.silent_since.get(kind, now)
            silent.add_metric([kind.plural], now - since)
        yield cached
        yield silent

    def _states(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(names.OPERATOR_SESSIONS, "Sessions by state", labels=["state"])
        states = Tally(
            str((body.get("status") or {}).get("state", "Created"))
            for body in self.cache.list(SESSIONS)
        )
        for state, count in states.most_common(STATES_TOLD):
            family.add_metric([state], count)
        return family

    def _oldest_deletion_s(self) -> float:
        began = (
            parse_time(body["metadata"]["deletionTimestamp"])
            for body in self.cache.list(SESSIONS)
            if body["metadata"].get("deletionTimestamp")
        )
        oldest_us = min((each for each in began if isinstance(each, int)), default=None)
        return 0.0 if oldest_us is None else max(0.0, time.time() - oldest_us / 1e6)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))
