"""Keeps one machine as its resources say: a level-based loop over the store, heartbeats and children.

It only carries out: what a session needs is decided in `gristmill_sessions`, what a group of them
needs in `world`. A pass may be repeated at any time and then changes nothing.
"""

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Final

from gristmill_cli.local.actions import Hands, read_seats
from gristmill_cli.local.children import Child, restart_pause_s
from gristmill_cli.local.layout import GroupKey, Layout, make_group_folders, write_private
from gristmill_cli.local.ledger_client import LedgerClient
from gristmill_cli.local.ports import LOOPBACK, Addresses
from gristmill_cli.local.programs import (
    Program,
    WorkerModel,
    gateway_program,
    ledger_program,
    meter_program,
    worker_program,
)
from gristmill_cli.local.reconciler import Reconciler
from gristmill_cli.local.world import Need, World, blamed, group_of, needs
from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.errors import ConflictError, GristmillError, UnavailableError
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_contracts.units import now_us
from gristmill_sessions.local import LocalStore

logger = logging.getLogger(__name__)

STORE_POLL_S: Final = 0.05
TICK_S: Final = 1.0
LEDGER_RETRY_S: Final = 0.2
STOP_S: Final = {"gateway": 10.0, "meter": 40.0, "worker": 15.0, "ledger": 15.0}
"""How long each part may take to end, in the order in which they are ended."""


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """`run` it until `stop`. Everything happens on one event loop."""

    layout: Layout
    store: LocalStore
    addresses: Addresses
    ledger: LedgerClient
    ledger_url: str
    gateway_host: str
    gateway_port: int
    idle_group_stop_s: float = 300.0
    warm: set[GroupKey] = field(default_factory=set)
    """Groups that are kept running without a session."""
    world: World = field(default_factory=World)
    children: dict[str, Child] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False
    _sessions: list[TrainingSession] = field(default_factory=list)
    _wanted: dict[GroupKey, tuple[float, float]] = field(default_factory=dict)
    """When a group's meter, and its worker, were last needed; monotonic seconds."""
    _started_us: int = field(default_factory=now_us)
    _shown: bytes = b""

    async def run(self) -> None:
        """Serve until `stop` was called and everything has ended."""
        self._start(ledger_program(self.layout, self.addresses.port("ledger")))
        self._start(
            gateway_program(self.layout, self.gateway_host, self.gateway_port, self.ledger_url)
        )
        sessions = await asyncio.to_thread(self.store.list, TrainingSession)
        self.world.seats.update(read_seats(self.layout, sessions, self.endpoint))
        helpers = [
            asyncio.create_task(self._watch_store(), name="watch-store"),
            asyncio.create_task(self._watch_heartbeats(), name="watch-heartbeats"),
        ]
        try:
            await self._loop()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._stop_children()

    def stop(self) -> None:
        self.stopping = True
        self.wake.set()

    def kill(self) -> None:
        """End all children at once, without draining."""
        for child in self.children.values():
            child.stopping = True
            child.kill()

    def endpoint(self, key: GroupKey) -> str:
        """Where the meter of a group listens, or will."""
        return f"http://{LOOPBACK}:{self.addresses.port(f'meter.{key}')}"

    def is_ready(self, name: str) -> bool:
        child = self.children.get(name)
        return child is not None and child.ready

    # --- the loop --------------------------------------------------------------------------------

    async def _loop(self) -> None:
        hands = Hands(
            layout=self.layout,
            store=self.store,
            ledger=self.ledger,
            world=self.world,
            endpoint=self.endpoint,
        )
        reconciler = Reconciler(hands=hands)
        while not self.stopping:
            self.wake.clear()
            try:
                pause_s = await self._pass(reconciler)
            except (GristmillError, OSError) as error:
                # The store is locked or full: what runs goes on, the next pass tries again.
                logger.warning("pass_failed", extra={"error": str(error)})
                pause_s = TICK_S
            self._show_processes()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), pause_s)

    async def _pass(self, reconciler: Reconciler) -> float:
        """Look at everything once. Returns the longest pause before the next look."""
        models = await asyncio.to_thread(self.store.list, BaseModelResource)
        tenants = await asyncio.to_thread(self.store.list, Tenant)
        self._sessions = await asyncio.to_thread(self.store.list, TrainingSession)
        accounts = await self._give_accounts(tenants)
        self.world.meters_away = {
            key
            for each in self.children.values()
            if each.program.part == "meter" and not each.ready and (key := each.program.group)
        }
        names = {model.metadata.name for model in models}
        suspended = {tenant.metadata.name for tenant in tenants if tenant.spec.suspended}
        pauses = [TICK_S if accounts else LEDGER_RETRY_S]
        await reconciler.hands.budgets.keep_tenants(tenants)
        for session in self._sessions:
            await reconciler.hands.keep_budgets(session)
            pause_s = await reconciler.reconcile(session, names, suspended)
            pauses.append(TICK_S if pause_s is None else pause_s)
        await self._serve_groups(models)
        return min(pauses)

    async def _give_accounts(self, tenants: list[Tenant]) -> bool:
        """Every tenant shows the account that the ledger allocated to it. False: try again soon."""
        for tenant in tenants:
            if tenant.status.account_id:
                continue
            try:
                account = await self.ledger.put_tenant(tenant.metadata.name)
                status = tenant.status.model_copy(update={"account_id": account.account_id})
                changed = tenant.model_copy(update={"status": status})
                await asyncio.to_thread(self.store.update_status, changed)
            except (UnavailableError, ConflictError):
                return False
        return True

    # --- groups ----------------------------------------------------------------------------------

    async def _serve_groups(self, models: list[BaseModelResource]) -> None:
        """Start what the groups in use need; stop what was not needed for a while."""
        by_name = {model.metadata.name: model for model in models}
        seated = needs(self._sessions, self.world.seats, self.world.heartbeats)
        for key in self.warm:
            seated[key] = Need(meter=True, worker=True)
        now = time.monotonic()
        for key, need in seated.items():
            meter_at, worker_at = self._wanted.get(key, (now, now))
            self._wanted[key] = (now if need.meter else meter_at, now if need.worker else worker_at)
            if need.meter:
                self._start_meter(key)
            if need.worker and key.model in by_name:
                self._start_worker(key, by_name[key.model])
        for key, (meter_at, worker_at) in list(self._wanted.items()):
            if now - worker_at > self.idle_group_stop_s:
                await self._end(f"worker.{key}")
            if now - meter_at > self.idle_group_stop_s:
                await self._end(f"meter.{key}")

    def _start_meter(self, key: GroupKey) -> None:
        if f"meter.{key}" in self.children:
            return
        make_group_folders(self.layout, key)
        port, socket = self.addresses.port(f"meter.{key}"), self.addresses.socket(key)
        self._start(meter_program(self.layout, key, port, socket, self.ledger_url))

    def _start_worker(self, key: GroupKey, model: BaseModelResource) -> None:
        if f"worker.{key}" in self.children:
            return
        make_group_folders(self.layout, key)
        chosen = WorkerModel(
            name=model.metadata.name, folder=model.spec.weights.path, dtype=model.spec.dtype
        )
        self._start(worker_program(self.layout, key, self.addresses.socket(key), chosen))

    # --- children --------------------------------------------------------------------------------

    def _start(self, program: Program) -> None:
        child = Child(
            program=program,
            on_change=self.wake.set,
            on_exit=self._child_ended,
            pause_s=self._restart_pause_s,
        )
        self.children[program.name] = child
        child.start()

    def _child_ended(self, child: Child, code: int) -> None:
        key = child.program.group
        if child.program.part != "worker" or key is None:
            return
        hit = blamed(self._sessions, self.world.seats, self.world.heartbeats, key)
        self.world.worker_ended(hit, code, str(child.program.log))

    def _restart_pause_s(self, child: Child) -> float:
        """Asked again and again while a child waits: what held it back may have been resolved."""
        key = child.program.group
        if child.program.part != "worker" or key is None:
            return restart_pause_s(child.short_runs)
        sessions = [each for each in self._sessions if group_of(each) == key]
        return max(restart_pause_s(child.short_runs), self.world.pause_s(sessions, child.jitter))

    async def _end(self, name: str) -> None:
        child = self.children.pop(name, None)
        if child is not None:
            logger.info("child_idle", extra={"child": name})
            await child.stop(STOP_S[child.program.part])

    async def _stop_children(self) -> None:
        """Gateway first, so that nothing new comes; ledger last, so that all usage reaches it."""
        for part, timeout_s in STOP_S.items():
            ending = [each for each in self.children.values() if each.program.part == part]
            await asyncio.gather(*(child.stop(timeout_s) for child in ending))
        self._show_processes()

    def _show_processes(self) -> None:
        """What runs, for `gristmill status`. On a full volume it stays as it was until the next pass."""
        rows = [_describe(child) for child in self.children.values()]
        text = json.dumps(rows, indent=2).encode()
        if text == self._shown:
            return
        try:
            write_private(self.layout.processes, text)
        except OSError as error:
            logger.warning("processes_not_shown", extra={"error": str(error)})
        else:
            self._shown = text

    # --- what wakes the loop ---------------------------------------------------------------------

    async def _watch_store(self) -> None:
        seen = revision = -1
        while True:
            with contextlib.suppress(UnavailableError):
                revision = self.store.revision()
            if revision != seen:
                seen = revision
                self.wake.set()
            await asyncio.sleep(STORE_POLL_S)

    async def _watch_heartbeats(self) -> None:
        cursor = 0
        while True:
            try:
                page = await self.ledger.heartbeats(cursor)
            except GristmillError:
                await asyncio.sleep(LEDGER_RETRY_S)
                continue
            cursor = page.cursor
            # Told before this instance began: only what has ended is still true.
            fresh = [
                beat
                for beat in page.heartbeats
                if beat.at_us >= self._started_us or beat.view.state == "Closed"
            ]
            self.world.take_heartbeats(fresh)
            self.wake.set()


def _describe(child: Child) -> dict[str, object]:
    program = child.program
    return {
        "name": program.name,
        "part": program.part,
        "pid": child.pid,
        "ready": child.ready,
        "restarts": child.restarts,
        "started_us": child.started_us,
        "port": program.port or None,
        "socket": program.socket or None,
        "tenant": program.group.tenant if program.group else None,
        "model": program.group.model if program.group else None,
        "exit_code": child.exit_code,
        "log": str(program.log),
    }
