"""Starts the operator's parts in their order, and ends them in the reverse one.

Warm caches first, then leadership, then work. A process that loses its lead ends: another one, or its
own successor, begins with what the API server holds.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts.errors import GristmillError
from gristmill_operator import probes, watch
from gristmill_operator.bucket import TokenBucket
from gristmill_operator.cache import ObjectCache
from gristmill_operator.client import ApiClient
from gristmill_operator.credentials import Access, find_access
from gristmill_operator.ghosts import Sweeper
from gristmill_operator.kinds import Kind
from gristmill_operator.leading import Leader, SessionIndex
from gristmill_operator.lease import Elector
from gristmill_operator.metrics import Metrics, Snapshot
from gristmill_operator.parts import Compose
from gristmill_operator.problems import NotLeaderError
from gristmill_operator.queue import KeyQueue
from gristmill_operator.seams import Json
from gristmill_operator.settings import OperatorSettings
from gristmill_operator.startup import NotFitError, absent_kinds, check, patiently

logger = logging.getLogger(__name__)

DONE: Final = 0
FAILED: Final = 1
NOT_FIT: Final = 3
USER_AGENT: Final = "gristmill-operator"
EXIT_S: Final = 25.0
"""Below the pod's grace of 30 s."""
EVENT_QPS: Final = 10.0
EVENT_BURST: Final = 50
LEASE_TIMEOUT_S: Final = 4.0


async def operate(settings: OperatorSettings, compose: Compose, stop: asyncio.Event) -> int:
    """Run until `stop` is set. Returns the exit status of the process."""
    operator = Operator(
        settings=settings,
        compose=compose,
        access=find_access(settings.kubeconfig, settings.api_server_url),
        identity=settings.identity or f"{socket.gethostname()}_{secrets.token_hex(4)}",
    )
    stopping = asyncio.create_task(stop.wait(), name="stop")
    running = asyncio.create_task(operator.run(), name="operator")
    await asyncio.wait([stopping, running], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    running.cancel()
    try:
        await running
    except asyncio.CancelledError:
        return DONE
    except NotFitError as error:
        logger.critical("not_fit", extra={"error": error.message})
        print(error.message, flush=True)
        return NOT_FIT
    except BaseExceptionGroup as group:
        return _report(group)
    except GristmillError as error:
        logger.critical("operator_failed", extra={"error": error.message})
    return FAILED


def _report(group: BaseExceptionGroup[BaseException]) -> int:
    lost, others = group.split(NotLeaderError)
    if lost is not None:
        logger.critical("lease_lost", extra={"error": _first(lost)})
    if others is not None:
        logger.critical("operator_failed", extra={"error": _first(others)}, exc_info=others)
    return FAILED


def _first(group: BaseExceptionGroup[BaseException]) -> str:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@dataclass(slots=True, kw_only=True)
class Operator:
    """One process."""

    settings: OperatorSettings
    compose: Compose
    access: Access
    identity: str
    metrics: Metrics = field(default_factory=Metrics)
    index: SessionIndex = field(default_factory=SessionIndex)

    async def run(self) -> None:
        """Until cancelled, or until something fails that only a new process can put right."""
        async with AsyncExitStack() as stack:
            settings = self.settings
            client = await self._client(
                stack, settings.connections_max, settings.qps, settings.burst
            )
            lease_client = await self._client(stack, 2, 10.0, 10)
            lease_client.timeout_s = LEASE_TIMEOUT_S
            elector = Elector(
                api=lease_client,
                namespace=settings.system_namespace,
                identity=self.identity,
                lease_s=settings.lease_s,
                renew_s=settings.lease_renew_s,
                retry_s=settings.lease_retry_s,
            )
            client.fence = elector.fence
            intake = watch.Intake(cache=ObjectCache(), queue=KeyQueue(), told=self._news)
            sweeper = Sweeper(
                client=client,
                intake=intake,
                every_s=settings.sweep_s,
                corrected=lambda kind, count: self.metrics.watch_missed.labels(kind.plural).inc(
                    count
                ),
            )
            snapshot = Snapshot(
                cache=intake.cache, queue=intake.queue, elector=elector, sweeper=sweeper
            )
            self.metrics.registry.register(snapshot)
            health = await self._serve_probes(stack, sweeper, elector)
            streams = await check(client, settings.system_namespace)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            group.create_task(self._watch(client, sweeper, streams=streams), name="watch")
            await patiently(sweeper.warm)
            health.warm = True
            group.create_task(sweeper.run(), name="sweep")
            events = await self._client(stack, 2, EVENT_QPS, EVENT_BURST)
            events.fence = elector.fence
            leader = Leader(
                settings=settings,
                compose=self.compose,
                client=client,
                event_client=events,
                elector=elector,
                intake=intake,
                index=self.index,
                metrics=self.metrics,
                snapshot=snapshot,
            )
            async with _released(elector):
                await elector.acquire()
                await leader.run()

    async def _watch(self, client: ApiClient, sweeper: Sweeper, *, streams: bool) -> None:
        watcher = watch.Watcher(
            access=self.access,
            intake=sweeper.intake,
            settings=watch.make_settings(
                initial_streaming=streams and self.settings.initial_streaming,
                exit_timeout_s=EXIT_S,
            ),
            loop=asyncio.get_running_loop(),
            absent=lambda: absent_kinds(client),
            restarted=self.metrics.watch_restarts.inc,
            missed=sweeper.hasten,
        )
        await watcher.run()

    async def _client(
        self, stack: AsyncExitStack, connections: int, qps: float, burst: int
    ) -> ApiClient:
        http = self.access.session(connections_max=connections, user_agent=USER_AGENT)
        return ApiClient(
            http=await stack.enter_async_context(http),
            server=self.access.server,
            bucket=TokenBucket(rate=qps, burst=burst),
            timeout_s=self.settings.request_timeout_s,
            count=self.metrics.request,
        )

    async def _serve_probes(
        self, stack: AsyncExitStack, sweeper: Sweeper, elector: Elector
    ) -> probes.Health:
        lag = probes.LoopLag(told=self.metrics.loop_lag.set)
        health = probes.Health(
            lag=lag, silent_since=sweeper.silent_since, leads=lambda: elector.leads,
            lost_s=lambda: elector.lost_s,
        )  # fmt: skip
        measuring = asyncio.create_task(lag.run(), name="loop-lag")
        stack.callback(measuring.cancel)
        runner, port = await probes.serve(
            health.application(self.metrics.text), self.settings.host, self.settings.port
        )
        stack.push_async_callback(runner.cleanup)
        logger.info("listening", extra={"host": self.settings.host, "port": port})
        return health

    def _news(self, kind: Kind, before: Json | None, after: Json | None) -> None:
        self.metrics.watch_events.labels(kind.plural).inc()
        self.index.take(kind, before, after)


@contextlib.asynccontextmanager
async def _released(elector: Elector) -> AsyncIterator[None]:
    """At the end, another may lead at once."""
    try:
        yield
    finally:
        await elector.release()
