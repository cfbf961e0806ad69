"""The running ledger: its database, its metrics and those who wait for heartbeats."""

import asyncio
import logging
from functools import partial
from typing import Final

from sqlalchemy import Connection, func, select

from gristmill_contracts.cluster_http import HeartbeatAnswer
from gristmill_contracts.http import Heartbeat, HeartbeatPage
from gristmill_ledger import schema
from gristmill_ledger.artifact_port import ArtifactStore
from gristmill_ledger.artifact_stores import artifact_store, body_store, head_store
from gristmill_ledger.auth import read_cluster_key
from gristmill_ledger.budgets import figures
from gristmill_ledger.budgets.decide import Figures
from gristmill_ledger.budgets.desk import LeaseDesk
from gristmill_ledger.budgets.returns import answer_leases
from gristmill_ledger.chain.keeper import Keeper
from gristmill_ledger.chain.keys import open_key
from gristmill_ledger.coalesce import Coalescer
from gristmill_ledger.costs import Costs
from gristmill_ledger.database import Database, open_engine
from gristmill_ledger.device_times import record_device_times
from gristmill_ledger.directives import answer_heartbeats
from gristmill_ledger.events import store_batches
from gristmill_ledger.follower import Follower
from gristmill_ledger.heartbeats import heartbeats_after, newest_heartbeat_us, store_heartbeats
from gristmill_ledger.inbox_claims import waiting_sessions
from gristmill_ledger.metrics import Metrics
from gristmill_ledger.migrate import migrate
from gristmill_ledger.reconcile.store import OpenSum, newest_run_us, open_sums
from gristmill_ledger.reconcile.task import Reconciler
from gristmill_ledger.registry import session_tenant
from gristmill_ledger.release import clock_us, grant_releases
from gristmill_ledger.settings import LedgerSettings
from gristmill_ledger.sweeper import Sweeper
from gristmill_ledger.usage import cost_so_far

log = logging.getLogger(__name__)

TENANTS_KEPT_MAX: Final = 100_000
"""Sessions whose tenant is kept in memory."""
REPLICA_LOOK_S: Final = 1.0
"""How often a held poll looks for heartbeats that another replica stored."""


