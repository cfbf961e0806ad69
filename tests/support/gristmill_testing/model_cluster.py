"""A cluster small enough to hold in the hand: it carries out the planner's actions on one session.

API server (names, uids, preconditions, resource versions), nodes and kubelets, the meter with its log, the
ledger, and an operator whose cache may be stale and whose memory may be lost. Time moves only when told to.
What must never happen is asserted where it would happen.
"""

import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gristmill_contracts import conditions, labels, limits
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import PinnedStatus, TrainingSession, TrainingSessionStatus
from gristmill_sessions import observed as planned
from gristmill_sessions.attempts import pod_name, ranks
from gristmill_sessions.cluster import (
    ApiFailure,
    Cluster,
    DrainJob,
    ModelView,
    Pod,
    PodReason,
    TenantView,
    Volume,
)
from gristmill_sessions.events import SessionEvent, events_of
from gristmill_sessions.observed import Action, Observed, Plan
from gristmill_sessions.planner import make_plan, next_status
from gristmill_testing.worlds import CREATED_US, SECOND_US, beat, session

STEPS_MAX = 60
EXPECTED_S = 30
GRACE_S = 5
READY_AFTER_S = 3
PINS = PinnedStatus(base_model_uid="model-1", image="worker@1", meter_image="meter@1")

Api = Literal["works", "quota", "partial", "refused", "invalid", "away", "answer_lost"]


class RefusedError(Exception):
    """An action that the API server or the ledger did not take."""


class OvertakenError(Exception):
    """Somebody else was first."""


@dataclass(slots=True)
class Store:
    """What lies in the API server."""

    session: TrainingSession | None
    pods: dict[str, Pod] = field(default_factory=dict)
    job: DrainJob | None = None
    volume: Volume = field(default_factory=Volume)


@dataclass(slots=True)
class Ledger:
    away: bool = False
    acked: int = 0
    heartbeat: Heartbeat | None = None
    stopped_attempt: int = 0
    registered: bool = False
    gaps: list[planned.RecordGap] = field(default_factory=list)
    attempts: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Operator:
    """What the operator's process remembers; a restart forgets it."""

    registered: bool = False
    error: str = ""
    failure: ApiFailure | None = None
    directive_attempt: int = 0
    gap_attempt: int = 0
    expected: list[tuple[str, str, int]] = field(default_factory=list)
    """(kind, what, until when): what was done and is to be seen in the cache."""


