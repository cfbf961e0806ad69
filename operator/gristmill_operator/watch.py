"""kopf as the watcher: its handlers write into the cache and put keys into the queue, and do no more.

What to do is decided later, from the whole world. kopf keeps the streams alive; it writes nothing, since
it has no state handlers, no peering and no posting.
"""

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import kopf

from gristmill_contracts.errors import UnavailableError
from gristmill_operator.cache import ObjectCache
from gristmill_operator.credentials import Access
from gristmill_operator.essence import NoEssence, NoProgress
from gristmill_operator.kinds import WATCHED, Kind
from gristmill_operator.queue import KeyQueue
from gristmill_operator.routing import is_turn, keys_for
from gristmill_operator.seams import Json

logger = logging.getLogger(__name__)

USER_AGENT: Final = "gristmill-operator/watch"
CONNECTIONS_MAX: Final = 2 * len(WATCHED)
RESTARTS_MAX: Final = 10
RESTARTS_WITHIN_S: Final = 600.0
ABSENT_CHECK_S: Final = 2.0
SERVER_TIMEOUT_S: Final = 290
CLIENT_TIMEOUT_S: Final = 300.0
JITTER_S: Final = 20
ERROR_BACKOFFS: Final = (0.5, 1, 1, 2, 3, *((5,) * 120))
"""kopf gives up after the last one: ten minutes without an API server."""


@dataclass(slots=True, kw_only=True)
class Intake:
    """Where news arrive, from the watches and from the sweep."""

    cache: ObjectCache
    queue: KeyQueue
    told: Callable[[Kind, Json | None, Json | None], None] = lambda kind, before, after: None
    """Told of each piece of news: kind, the object before and after; None = it is not there."""

    def take(self, kind: Kind, body: Json) -> bool:
        """The object is there, as `body` says. False if that is old."""
        meta = body["metadata"]
        before = self.cache.get(kind, meta.get("namespace", ""), meta["name"])
        if not self.cache.put(kind, body):
            return False
        after = self.cache.get(kind, meta.get("namespace", ""), meta["name"])
        self.tell(kind, before, after)
        return True

    def drop(self, kind: Kind, body: Json) -> None:
        """The object is gone."""
        meta = body["metadata"]
        self.cache.remove(kind, meta.get("namespace", ""), meta["name"], meta["uid"])
        self.tell(kind, body, None)

    def tell(self, kind: Kind, before: Json | None, after: Json | None) -> None:
        """Have all looked at again that the change may concern."""
        self.told(kind, before, after)
        first = is_turn(kind, before, after)
        for key in keys_for(kind, before, after, self.cache):
            self.queue.add(key, first=first)


News = Callable[[Kind, str | None, Json], None]
"""Told of each watch event: kind, type (None = of the first list), object."""


def make_registry(
    told: News, login: Callable[[], kopf.AiohttpSession], kinds: Sequence[Kind] = WATCHED
) -> kopf.OperatorRegistry:
    """Handlers for every kind, in a registry of their own."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.AiohttpSession:  # Any: what kopf passes
        return login()

    for kind in kinds:
        _watch(registry, told, kind)
    return registry


def _watch(registry: kopf.OperatorRegistry, told: News, kind: Kind) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)
    async def seen(event: kopf.RawEvent, **_: Any) -> None:  # Any: what kopf passes
        told(kind, event["type"], cast(Json, event["object"]))


def make_settings(*, initial_streaming: bool, exit_timeout_s: float) -> kopf.OperatorSettings:
    """For production; docs/decisions/0014-kopf-watches-and-nothing-else.md has the reasons."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.finalizer = "gristmill.dev/kopf"
    settings.persistence.diffbase_storage = NoEssence()
    settings.persistence.progress_storage = NoProgress()
    settings.queueing.worker_limit = None
    settings.queueing.idle_timeout = 1.0
    settings.watching.server_timeout = SERVER_TIMEOUT_S - random.randrange(JITTER_S)  # noqa: S311
    settings.watching.client_timeout = CLIENT_TIMEOUT_S
    settings.watching.connect_timeout = 10.0
    settings.watching.initial_streaming = initial_streaming
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 10.0
    settings.networking.error_backoffs = ERROR_BACKOFFS
    settings.networking.enforce_retry_after = True
    settings.process.ultimate_exiting_timeout = exit_timeout_s
    for kind in WATCHED:
        if kind.selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    return settings