class Ledger:
    """`open` migrates the database; `close` lets what runs finish."""

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.costs = Costs(default_book=settings.price_book)
        self.database: Database
        self.coalescer: Coalescer
        """Usage on its way in. Made by `open`, as the database is."""
        self.cluster_key: bytes | None = None
        """With one, every call is authenticated. Read by `open`."""
        self.artifacts: ArtifactStore | None = None
        """None = checkpoints lie in a folder that all parts share."""
        self.bodies: ArtifactStore
        """Payloads and results of operations. Made by `open`."""
        self.uploads = 0
        """Artifacts that are on their way in."""
        self.stopping = False
        """Told to end: still serving, and no longer ready."""
        self.polls_held = 0
        """Requests for heartbeats that wait for one."""
        self.follower: Follower
        """Made by `open`, which also starts it."""
        self.reconciler: Reconciler
        """Made by `open`, which also starts it."""
        self.desk: LeaseDesk
        """Leases of budgets. Made by `open`, which also starts it."""
        self.keeper: Keeper
        """Of the chains. Made by `open`, which also starts it."""
        self._tasks: list[asyncio.Task[None]] = []
        self._tenants: dict[str, str] = {}
        self._beaten = asyncio.Condition()
        self._beats = 0
        self._closing = False

    async def open(self) -> None:
        settings = self.settings
        if settings.cluster_key_file is not None:
            self.cluster_key = read_cluster_key(settings.cluster_key_file)
        self.artifacts = artifact_store(settings)
        self.bodies = body_store(settings)
        for store in (self.artifacts, self.bodies):
            if store is not None:
                await asyncio.to_thread(store.open)
        engine = open_engine(
            settings.url,
            busy_timeout_s=settings.busy_timeout_s,
            connections=settings.readers + 1,
        )
        await asyncio.to_thread(migrate, engine)
        self.database = Database(
            engine, readers=settings.readers, writes_pending_max=settings.writes_pending_max
        )
        self.database.on_commit = self.metrics.committed
        self.coalescer = Coalescer(
            self.database,
            partial(store_batches, book=settings.price_book, price_lists={}),
            waiting_max=settings.writes_pending_max,
        )
        self.follower = Follower(
            database=self.database, metrics=self.metrics, book=settings.price_book
        )
        sweeper = Sweeper(database=self.database, bodies=self.bodies)
        self.desk = LeaseDesk(
            database=self.database,
            metrics=self.metrics,
            book=settings.price_book,
            waiting_max=settings.writes_pending_max,
        )
        self.keeper = await self._chain_keeper()
        self.reconciler = Reconciler(database=self.database)
        self._tasks = [
            asyncio.create_task(each.run(), name=type(each).__name__)
            for each in (self.follower, sweeper, self.desk, self.keeper, self.reconciler)
        ]
        log.info("ledger_opened", extra={"database": engine.url.render_as_string()})

    async def _chain_keeper(self) -> Keeper:
        copies = head_store(self.settings)
        if copies is not None:
            await asyncio.to_thread(copies.open)
        key = await asyncio.to_thread(open_key, self.settings)
        return Keeper(
            database=self.database,
            metrics=self.metrics,
            key=key,
            copies=copies,
            old_keys=self.settings.chain_old_keys,
        )

    async def close(self) -> None:
        await self.wake()
        for task in self._tasks:
            task.cancel()
            await asyncio.wait([task])
        await asyncio.to_thread(self.database.close)
        log.info("ledger_closed")

    async def tenant_of(self, uid: str) -> str | None:
        """The tenant of a session; None = nobody has told. It never changes, so it is looked up once."""
        tenant = self._tenants.get(uid)
        if tenant is None:
            tenant = await self.database.read(partial(session_tenant, uid=uid))
            if len(self._tenants) >= TENANTS_KEPT_MAX:
                self._tenants.clear()
            if tenant is not None:
                self._tenants[uid] = tenant
        return tenant

    async def wake(self) -> None:
        """End all held polls: the process is about to stop."""
        self._closing = True
        async with self._beaten:
            self._beaten.notify_all()

    async def beat(self, heartbeats: list[Heartbeat]) -> HeartbeatAnswer:
        """Store heartbeats, wake those who wait for them, and tell what their sessions are to do."""

        def work(connection: Connection) -> tuple[int, HeartbeatAnswer]:
            stored = store_heartbeats(connection, heartbeats)
            answer = answer_heartbeats(connection, heartbeats)
            at_us = clock_us(connection)
            answer.release_until_s = grant_releases(connection, heartbeats, at_us)
            answer_leases(connection, heartbeats, answer, at_us)
            record_device_times(connection, heartbeats, at_us)
            uids = {beat.view.uid for beat in heartbeats}
            answer.inbox = waiting_sessions(connection, uids)
            return stored, answer

        stored, answer = await self.database.write(work)
        if stored:
            self._beats += 1
            async with self._beaten:
                self._beaten.notify_all()
        return answer

    async def await_heartbeats(self, after: int, wait_s: float) -> HeartbeatPage:
        """Heartbeats behind the cursor; if there is none, wait for one up to `wait_s`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        while True:
            # Taken before the look: a heartbeat stored during it is not waited for.
            beats = self._beats
            page = await self.database.read(partial(self._priced_page, after=after))
            if page.heartbeats or self._closing or clock() >= deadline:
                return page
            await self._beaten_since(beats, min(deadline - clock(), self._look_again_s))

    def _priced_page(self, connection: Connection, after: int) -> HeartbeatPage:
        page = heartbeats_after(connection, after)
        self.costs.fill(connection, page.heartbeats)
        return page

    @property
    def _look_again_s(self) -> float:
        """Another replica may have stored one: only a shared database has others."""
        return float("inf") if self.database.engine.dialect.name == "sqlite" else REPLICA_LOOK_S

    async def _beaten_since(self, beats: int, wait_s: float) -> None:
        """Wait until another heartbeat is stored here, at most `wait_s`, and not at the end."""
        async with self._beaten:
            self.polls_held += 1
            try:
                async with asyncio.timeout(max(0.0, wait_s)):
                    await self._beaten.wait_for(lambda: self._closing or self._beats != beats)
            except TimeoutError:
                return
            finally:
                self.polls_held -= 1

    async def metrics_text(self) -> bytes:
        producers, heartbeat_us, budgets = await self.database.read(_gauges)
        self.metrics.budgets.show(budgets)
        self.metrics.recon.show(*await self.database.read(_recon))
        if self.metrics.rating.costs_are_old:
            book = self.settings.price_book
            self.metrics.rating.show(await self.database.read(lambda c: cost_so_far(c, book)))
        return self.metrics.text(producers=producers, heartbeat_us=heartbeat_us)


def _gauges(connection: Connection) -> tuple[int, int | None, list[Figures]]:
    producers = connection.execute(select(func.count()).select_from(schema.producer)).scalar_one()
    budgets = figures.shown(connection, clock_us(connection))
    return producers, newest_heartbeat_us(connection), budgets


def _recon(connection: Connection) -> tuple[list[OpenSum], int | None]:
    return open_sums(connection), newest_run_us(connection)
