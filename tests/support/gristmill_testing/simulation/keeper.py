"""What keeps the parts alive: starts them again, moves a session to its next attempt, gives up a volume."""

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.budgets import TOKENS, PutBudget
from gristmill_contracts.cluster_http import UsageGap
from gristmill_contracts.credentials import EndpointSecretSpec
from gristmill_contracts.http import Assignment, RegisterSession
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_testing.simulation.client import LOST
from gristmill_testing.simulation.disk import Volume
from gristmill_testing.simulation.loop import Process
from gristmill_testing.simulation.network import SimHttp
from gristmill_testing.simulation.pods import Pod

if TYPE_CHECKING:
    from gristmill_testing.simulation.world import World

OUTAGE_S = limits.INBOX_SERVED_S + 1


class Keeper:
    """The operator, or the supervisor of one machine. It is never killed, and sees what happens at once."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.pods: dict[SessionUid, Pod] = {}
        self.attempts: dict[SessionUid, int] = {}
        self.lost: dict[SessionUid, str] = {}
        """Sessions whose volume was destroyed, or whose log may have been."""
        self.stopped: set[SessionUid] = set()
        self.process = Process(world.loop, "operator", "operator")
        self._pods_made = 0

    # --- sessions --------------------------------------------------------------------------------

    def place(self, uids: list[SessionUid]) -> None:
        """Start what serves the sessions: one machine for all, or one pod for each."""
        if self.world.plan.embedded:
            pod = self._make(self._new_volume())
            for uid in uids:
                self._give(pod, uid, 1)
            self._start(pod)
            return
        for uid in uids:
            self._move(uid, self._new_volume())

    def _new_volume(self) -> Volume:
        return Volume(self.world.note, self.world.rng)

    def _make(self, volume: Volume) -> Pod:
        self._pods_made += 1
        pod = Pod(self.world, f"n{self._pods_made}", volume, self.world.settings)
        volume.on_power_loss = lambda: self.power_lost(pod)
        return pod

    def _move(self, uid: SessionUid, volume: Volume) -> None:
        """The next attempt, on this volume."""
        pod = self._make(volume)
        self._give(pod, uid, self.attempts.get(uid, 0) + 1)
        self._start(pod)

    def _give(self, pod: Pod, uid: SessionUid, attempt: int) -> None:
        self.pods[uid], self.attempts[uid] = pod, attempt
        secret = f"secret-{uid}-{attempt}"
        pod.assigned[uid] = Assignment(
            uid=uid,
            tenant=TenantName(self.world.tenant_of[uid]),
            project="",
            name=self.world.names[uid],
            model="fake",
            attempt=attempt,
            secret=secret,
            rank=8,
            alpha=16,
            seed=1,
            checkpoint_group="checkpoints",
            desired="stop" if uid in self.stopped else "serve",
        )
        self.world.note("attempt", uid, attempt, pod.name)
        name, tenant = self.world.names[uid], self.world.tenant_of[uid]
        spec = EndpointSecretSpec(
            session_uid=uid, attempt=attempt, endpoint=f"http://{pod.meter_host}", secret=secret
        )
        self.world.store.put_endpoint(name, tenant, spec)
        for gateway in self.world.gateways:
            gateway.hear(name, tenant, spec)

    def _start(self, pod: Pod) -> None:
        pod.start_worker()
        self.world.later(self._pause_s(0.2), self._start_meter, pod)

    def _pause_s(self, usual_s: float) -> float:
        """Until something is up again. Now and then so long that clients turn to the ledger's inbox."""
        longer_s = OUTAGE_S if self.world.rng.random() < 0.15 else 0.0
        return longer_s + self.world.rng.random() * usual_s

    def _start_meter(self, pod: Pod) -> None:
        if not pod.over and (pod.meter_process is None or pod.meter_process.dead):
            pod.start_meter()

    # --- what happens ----------------------------------------------------------------------------

    def kill_meter(self, pod: Pod) -> None:
        if pod.meter_process is not None and not pod.meter_process.dead:
            pod.meter_process.kill()
            if pod.volume.disk.frozen is None:
                pod.volume.killed()
        self.meter_died(pod)

    def meter_died(self, pod: Pod) -> None:
        self.world.later(0.05 + self._pause_s(2), self._revive_meter, pod)

    def _revive_meter(self, pod: Pod) -> None:
        if pod.over or pod.meter_process is None or not pod.meter_process.dead:
            return
        pod.start_meter()

    def kill_worker(self, pod: Pod) -> None:
        if pod.worker_process is not None:
            pod.worker_process.kill()
        self.world.later(0.05 + self.world.rng.random() * 3, self._revive_worker, pod)

    def _revive_worker(self, pod: Pod) -> None:
        if not pod.over and pod.worker_process is not None and pod.worker_process.dead:
            pod.start_worker()

    def power_lost(self, pod: Pod) -> None:
        """The machine goes off. It comes back, or the session's next attempt runs elsewhere."""
        self.world.note("power_lost", pod.name)
        pod.kill()
        if pod.over:
            return
        pod.volume.power_lost()
        delay_s = 0.5 + self._pause_s(3)
        if self.world.plan.embedded or self.world.rng.random() < 0.4:
            self.world.later(delay_s, self._boot, pod)
        else:
            pod.over = True
            for uid in pod.assigned:
                self.world.later(delay_s, self._move, uid, pod.volume)

    def _boot(self, pod: Pod) -> None:
        if not pod.over:
            self._start(pod)

    def take_over(self, uid: SessionUid) -> None:
        """The next attempt starts while the one before lives on, without its volume, for a while."""
        old = self.pods[uid]
        if old.over:
            return
        old.over = True
        self.world.note("take_over", uid, old.name)
        old.volume.taken_away(hangs=self.world.rng.random() < 0.6)
        self._move(uid, old.volume)
        self.world.later(3 + self.world.rng.random() * 40, old.kill)

    def destroy_volume(self, uid: SessionUid, *, alive: bool) -> None:
        """The volume is taken for lost, on record; `alive`: its meter goes on with it, unheard."""
        old = self.pods[uid]
        if old.over:
            return
        old.over = True
        self.lost[uid] = "volume_lost"
        self.world.note("volume_destroyed", uid, alive)
        attempt = self.attempts[uid]
        if not alive:
            old.kill()
        else:
            self.world.later(10 + self.world.rng.random() * 60, old.kill)
        gap = UsageGap(
            attempt=attempt,
            acked_seq=0,
            head_seq=None,
            reason="volume_lost",
            at_us=int(self.world.loop.now * 1e6),
        )
        self.process.spawn(self._record(uid, gap), "gap")
        self._move(uid, old.volume.successor())

    async def _record(self, uid: SessionUid, gap: UsageGap) -> None:
        await self._tell("POST", f"sessions/{uid}/gaps", gap)

    async def register(self, uid: SessionUid) -> None:
        """A session starts only once the ledger knows it."""
        session = RegisterSession(
            uid=uid,
            tenant=TenantName(self.world.tenant_of[uid]),
            project="",
            name=self.world.names[uid],
            model="fake",
            rank=8,
            created_us=time.time_ns() // 1000,
        )
        await self._tell("POST", "sessions", session)

    async def put_budget(self, tenant: str, limit: int) -> None:
        """The tenant's hard budget in tokens, made or raised."""
        self.world.note("budget", tenant, limit)
        budget = PutBudget(scope_type="tenant", scope=tenant, unit=TOKENS, limit=limit)
        await self._tell("PUT", f"budgets/{tenant}/all", budget)

    async def _tell(self, method: str, path: str, message: object) -> None:
        """The ledger, until it has taken it."""
        http = SimHttp(self.world.net, self.process, timeout_s=5.0)
        while True:
            try:
                async with http.request(
                    method, f"http://ledger/v1/{path}", data=msgspec.msgpack.encode(message)
                ) as answer:
                    content = await answer.read()
                if answer.ok:
                    return
                if answer.status < 500:
                    self.world.audit.fail(f"{method} {path}: {content!r}")
                    return
            except LOST:
                pass
            await asyncio.sleep(0.5)

    def revive_all(self) -> None:
        """The faults are over: everything comes up that is down."""
        for pod in {id(pod): pod for pod in self.pods.values()}.values():
            pod.volume.power_left = None
            pod.volume.disk.fail_fsyncs = 0
            pod.volume.disk.free = 2**40
            if pod.meter_process is not None:
                pod.meter_process.steps_left = None
            self._revive_meter(pod)
            self._revive_worker(pod)

    def stop(self, uid: SessionUid) -> None:
        """The session is to end, whichever attempt serves it."""
        self.stopped.add(uid)
        pod = self.pods[uid]
        pod.assigned[uid] = msgspec.structs.replace(pod.assigned[uid], desired="stop")
        for client in self.world.clients:
            client.stop |= client.uid == uid

    def stop_all(self) -> None:
        for uid in self.pods:
            self.stop(uid)

    def take_away(self) -> None:
        """The sessions have ended: their pods go, and their endpoints with them."""
        for pod in self.pods.values():
            pod.over = True
            pod.kill()
        self.world.store.end_all()
        for gateway in self.world.gateways:
            gateway.store.end_all()
