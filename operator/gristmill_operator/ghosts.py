"""Compares the caches with the API server: at the start, so that nothing is done before all is known,
and every few minutes, since a watch may miss the end of an object, or deliver nothing at all.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts.errors import GristmillError, NotFoundError
from gristmill_operator.cache import ObjectCache, version_of
from gristmill_operator.client import ApiClient
from gristmill_operator.kinds import WATCHED, Kind
from gristmill_operator.seams import Json
from gristmill_operator.watch import Intake

logger = logging.getLogger(__name__)

LATE_S: Final = 30.0
"""A watch that is later than this is silent: the API server answered all the while."""
CHECK_S: Final = 1.0
HASTENED_S: Final = 5.0
"""A watch that begins anew has brought all that is there by then."""
WARM_CHECK_S: Final = 0.05
ASK_AFTER_S: Final = 3.0
ASKED_MAX: Final = 20
"""Objects that are asked for at a time, one by one."""


class TurnedBackError(Exception):
    """Versions fell: nothing in the cache can be trusted. Only a new process begins anew."""


@dataclass(slots=True, kw_only=True)
class Sweeper:
    client: ApiClient
    intake: Intake
    every_s: float
    corrected: Callable[[Kind, int], None] = lambda kind, count: None
    """Told how many objects a sweep put right."""
    late_s: float = LATE_S
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    hastened: asyncio.Event = field(default_factory=asyncio.Event)
    silent_since: dict[Kind, float] = field(default_factory=dict)
    """Kinds whose watch missed changes, and since when; cleared by a sweep that finds it whole."""

    _versions: dict[Kind, int] = field(default_factory=dict)
    """Of the newest list of each kind."""

    @property
    def cache(self) -> ObjectCache:
        return self.intake.cache

    async def warm(self) -> None:
        """Return once the cache holds all that was there when this began."""
        for kind in WATCHED:
            await self._warm(kind)
            logger.info("cache_warm", extra={"kind": kind.plural, "count": self.cache.count(kind)})

    async def _warm(self, kind: Kind) -> None:
        unknown, began = await self._list(kind), self.clock()
        asked_at = began
        while unknown := [body for body in unknown if not self._is_known(kind, body)]:
            await asyncio.sleep(WARM_CHECK_S)
            now = self.clock()
            if now - began > self.late_s:
                # The watch is silent from its start. What it hides is read; the probe asks for a restart.
                for body in unknown:
                    await self._fetch(kind, body)
                self.silent_since.setdefault(kind, now)
                return
            if now - asked_at > ASK_AFTER_S:
                # What ended meanwhile is never announced to those who came later.
                asked_at = now
                some, rest = unknown[:ASKED_MAX], unknown[ASKED_MAX:]
                unknown = [*rest, *[each for each in some if not await self._gone(kind, each)]]

    async def run(self) -> None:
        """Sweep every `every_s`, and soon after `hasten`, until cancelled."""
        while True:
            # asyncio.wait_for of Python 3.11 swallows a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.every_s):
                    await self.hastened.wait()
            if self.hastened.is_set():
                # The watches that begin anew are to be compared, not those that ended.
                await asyncio.sleep(HASTENED_S)
            self.hastened.clear()
            async with asyncio.TaskGroup() as group:
                for kind in WATCHED:
                    group.create_task(self._patient_sweep(kind), name=f"sweep-{kind.plural}")

    def hasten(self) -> None:
        """Nobody watched for a while."""
        self.hastened.set()

    async def _patient_sweep(self, kind: Kind) -> None:
        try:
            await self.sweep(kind)
        except GristmillError as error:
            logger.info("sweep_failed", extra={"kind": kind.plural, "error": error.message})

    async def sweep(self, kind: Kind) -> int:
        """Put right what the cache has wrong. Returns how many objects."""
        before = self.cache.uids(kind)
        listed = {body["metadata"]["uid"]: body for body in await self._list(kind)}
        wrong = 0
        for uid in before - listed.keys():
            wrong += await self._remove_ghost(kind, uid)
        missed = await self._missed(
            [b for b in listed.values() if not self._is_known(kind, b)], kind
        )
        if missed:
            self.silent_since.setdefault(kind, self.clock())
        else:
            self.silent_since.pop(kind, None)
        if wrong + missed:
            extra = {"kind": kind.plural, "ghosts": wrong, "missed": missed}
            logger.warning("watch_missed", extra=extra)
            self.corrected(kind, wrong + missed)
        return wrong + missed

    async def _missed(self, suspects: list[Json], kind: Kind) -> int:
        """Wait for the watch to bring them; take in those that it does not bring. Returns how many."""
        until = self.clock() + self.late_s
        while suspects and self.clock() < until:
            await self.sleep(CHECK_S)
            suspects = [body for body in suspects if not self._is_known(kind, body)]
        return sum([await self._fetch(kind, body) for body in suspects])

    async def _remove_ghost(self, kind: Kind, uid: str) -> bool:
        known = self.cache.by_uid(kind, uid)
        if known is None or not await self._gone(kind, known):
            return False
        self.intake.drop(kind, known)
        return True

    async def _gone(self, kind: Kind, body: Json) -> bool:
        """Whether there is no object of this uid any more; what is there instead is taken in."""
        meta = body["metadata"]
        try:
            found = await self.client.get(kind, meta.get("namespace", ""), meta["name"])
        except NotFoundError:
            return True
        if found["metadata"]["uid"] == meta["uid"]:
            return not _is_ours(kind, found)
        if _is_ours(kind, found):
            self.intake.take(kind, found)
        return True

    async def _fetch(self, kind: Kind, body: Json) -> bool:
        """Take in what the watch did not tell. True if there was something."""
        meta = body["metadata"]
        try:
            found = await self.client.get(kind, meta.get("namespace", ""), meta["name"])
        except NotFoundError:
            return False
        return self.intake.take(kind, found)

    async def _list(self, kind: Kind) -> list[Json]:
        try:
            listed, version = await self.client.list_metadata(kind)
        except NotFoundError:
            # The definition was removed, and all objects with it.
            return []
        number = int(version) if version.isdecimal() else 0
        if number < self._versions.get(kind, 0):
            raise TurnedBackError(
                f"the API server lists {kind.plural} at version {number}, after "
                f"{self._versions[kind]}: it was restored from a backup, and what is cached is of a "
                "future that will not come"
            )
        self._versions[kind] = number
        return list(listed)

    def _is_known(self, kind: Kind, body: Json) -> bool:
        known = self.cache.by_uid(kind, body["metadata"]["uid"])
        return known is not None and version_of(known) >= version_of(body)


def _is_ours(kind: Kind, body: Json) -> bool:
    if not kind.selector:
        return True
    name, _, value = kind.selector.partition("=")
    return (body["metadata"].get("labels") or {}).get(name) == value
