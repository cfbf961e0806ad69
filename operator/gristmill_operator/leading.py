"""What runs while this process leads: the ledger's stream, the workers, the resync, the Events."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from gristmill_contracts import labels
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.resources import parse_time
from gristmill_contracts.secrets import service_secret
from gristmill_contracts.session import TrainingSessionStatus
from gristmill_operator.budget import WriteBudget
from gristmill_operator.client import ApiClient
from gristmill_operator.cluster import CachedCluster
from gristmill_operator.cluster_key import ensure_key
from gristmill_operator.expectations import Expectations
from gristmill_operator.heartbeats import HeartbeatStream, informs, is_news
from gristmill_operator.kinds import CHILDREN, SESSIONS, Kind
from gristmill_operator.lease import Elector
from gristmill_operator.ledger import SERVICE, LedgerClient
from gristmill_operator.metrics import Metrics, Snapshot
from gristmill_operator.parts import Compose, Foundation, Parts
from gristmill_operator.reconcile import SessionReconciler
from gristmill_operator.recorder import EventRecorder
from gristmill_operator.routing import all_keys, queued_beside, session_key
from gristmill_operator.seams import Json, Key
from gristmill_operator.settings import OperatorSettings
from gristmill_operator.watch import Intake
from gristmill_operator.workers import Result, Resync, Workers

logger = logging.getLogger(__name__)

INFORM_S_MIN: Final = 3.0
"""After the first news of tokens: what they cost is told a heartbeat later."""
BUSY_S: Final = 10.0
FLUSH_ABANDONED: Final = "UsageFlushAbandoned"


@dataclass(slots=True, kw_only=True)
class SessionIndex:
    """Where the resource of each session is, by its durable identity."""

    keys: dict[SessionUid, Key] = field(default_factory=dict)
    gone: Callable[[str], None] = lambda uid: None
    """Told of the uid of each session resource that is gone."""
    clock: Callable[[], float] = time.monotonic
    _born: dict[SessionUid, str] = field(default_factory=dict)
    changed_at: float = float("-inf")
    """When a session or a child of one last changed."""

    @property
    def busy(self) -> bool:
        return self.clock() - self.changed_at < BUSY_S

    def take(self, kind: Kind, before: Json | None, after: Json | None) -> None:
        if kind == SESSIONS or kind in CHILDREN:
            self.changed_at = self.clock()
        if kind != SESSIONS:
            return
        if after is not None:
            self._put(after)
        elif before is not None:
            if self.keys.get(_identity(before)) == session_key(before):
                del self.keys[_identity(before)]
                self._born.pop(_identity(before), None)
            self.gone(before["metadata"]["uid"])

    def _put(self, body: Json) -> None:
        """Of two resources that claim one identity, it belongs to the older one."""
        identity, key, born = _identity(body), session_key(body), _birth(body)
        known = self.keys.get(identity)
        if known is not None and known != key and self._born[identity] < born:
            logger.warning(
                "session_identity_claimed",
                extra={"session": identity, "namespace": key.namespace, "session_name": key.name},
            )
            return
        self.keys[identity], self._born[identity] = key, born


def _birth(body: Json) -> str:
    """RFC 3339 in UTC: comparable as text."""
    return str(body["metadata"].get("creationTimestamp", ""))


def _identity(body: Json) -> SessionUid:
    meta = body["metadata"]
    return SessionUid((meta.get("annotations") or {}).get(labels.SESSION_ID) or meta["uid"])


@dataclass(slots=True, kw_only=True)
class Leader:
    """`run` it from the moment that leadership begins until it ends."""

    settings: OperatorSettings
    compose: Compose
    client: ApiClient
    event_client: ApiClient
    elector: Elector
    intake: Intake
    index: SessionIndex
    metrics: Metrics
    snapshot: Snapshot
    budget: WriteBudget = field(default_factory=WriteBudget)

    async def run(self) -> None:
        """Until cancelled, or until leadership is lost: then an ExceptionGroup with NotLeaderError."""
        async with asyncio.TaskGroup() as group, aiohttp.ClientSession() as http:
            # The key may be long in coming; the Lease must not wait for it.
            group.create_task(self.elector.hold(), name="lease")
            await self._lead(group, http)
            await asyncio.get_running_loop().create_future()

    async def _lead(self, group: asyncio.TaskGroup, http: aiohttp.ClientSession) -> None:
        settings = self.settings
        key = await ensure_key(self.client, settings.system_namespace, settings.cluster_key_file)
        secret = service_secret(key, SERVICE)
        ledger = LedgerClient(http, settings.ledger_url, lambda: secret)
        heartbeats = HeartbeatStream(
            source=ledger,
            told=self._beat,
            ready=self._all_again,
            hurried=lambda: self.index.busy,
        )
        recorder = EventRecorder(
            api=self.event_client,
            instance=self.elector.identity,
            dropped=self.metrics.events_dropped.inc,
        )
        cache = self.intake.cache
        cluster = CachedCluster(
            client=self.client,
            cache=cache,
            expectations=Expectations(cache=cache),
            told=self.intake.tell,
        )
        parts = self.compose(
            Foundation(
                cache=cache,
                cluster=cluster,
                heartbeats=heartbeats,
                ledger=ledger,
                key=key,
                recorder=recorder,
                settings=settings,
            )
        )
        self.index.gone = parts.forget
        self.snapshot.heartbeats = heartbeats
        workers = self._workers(parts, cluster, recorder)
        self._all_again()
        group.create_task(heartbeats.run(), name="heartbeats")
        group.create_task(recorder.run(), name="events")
        group.create_task(workers.run(settings.workers), name="workers")
        resync = Resync(
            queue=self.intake.queue, keys=lambda: all_keys(cache), every_s=settings.resync_s
        )
        group.create_task(resync.run(), name="resync")

    def _workers(self, parts: Parts, cluster: CachedCluster, recorder: EventRecorder) -> Workers:
        metrics = self.metrics
        sessions = SessionReconciler(
            cluster=cluster,
            observer=parts.observer,
            hands=parts.hands,
            recorder=recorder,
            budget=self.budget,
            read=parts.read,
            busy=self._busy,
            changed=self._changed,
            announced=self._announced,
            wrote=lambda informative: metrics.status_writes.labels(str(informative).lower()).inc(),
        )

        def finished(key: Key, result: Result, seconds: float) -> None:
            metrics.reconciles.labels(key.kind, result).inc()
            metrics.reconcile_seconds.labels(key.kind).observe(seconds)

        return Workers(
            queue=self.intake.queue,
            sessions=sessions,
            others=parts.others,
            finished=finished,
            waited=metrics.queue_wait_seconds.observe,
        )

    def _busy(self) -> bool:
        return len(self.intake.queue) > self.settings.workers

    def _announced(self, reason: str) -> None:
        if reason == FLUSH_ABANDONED:
            self.metrics.flush_abandoned.inc()

    def _all_again(self) -> None:
        for key in all_keys(self.intake.cache):
            self.intake.queue.add(key)

    def _beat(self, uid: SessionUid, before: Heartbeat | None, beat: Heartbeat) -> None:
        key = self.index.keys.get(uid)
        if key is None:
            return
        if is_news(before, beat):
            self.intake.queue.add(key)
        elif informs(before, beat):
            left_s = self.budget.every_s - self.budget.since_s(key)
            self.intake.queue.add_after(key, max(INFORM_S_MIN, left_s))

    def _changed(
        self, body: Json, before: TrainingSessionStatus, after: TrainingSessionStatus
    ) -> None:
        if before.start_time_us is None and after.start_time_us is not None:
            created_us = _creation_us(body)
            self.metrics.start_seconds.observe(max(0.0, (after.start_time_us - created_us) / 1e6))
        if before.state != after.state:
            # It may have left, or taken, a place that others wait for.
            for key in queued_beside(body, self.intake.cache):
                self.intake.queue.add(key)


def _creation_us(body: Json) -> int:
    moment = parse_time(body["metadata"]["creationTimestamp"])
    return moment if isinstance(moment, int) else 0