@dataclass(slots=True)
class ModelCluster:
    real: Store
    now_us: int = CREATED_US
    cache: Store | None = None
    """Stale when set: what the operator sees instead of the real store."""
    ledger: Ledger = field(default_factory=Ledger)
    operator: Operator = field(default_factory=Operator)
    api: Api = "works"
    tenant: TenantView = field(default_factory=lambda: TenantView(name="acme"))
    model: ModelView = field(default_factory=ModelView)
    namespace_terminating: bool = False
    node: int = 1
    """Pods are bound to the node of this number; others may be lost."""
    lost_nodes: dict[str, int] = field(default_factory=dict)
    gone_nodes: set[str] = field(default_factory=set)
    held_up: Literal["", "Unschedulable", "ImagePullFailed", "ImageInvalid", "MeterNotReady"] = ""
    job_fails: bool = False
    head: int = 0
    """Records in the log on the volume."""
    worked_us: int = 0
    """When the last operation came in."""
    meter: str = "Serving"
    version: int = 10
    uids: int = 0
    made: set[str] = field(default_factory=set)
    """Names of all pods that there ever were."""
    done: list[Action] = field(default_factory=list)
    events: list[SessionEvent] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    writes: int = 0

    # --- the operator ----------------------------------------------------------------------------

    def observe(self) -> Observed:
        seen = self.real if self.cache is None else self.cache
        assert seen.session is not None
        attempt = seen.session.status.attempt
        return Observed(
            session=seen.session,
            now_us=self.now_us,
            registered=self.operator.registered,
            heartbeat=self.ledger.heartbeat,
            error=self.operator.error,
            cluster=Cluster(
                settled=self._is_settled(seen),
                pods=tuple(self._seen(pod) for pod in seen.pods.values()),
                tenant=self.tenant,
                model=self.model,
                pins=PINS,
                failure=self.operator.failure,
                job=seen.job,
                volume=seen.volume,
                namespace_terminating=self.namespace_terminating,
                gap_recorded=self.operator.gap_attempt == attempt > 0,
                directive_given=self.operator.directive_attempt == attempt > 0,
            ),
        )

    def _seen(self, pod: Pod) -> Pod:
        lost = self.lost_nodes.get(pod.node)
        return replace(pod, node_lost_since_us=lost, node_gone=pod.node in self.gone_nodes)

    def _is_settled(self, seen: Store) -> bool:
        uids = {pod.uid for pod in seen.pods.values()}
        version = 0 if seen.session is None else seen.session.metadata.resource_version
        met = {
            "pod": lambda what: what in seen.pods,
            "gone": lambda what: what not in uids or self._asked_to_go(seen, what),
            "job": lambda what: seen.job is not None and seen.job.name == what,
            "no job": lambda what: seen.job is None or seen.job.uid != what,
            "version": lambda what: version >= int(what),
        }
        self.operator.expected = [
            each
            for each in self.operator.expected
            if self.now_us < each[2] and not met[each[0]](each[1])
        ]
        return not self.operator.expected

    @staticmethod
    def _asked_to_go(seen: Store, uid: str) -> bool:
        return any(pod.uid == uid and pod.deleting for pod in seen.pods.values())

    def _expect(self, kind: str, what: str) -> None:
        self.operator.expected.append((kind, what, self.now_us + EXPECTED_S * SECOND_US))

    def reconcile(self) -> int:
        """Plan and carry out until a plan neither acts nor says anything new. Returns the actions done."""
        before = len(self.done)
        for _ in range(STEPS_MAX):
            if (self.real if self.cache is None else self.cache).session is None:
                return len(self.done) - before
            world = self.observe()
            plan = make_plan(world)
            if not self._pass(world, plan):
                return len(self.done) - before
        raise AssertionError(f"not settled after {STEPS_MAX} plans: {self.done[-12:]}")

    def _pass(self, world: Observed, plan: Plan) -> bool:
        """One plan. False = nothing more to do now."""
        try:
            for action in plan.actions:
                self.do(world, action)
                self.done.append(action)
        except OvertakenError:
            return False
        except RefusedError as problem:
            self.operator.error = str(problem)
            again = self.observe()
            self._write(again, make_plan(again), carried_out=False)
            return False
        if plan.actions:
            self.operator.error = ""
        if self.real.session is None:
            return False
        wrote = False if plan.more else self._write(world, plan, carried_out=True)
        return bool(plan.actions) or wrote

    def _write(self, world: Observed, plan: Plan, *, carried_out: bool) -> bool:
        """The status, if it is new; by the version that was seen."""
        if self.real.session is None:
            return False
        status = next_status(world, plan)
        check_status(world, status)
        told = plan if carried_out else replace(plan, actions=())
        self.events += events_of(world.session.status, status, told, world)
        if status == world.session.status or self.api == "away":
            return False
        if self.real.session.metadata.resource_version != world.session.metadata.resource_version:
            if carried_out and plan.actions and self.cache is None:
                # Our own patch of the metadata moved it: what was planned still holds.
                return self._store_status(status)
            return False
        return self._store_status(status)

    def _store_status(self, status: TrainingSessionStatus) -> bool:
        assert self.real.session is not None
        if not self.states or self.states[-1] != status.state:
            self.states.append(status.state)
        self.writes += 1
        self._change(status=status)
        self._expect("version", str(self.version))
        return True

    def _change(self, **fields: Any) -> None:
        assert self.real.session is not None
        self.version += 1
        meta = fields.pop("metadata", self.real.session.metadata)
        meta = meta.model_copy(update={"resource_version": self.version})
        self.real.session = self.real.session.model_copy(update={**fields, "metadata": meta})

    # --- actions ---------------------------------------------------------------------------------

    def do(self, world: Observed, action: Action) -> None:
        if self.api == "away" and not isinstance(
            action, planned.Register | planned.Drain | planned.RecordGap
        ):
            raise RefusedError("503 from the API server")
        if (
            self.real.session is None
            or self.real.session.metadata.uid != world.session.metadata.uid
        ):
            raise OvertakenError
        _DO[type(action)](self, world, action)

    def _register(self, _world: Observed, _action: planned.Register) -> None:
        self._need_ledger()
        self.ledger.registered = self.operator.registered = True

    def _drain(self, world: Observed, _action: planned.Drain) -> None:
        self._need_ledger()
        self.ledger.stopped_attempt = world.attempt
        self.operator.directive_attempt = world.attempt

    def _record_gap(self, _world: Observed, action: planned.RecordGap) -> None:
        if action.reason == planned.VOLUME_LOST and self.real.volume.found:
            assert self.cache is not None, "would say of a volume that is there that it is lost"
            raise OvertakenError
        self._need_ledger()
        self.ledger.gaps.append(action)
        self.operator.gap_attempt = action.attempt

    def _keep_volume(self, _world: Observed, action: planned.KeepVolume) -> None:
        self.real.volume = replace(self.real.volume, owned=False, unflushed=action.unflushed)

    def _remove_volume(self, _world: Observed, _action: planned.RemoveVolume) -> None:
        assert not self.real.volume.unflushed, "removed a volume with usage nobody has"
        self.real.volume = Volume()

    def _need_ledger(self) -> None:
        if self.ledger.away:
            raise RefusedError("the ledger does not answer")

    def _adopt(self, _world: Observed, _action: planned.Adopt) -> None:
        assert self.real.session is not None
        meta = self.real.session.metadata
        self._change(
            metadata=meta.model_copy(
                update={
                    "finalizers": sorted({*meta.finalizers, labels.METERING_FLUSH}),
                    "annotations": {labels.SESSION_ID: meta.uid, **meta.annotations},
                    "labels": {**meta.labels, labels.TENANT: self.tenant.name},
                }
            )
        )
        self._expect("version", str(self.version))

    def _place(self, world: Observed, action: planned.Place) -> None:
        attempt, beside = action.attempt, action.beside
        fresh = self.real.session
        assert fresh is not None
        if fresh.status.attempt != attempt or fresh.metadata.deletion_time_us is not None:
            raise OvertakenError
        others = [
            pod for pod in self.real.pods.values()
            if pod.owner_uid == fresh.metadata.uid and pod.attempt != attempt and pod.uid not in beside
        ]  # fmt: skip
        if others:
            assert self.cache is not None, "would start an attempt beside an older one, and sees it"
            raise OvertakenError
        assert self.ledger.registered, "placed before the ledger knew it"
        assert labels.METERING_FLUSH in fresh.metadata.finalizers, "placed without a finalizer"
        assert fresh.status.pinned is not None, "placed before it was pinned"
        if self.api in REFUSALS and self.api != "partial":
            self.operator.failure = ApiFailure(reason=REFUSALS[self.api], message="the API says no")
            raise RefusedError("the API says no")
        self._make_volume(world)
        count = ranks(world)
        for rank in range(count):
            if self.api == "partial" and rank == count - 1:
                self.operator.failure = ApiFailure(reason="QuotaExceeded", message="exceeded quota")
                raise RefusedError("exceeded quota")
            self._make_pod(attempt, rank, pod_name(world, attempt, rank))
        if self.api == "answer_lost":
            raise RefusedError("no answer")
        self.operator.failure = None

    def _make_volume(self, world: Observed) -> None:
        """A session that served never gets an empty one: its log would be gone, and nobody had been told."""
        served = conditions.is_true(world.conditions, conditions.STARTED)
        if served and not self.real.volume.found:
            assert self.cache is not None, "would make a volume anew, and sees that the log is gone"
            raise OvertakenError
        self.real.volume = replace(self.real.volume, found=True, owned=True)

    def _make_pod(self, attempt: int, rank: int, name: str) -> None:
        assert self.real.session is not None
        owner = self.real.session.metadata.uid
        # Also of one that is there already: a stale cache would have it made again and again.
        self._expect("pod", name)
        known = self.real.pods.get(name)
        if known is not None:
            if known.owner_uid != owner:
                self.operator.failure = ApiFailure(reason="NameTaken", message=f"pod {name}")
                raise RefusedError(f"pod {name} is not ours")
            return
        for pod in self.real.pods.values():
            same = pod.owner_uid == owner and pod.rank == rank
            assert not (same and self.lives(pod)), f"two pods of rank {rank}: {pod.name} and {name}"
        running = [
            pod for pod in self.real.pods.values()
            if pod.owner_uid == owner and pod.attempt == attempt and pod.phase != "Pending"
        ]  # fmt: skip
        assert name not in self.made or not running, f"{name} would join ranks that run already"
        self.made.add(name)
        self.uids += 1
        self.real.pods[name] = Pod(
            name=name,
            uid=f"pod-{self.uids}",
            owner_uid=owner,
            attempt=attempt,
            rank=rank,
            created_us=self.now_us,
            meter_started=rank > 0,
            restart=self.real.session.metadata.annotations.get(labels.RESTART, ""),
        )

    def lives(self, pod: Pod) -> bool:
        """Something of it may run, as far as anybody can know."""
        lost_us = self.lost_nodes.get(pod.node)
        lost = lost_us is not None and self.now_us >= lost_us + limits.NODE_LOST_S * SECOND_US
        return not pod.ended and not lost and pod.node not in self.gone_nodes

    def _delete_pods(self, _world: Observed, action: planned.DeletePods) -> None:
        assert self.real.session is not None
        for ref in action.pods:
            # Also of one that was gone already: a stale cache would have it deleted again and again.
            self._expect("gone", ref.uid)
            pod = self.real.pods.get(ref.name)
            if pod is None or pod.uid != ref.uid:
                continue
            assert pod.owner_uid == self.real.session.metadata.uid, f"deleted {pod.name} of others"
            if action.force:
                assert pod.node in self.gone_nodes, "forced a pod whose node may still run it"
                del self.real.pods[ref.name]
            elif not pod.deleting:
                self.real.pods[ref.name] = replace(pod, deleting_since_us=self.now_us)

    def _remove_job(self, _world: Observed, action: planned.RemoveDrainJob) -> None:
        self._expect("no job", action.uid)
        if self.real.job is not None and self.real.job.uid == action.uid:
            self.real.job = None

    def _start_job(self, _world: Observed, action: planned.StartDrainJob) -> None:
        if self.namespace_terminating:
            raise RefusedError("403: the namespace is being terminated")
        name = f"run-1-drain-a{action.attempt}"
        self._expect("job", name)
        if self.real.job is not None and self.real.job.name == name:
            return
        own = [pod for pod in self.real.pods.values() if pod.attempt is not None]
        assert not any(self.lives(pod) for pod in own), "two writers on the volume"
        self.uids += 1
        self.real.job = DrainJob(name=name, uid=f"job-{self.uids}", attempt=action.attempt)

    def _release(self, _world: Observed, _action: planned.Release) -> None:
        assert self.real.session is not None
        meta = self.real.session.metadata
        safe = self.ledger.acked == self.head or bool(self.ledger.gaps)
        assert safe, "let go of a session whose usage is neither posted nor recorded as missing"
        assert meta.deletion_time_us is not None
        self.real.session = None
        for name, pod in list(self.real.pods.items()):
            if pod.owner_uid == meta.uid:
                del self.real.pods[name]

    def _delete_session(self, _world: Observed, _action: planned.DeleteSession) -> None:
        self.delete()

    def delete(self) -> None:
        assert self.real.session is not None
        meta: Metadata = self.real.session.metadata
        if meta.deletion_time_us is None:
            self._change(metadata=meta.model_copy(update={"deletion_time_us": self.now_us}))
            if not meta.finalizers:
                self.real.session = None

    # --- time ------------------------------------------------------------------------------------

    def advance(self, seconds: int) -> None:
        """Kubelets, meter and Job do what they do in this time."""
        self.now_us += seconds * SECOND_US
        for name, pod in list(self.real.pods.items()):
            moved = self._kubelet(pod)
            if moved is None:
                del self.real.pods[name]
            else:
                self.real.pods[name] = moved
        self._meter()
        self._job()

    def _kubelet(self, pod: Pod) -> Pod | None:
        if pod.node in self.gone_nodes or pod.node in self.lost_nodes:
            return replace(pod, ready=False)
        if pod.deleting_since_us is not None:
            # A meter that is killed leaves its log to others: the worst case.
            over = pod.node == "" or self.now_us >= pod.deleting_since_us + GRACE_S * SECOND_US
            return None if over else pod
        if pod.ended or pod.ready or self.now_us < pod.created_us + READY_AFTER_S * SECOND_US:
            return pod
        waits: PodReason = ""
        if self.held_up in ("Unschedulable", "ImagePullFailed", "ImageInvalid"):
            waits = self.held_up
        elif pod.rank == 0 and not pod.node and not self.real.volume.found:
            waits = "VolumePending"
        if waits:
            return replace(pod, reason=waits, message="as the API says")
        pod = replace(
            pod, node=pod.node or f"node-{self.node}", phase="Running", ip="10.0.0.1", reason=""
        )
        if self.held_up == "MeterNotReady" and pod.rank == 0:
            since_us = pod.meter_since_us or self.now_us
            return replace(
                pod, reason="MeterNotReady", meter_since_us=since_us, meter_started=False
            )
        return replace(pod, ready=True, meter_started=True, meter_since_us=self.now_us)

    def running_meter(self) -> Pod | None:
        """Rank 0 of the newest attempt, if its meter runs and is fenced by nobody."""
        found = [
            pod for pod in self.real.pods.values()
            if pod.rank == 0 and pod.meter_started and pod.phase == "Running" and self.lives(pod)
            and pod.node not in self.lost_nodes
        ]  # fmt: skip
        return max(found, key=lambda pod: pod.attempt or 0, default=None)

    def _meter(self) -> None:
        pod = self.running_meter()
        if pod is None or self.ledger.away:
            return
        attempt = pod.attempt or 0
        state = self.meter
        if self.ledger.stopped_attempt == attempt:
            state, self.ledger.acked = "Closed", self.head
        self._beat(state, attempt)

    def _beat(self, state: str, attempt: int) -> None:
        known = self.ledger.heartbeat
        if known is not None and known.view.attempt > attempt:
            return
        made = beat(
            state, attempt=attempt, acked=self.ledger.acked, head=self.head,
            last_received_number=self.head, last_activity_us=self.worked_us,
            missing_number=self.head + 1 if state == "Blocked" else None,
        )  # fmt: skip
        made.at_us = self.now_us
        self.ledger.heartbeat = made

    def _job(self) -> None:
        job = self.real.job
        if job is None or job.state != "Running" or self.ledger.away:
            return
        if self.job_fails:
            self.real.job = replace(job, state="Failed", finished_us=self.now_us, message="no")
            return
        self.ledger.acked = self.head
        self._beat("Closed", job.attempt)
        self.real.job = replace(job, state="Succeeded", finished_us=self.now_us)

    # --- a stale cache ---------------------------------------------------------------------------

    def freeze(self) -> None:
        self.cache = self.cache or copy.deepcopy(self.real)

    def thaw(self) -> None:
        self.cache = None


