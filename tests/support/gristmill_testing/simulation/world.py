"""One world for one seed: clients, gateways, meters with their workers and volumes, and a ledger."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from gristmill_contracts import labels, limits
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import BaseModelRef, TrainingSession, TrainingSessionSpec
from gristmill_contracts.usage import Counts
from gristmill_meter.settings import MeterSettings
from gristmill_testing.fake_worker import Weights
from gristmill_testing.simulation.audit import Audit
from gristmill_testing.simulation.books import Books
from gristmill_testing.simulation.client import Client
from gristmill_testing.simulation.doors import Gateway, SimStore
from gristmill_testing.simulation.keeper import Keeper
from gristmill_testing.simulation.loop import NOBODY, SimLoop, StuckError
from gristmill_testing.simulation.nemesis import Nemesis
from gristmill_testing.simulation.network import SimNetwork
from gristmill_testing.simulation.pods import SimFolder
from gristmill_testing.simulation.traps import Traps

EVENTS_KEPT = 400
RAISED = 10**9
QUIET_S_MAX = 300.0
"""How long everything may take to come to rest once the faults are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What kind of world a seed is."""

    embedded: bool
    sessions: int
    steps: int
    chaos_s: float
    disk_s: float
    result_wait_s: float
    budget: int | None
    """Tokens that each tenant may spend before it is raised."""
    lease_s: float
    """How long a lease of a budget may be spent without a word from the ledger."""
    claim_timeout_s: float

    @property
    def registers_first(self) -> bool:
        return not self.embedded


def make_plan(rng: random.Random) -> Plan:
    return Plan(
        embedded=rng.random() < 0.25,
        sessions=rng.choice([1, 1, 2]),
        steps=rng.randint(6, 14),
        chaos_s=rng.uniform(15, 60),
        disk_s=rng.choice([0.004, 0.004, 0.05, 0.4]),
        result_wait_s=rng.choice([0.15, 10.0, 10.0]),
        budget=rng.choice([None, rng.randint(20, 150), rng.randint(20, 900)]),
        lease_s=rng.choice([limits.BUDGET_LEASE_S, 8.0]),
        claim_timeout_s=rng.choice([60.0, 60.0, 60.0, 5.0]),
    )


class Trace:
    """A digest of everything that happened, and the last of it in words."""

    def __init__(self, *, keep: int = EVENTS_KEPT) -> None:
        self.last: deque[str] = deque(maxlen=keep)
        self._digest = blake2b(digest_size=16)
        self.now: Callable[[], float] = lambda: 0.0

    def note(self, *what: object) -> None:
        line = f"{self.now():10.4f} " + " ".join(map(str, what))
        self._digest.update(line.encode())
        self.last.append(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class World:
    """`run` it once."""

    def __init__(self, seed: int, loop: SimLoop, trace: Trace) -> None:
        self.seed = seed
        self.loop = loop
        self.rng = loop.rng
        self.note = trace.note
        self.plan = make_plan(self.rng)
        loop.disk_s = self.plan.disk_s
        self.net = SimNetwork(loop)
        self.store = SimStore()
        self.books = Books(loop, self.net)
        self.audit = Audit(self)
        self.books.on_unfenced = self.audit.unfenced
        self.books.on_commit = self.audit.committed
        self.books.on_batch = self.audit.posted
        self.traps = Traps()
        self.books.on_moment = self.traps.spring
        self.saved: dict[str, Weights] = {}
        """Checkpoints: they lie in the artifact store."""
        self.runs: Counter[str] = Counter()
        self.settings = METER_SETTINGS.model_copy(
            update={"claim_timeout_s": self.plan.claim_timeout_s}
        )
        self.tenant_of: dict[SessionUid, str] = {}
        self.names: dict[SessionUid, str] = {}
        self.keeper = Keeper(self)
        self.gateways = [Gateway(self, f"gateway-{at}") for at in range(2)]
        self.clients: list[Client] = []
        self.fetchable: dict[SessionUid, set[int]] = {}
        self.cut_short: set[SessionUid] = set()
        """Sessions that are stopped while their clients work."""
        self._boots = 0
        self._views: dict[SessionUid, Counts] = {}
        self._streams: dict[SessionUid, set[int]] = {}

    def later(self, delay_s: float, work: Callable[..., object], *args: object) -> None:
        """Done by nobody who can be killed."""
        self.loop.call_later(delay_s, work, *args, context=NOBODY)

    def next_boot(self) -> int:
        self._boots += 1
        return self._boots

    def work_s(self) -> float:
        return self.rng.random() * (1.5 if self.rng.random() < 0.05 else 0.1)

    # --- the run ---------------------------------------------------------------------------------

    async def run(self) -> None:
        SimFolder.assigned.clear()
        self.note("plan", self.plan)
        self._make_sessions()
        self.books.start()
        for gateway in self.gateways:
            gateway.start()
        for uid in self.names:
            await self.keeper.process.spawn(self.keeper.register(uid), "register")
        await self._set_budgets(self.plan.budget)
        self.keeper.place(list(self.names))
        work = [c.process.spawn(c.run(self.plan.steps), "client") for c in self.clients]
        nemesis = Nemesis(self)
        await nemesis.rage()
        self.note("calm")
        nemesis.calm()
        await self._set_budgets(None if self.plan.budget is None else RAISED)
        await self._finish(work, "the clients")
        await self._fetch_again()
        nemesis.strike_late()
        self._look_at_logs()
        self.keeper.stop_all()
        await self.until(self._shipped, "everything shipped and closed")
        self._look_at_logs()
        await self.until(self.audit.nothing_is_held, "no token held of a budget")
        self.keeper.take_away()
        await self._fetch_again()
        self.audit.judge()

    async def _set_budgets(self, limit: int | None) -> None:
        if limit is not None:
            for tenant in sorted(set(self.tenant_of.values())):
                await self.keeper.process.spawn(self.keeper.put_budget(tenant, limit), "budget")

    def _make_sessions(self) -> None:
        for at in range(self.plan.sessions):
            uid = SessionUid(f"{at + 1}1111111-2222-4333-8444-555555555555")
            name = self.names[uid] = f"run-{at}"
            self.tenant_of[uid] = "acme" if at == 0 or self.rng.random() < 0.6 else "other"
            meta = Metadata(
                name=name,
                namespace=self.tenant_of[uid],
                annotations={labels.SESSION_ID: uid},
                uid=uid,
            )
            spec = TrainingSessionSpec(base_model_ref=BaseModelRef(name="fake"))
            session = TrainingSession(metadata=meta, spec=spec)
            session.status.state = "Running"
            self.store.sessions[name] = session
            self.clients.append(Client(self, at, uid, name))

    async def _finish(self, work: list["asyncio.Task[Any]"], who: str) -> None:
        for client in self.clients:
            if client.uid in self.keeper.lost:
                client.stop = True
        done, left = await asyncio.wait(work, timeout=QUIET_S_MAX)
        for task in done:
            task.result()
        if left and not self.audit.violations:
            self.audit.fail(f"{who} did not come to an end: {self.state()}")

    async def until(self, seen: Callable[[], bool], what: str) -> None:
        deadline = self.loop.now + QUIET_S_MAX
        while not seen():
            if self.loop.now > deadline:
                self.audit.fail(f"never happened: {what}: {self.state()}")
                return
            await asyncio.sleep(0.5)

    async def _fetch_again(self) -> None:
        """Point 3: what is billed stays fetchable. And what was abandoned is unharmed."""
        work = []
        for client in self.clients:
            if client.uid in self.keeper.lost or client.uid in self.cut_short:
                continue
            client.stop = False
            held = [op for op in client.operations if op.view is not None and op.operation_id]
            for op in held:
                if op.view is not None and op.view.state == "Completed":
                    work.append(client.process.spawn(client.fetch_again(op), "again"))
        if work:
            await self._finish(work, "fetching again")

    # --- looking ---------------------------------------------------------------------------------

    def sessions(self) -> dict[SessionUid, Any]:
        """The meter's sessions, of those whose log is not lost."""
        found = {}
        for uid, pod in self.keeper.pods.items():
            if uid in self.keeper.lost or pod.meter is None or uid not in pod.meter.drivers:
                continue
            found[uid] = pod.meter.drivers[uid].session
        return found

    def _shipped(self) -> bool:
        sessions = self.sessions()
        wanted = set(self.names) - set(self.keeper.lost)
        return set(sessions) == wanted and all(session.shipped for session in sessions.values())

    def _look_at_logs(self) -> None:
        for uid, session in self.sessions().items():
            self._views[uid] = session.state.counts
            records = session.state.records
            self._streams[uid] = {n for (s, n), r in records.items() if s == "log" and r.streaming}
            self.fetchable[uid] = {
                n
                for (s, n), r in records.items()
                if s == "log" and r.claim == "claimed" and r.result
            }

    def last_view(self, uid: SessionUid) -> Counts | None:
        return self._views.get(uid)

    def streams_of(self, uid: SessionUid) -> set[int]:
        return self._streams.get(uid, set())

    def state(self) -> str:
        """A line for each session, for whoever reads a failure."""
        lines = []
        for uid, session in self.sessions().items():
            state = session.state
            lines.append(
                f"{uid[:4]} {session.service} broken={session.broken} failure={state.failure} "
                f"acked={session.acked_seq}/{state.head_seq} open={list(state.open_keys)} "
                f"next={state.next_number} shipped={session.shipped} admitted={session.admitted}"
            )
        for client in self.clients:
            open_ops = [
                (op.stream, op.number, bool(op.operation_id))
                for op in client.operations
                if op.view is None
                and not op.streamed
                and not op.abandoned
                and not op.refused_number
            ]
            lines.append(f"{client.name} waits for {open_ops[:8]}")
        return "; ".join(lines)


METER_SETTINGS = MeterSettings(
    heartbeat_s=2.0,
    scan_s=1.0,
    retry_first_s=0.05,
    retry_last_s=1.0,
    gap_timeout_s=400.0,
    log_free_bytes_min=0,
    snapshot_replay_s=0.004,
    stop_wait_s=20.0,
)

__all__ = ["METER_SETTINGS", "Plan", "StuckError", "Trace", "World", "make_plan"]
