"""Events that users see with `kubectl describe`: one for a reason in ten minutes, repeats counted.

After client-go's recorder, with its limits: 25 of one object in a burst, then one in five minutes.
Nothing waits for an Event, and one that cannot be posted is counted and given up.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from gristmill_contracts.errors import ForbiddenError, GristmillError, NotFoundError
from gristmill_contracts.units import now_us
from gristmill_operator.bucket import TokenBucket
from gristmill_operator.kinds import EVENTS, Kind
from gristmill_operator.lease import micro_time
from gristmill_operator.problems import NotLeaderError
from gristmill_operator.seams import Json

logger = logging.getLogger(__name__)

SERIES_S: Final = 600.0
COUNTS_EVERY_S: Final = 60.0
BURST: Final = 25
RATE: Final = 1 / 300
NOTE_CHARS_MAX: Final = 1024
WAITING_MAX: Final = 2000
OBJECTS_MAX: Final = 20_000
CONTROLLER: Final = "gristmill.dev/operator"
HOME_OF_CLUSTER_WIDE: Final = "default"
"""Events of objects without a namespace live there, as Kubernetes does it."""


class EventApi(Protocol):
    async def create(self, kind: Kind, body: Json) -> Json: ...

    async def merge_patch(self, kind: Kind, namespace: str, name: str, patch: Json) -> Json: ...


Same = tuple[str, str, str]
"""Uid of the object, reason, uid of the related object."""


@dataclass(slots=True, kw_only=True)
class Series:
    """One Event, and how often it has happened since."""

    namespace: str
    name: str
    began: float
    count: int = 1
    told: int = 1
    """The count that the API server knows."""
    last_us: int = 0


@dataclass(slots=True, kw_only=True)
class EventRecorder:
    """The implementation of `seams.Recorder`; `run` posts what was recorded."""

    api: EventApi
    instance: str
    clock: Callable[[], float] = time.monotonic
    wall_us: Callable[[], int] = now_us
    dropped: Callable[[], None] = lambda: None
    """Told of each Event that is not posted."""
    _series: OrderedDict[Same, Series] = field(default_factory=OrderedDict)
    _over: list[Series] = field(default_factory=list)
    _buckets: OrderedDict[str, TokenBucket] = field(default_factory=OrderedDict)
    _waiting: "asyncio.PriorityQueue[tuple[bool, int, Series, Json]]" = field(
        default_factory=lambda: asyncio.PriorityQueue(WAITING_MAX)
    )
    """Warnings first: what somebody must act on does not wait behind a burst of good news."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def record(
        self,
        regarding: Json,
        reason: str,
        note: str,
        *,
        warning: bool = False,
        action: str = "Reconcile",
        related: Json | None = None,
    ) -> None:
        meta, now = regarding["metadata"], self.clock()
        same = (meta["uid"], reason, "" if related is None else related["metadata"]["uid"])
        known = self._series.get(same)
        if known is not None and now - known.began < SERIES_S:
            known.count += 1
            known.last_us = self.wall_us()
            return
        if not self._bucket(meta["uid"]).try_take():
            self.dropped()
            return
        body = self._event(regarding, reason, note)
        body |= {"type": "Warning" if warning else "Normal", "action": action}
        if related is not None:
            body["related"] = reference(related)
        created = body["metadata"]
        series = Series(
            namespace=created["namespace"],
            name=created["name"],
            began=now,
        )
        self._remember(same, series)
        try:
            self._waiting.put_nowait((not warning, next(self._numbers), series, body))
        except asyncio.QueueFull:
            self.dropped()

    async def run(self) -> None:
        """Post, one at a time, until cancelled. Raises NotLeaderError when leadership was lost."""
        while True:
            found = None
            # asyncio.wait_for of Python 3.11 swallows a cancellation that comes together with an Event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COUNTS_EVERY_S):
                    found = await self._waiting.get()
            if found is not None:
                _, _, series, body = found
                await self._post(body, series)
            await self.tell_counts()

    async def tell_counts(self) -> None:
        """Write the counts of those series that are over and happened more than once."""
        while self._series:
            same, series = next(iter(self._series.items()))
            if self.clock() - series.began < SERIES_S:
                break
            del self._series[same]
            self._over.append(series)
        while self._over:
            series = self._over.pop()
            if series.count > series.told:
                await self._tell(series)

    async def _post(self, body: Json, series: Series) -> None:
        try:
            await self.api.create(EVENTS, body)
        except (ForbiddenError, NotFoundError):
            # The namespace is on its way out: nobody will read it.
            self.dropped()
        except NotLeaderError:
            raise
        except GristmillError as error:
            self.dropped()
            logger.warning("event_lost", extra={"error": error.message, "event_name": series.name})

    async def _tell(self, series: Series) -> None:
        when = micro_time(series.last_us)
        patch = {"series": {"count": series.count, "lastObservedTime": when}}
        try:
            await self.api.merge_patch(EVENTS, series.namespace, series.name, patch)
            series.told = series.count
        except NotLeaderError:
            raise
        except GristmillError as error:
            logger.info(
                "event_count_lost", extra={"error": error.message, "event_name": series.name}
            )

    def _event(self, regarding: Json, reason: str, note: str) -> Json:
        time_us, meta = self.wall_us(), regarding["metadata"]
        digest = hashlib.sha256(f"{meta['uid']}/{reason}/{time_us}".encode()).hexdigest()[:16]
        return {
            "metadata": {
                "namespace": meta.get("namespace") or HOME_OF_CLUSTER_WIDE,
                "name": f"{meta['name'][:200]}.{digest}",
            },
            "eventTime": micro_time(time_us),
            "reportingController": CONTROLLER,
            "reportingInstance": self.instance[:128],
            "reason": reason,
            "regarding": reference(regarding),
            "note": note if len(note) <= NOTE_CHARS_MAX else note[: NOTE_CHARS_MAX - 3] + "...",
        }

    def _bucket(self, uid: str) -> TokenBucket:
        bucket = self._buckets.get(uid)
        if bucket is None:
            bucket = self._buckets[uid] = TokenBucket(rate=RATE, burst=BURST, clock=self.clock)
            if len(self._buckets) > OBJECTS_MAX:
                self._buckets.popitem(last=False)
        return bucket

    def _remember(self, same: Same, series: Series) -> None:
        over = self._series.pop(same, None)
        if over is not None:
            self._over.append(over)
        self._series[same] = series
        if len(self._series) > OBJECTS_MAX:
            self._series.popitem(last=False)


def reference(body: Json) -> Json:
    """What an Event names an object by. `body` needs apiVersion and kind."""
    meta = body["metadata"]
    return {
        "apiVersion": body["apiVersion"],
        "kind": body["kind"],
        "name": meta["name"],
        "namespace": meta.get("namespace", ""),
        "uid": meta["uid"],
    }