@dataclass(slots=True, kw_only=True)
class Watcher:
    """Runs kopf in a thread of its own: when kopf ends, it cancels every task of its loop."""

    access: Access
    intake: Intake
    settings: kopf.OperatorSettings
    loop: asyncio.AbstractEventLoop
    """Where the intake lives."""
    absent: Callable[[], Awaitable[Collection[str]]]
    """Plural names of kinds whose definitions are gone: a watch of one would end all others."""
    restarted: Callable[[], None] = lambda: None
    missed: Callable[[], None] = lambda: None
    """Told that nobody watches for a moment: what ends in it is never announced."""

    async def run(self) -> None:
        """Watch until cancelled; start again when kopf gives up. Raises UnavailableError if that is all it does."""
        ended: list[float] = []
        while True:
            absent = await self.absent()
            if absent:
                logger.warning("definitions_missing", extra={"kinds": sorted(absent)})
            why = await self._watch(absent)
            self.missed()
            if not why:
                continue
            now = self.loop.time()
            ended = [*(at for at in ended if now - at < RESTARTS_WITHIN_S), now]
            logger.error("watch_ended", extra={"error": why, "times": len(ended)})
            self.restarted()
            if len(ended) > RESTARTS_MAX:
                raise UnavailableError(f"the watches ended {len(ended)} times, last: {why}")
            await asyncio.sleep(1.0)

    async def _watch(self, absent: Collection[str]) -> str:
        """Watch all kinds but those. Returns why it ended; "" = what is absent is no longer the same."""
        done: asyncio.Future[str] = self.loop.create_future()
        stop = threading.Event()
        kinds = [kind for kind in WATCHED if kind.plural not in absent]
        arguments = (done, stop, kinds)
        thread = threading.Thread(target=self._thread, args=arguments, name="kopf", daemon=True)
        changed = asyncio.create_task(self._changed(absent), name="definitions")
        thread.start()
        try:
            waiting: list[asyncio.Future[Any]] = [done, changed]  # Any: their results differ
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()
            changed.cancel()
        return done.result() if done.done() else ""

    async def _changed(self, absent: Collection[str]) -> None:
        """Return once other kinds are absent. With none absent a watch that ends tells of it."""
        if not absent:
            await asyncio.Event().wait()
        while set(await self.absent()) == set(absent):
            await asyncio.sleep(ABSENT_CHECK_S)

    def _thread(
        self, done: "asyncio.Future[str]", stop: threading.Event, kinds: Sequence[Kind]
    ) -> None:
        def report(why: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: we are stopping
                self.loop.call_soon_threadsafe(_resolve, done, why)

        try:
            asyncio.run(self._operate(stop, report, kinds))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the watch is over
            report(f"{type(error).__name__}: {error}")

    async def _operate(
        self, stop: threading.Event, report: Callable[[str], None], kinds: Sequence[Kind]
    ) -> None:
        def told(kind: Kind, type_: str | None, body: Json) -> None:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._take, kind, type_, body)

        def login() -> kopf.AiohttpSession:
            # A new one each time: kopf takes a known one for the one that was just refused.
            http = self.access.session(connections_max=CONNECTIONS_MAX, user_agent=USER_AGENT)
            return kopf.AiohttpSession(aiohttp_session=http, server=self.access.server)

        tasks = await kopf.spawn_tasks(
            registry=make_registry(told, login, kinds),
            settings=self.settings,
            clusterwide=True,
            standalone=True,
            identity="gristmill",  # type: ignore[arg-type]
            stop_flag=stop,
        )
        # None of them ends by itself. kopf's own wait for the rest may last for ever when its
        # authentication was the first to end, so nobody waits for it.
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        told_why = [str(each.exception() or "it ended") for each in ended if not each.cancelled()]
        report(", ".join(told_why) or "it was cancelled")

    def _take(self, kind: Kind, type_: str | None, body: Json) -> None:
        if type_ == "DELETED":
            self.intake.drop(kind, body)
        else:
            self.intake.take(kind, body)


def _resolve(done: "asyncio.Future[str]", why: str) -> None:
    if not done.done():
        done.set_result(why)