_DO: dict[type[Action], Any] = {
    planned.Register: ModelCluster._register,
    planned.Adopt: ModelCluster._adopt,
    planned.Place: ModelCluster._place,
    planned.DeletePods: ModelCluster._delete_pods,
    planned.Drain: ModelCluster._drain,
    planned.StartDrainJob: ModelCluster._start_job,
    planned.RemoveDrainJob: ModelCluster._remove_job,
    planned.RecordGap: ModelCluster._record_gap,
    planned.KeepVolume: ModelCluster._keep_volume,
    planned.RemoveVolume: ModelCluster._remove_volume,
    planned.Release: ModelCluster._release,
    planned.DeleteSession: ModelCluster._delete_session,
}

REFUSALS: dict[Api, Any] = {
    "quota": "QuotaExceeded",
    "partial": "QuotaExceeded",
    "refused": "Refused",
    "invalid": "Invalid",
}


def check_status(world: Observed, status: TrainingSessionStatus) -> None:
    """What holds of every status that is ever written."""
    started = conditions.is_true(status.conditions, conditions.STARTED)
    if status.state == "Blocked":
        assert started, "Blocked before the first Running"
    if conditions.is_true(status.conditions, conditions.BLOCKED):
        assert started, "Blocked=True before the first Running"
    was = world.session.status
    if was.state in ("Failed", "Expired", "Stopped"):
        assert status.state in (was.state, "Deleting", "DeletionFailed"), "came back from its end"
    assert status.attempt >= was.attempt
    failure = status.last_failure
    if status.attempt > was.attempt > 0 and failure is not None and failure != was.last_failure:
        counted = failure.reason in ("WorkerFailed", "OutOfMemory", "MeteringUnavailable")
        assert status.restarts == was.restarts + counted, "a failure was not counted once"
    assert len(status.conditions) <= 16
    for each in status.conditions:
        assert each.message, f"{each.type} {each.reason} says nothing"
        assert each.observed_generation > 0 or each.status == "Unknown"
    ready = status.workers.created == status.workers.desired == status.workers.ready
    assert not status.endpoint or (ready and status.workers.desired > 0), (
        "an endpoint that does not serve"
    )


def cluster(**spec: Any) -> ModelCluster:
    """A session that was just created, in a cluster where all is well."""
    return ModelCluster(real=Store(session=session(adopted=False, **spec)))
