"""A session under random events: it settles, settling twice changes nothing, and money is never lost."""

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_contracts import labels
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.session import SessionLimits, TrainingSession
from gristmill_sessions.observed import (
    Action,
    Adopt,
    DeleteSession,
    Drain,
    Observed,
    Place,
    Register,
    Release,
    RemoveFiles,
    Seat,
    Withdraw,
    WorkerFailures,
)
from gristmill_sessions.planner import make_plan, next_status
from gristmill_testing.worlds import CREATED_US, SECOND_US, UID, beat, session

STEPS_MAX = 20


@dataclass(slots=True)
class FakeMachine:
    """Carries out actions as a machine does, with a meter that obeys and a ledger that may be away."""

    resource: TrainingSession | None
    now_us: int = CREATED_US
    registered: bool = False
    seat: Seat | None = None
    meter: str = ""
    head: int = 0
    acked: int = 0
    model_found: bool = True
    suspended: bool = False
    ledger_away: bool = False
    worker_ready: bool = False
    failures: WorkerFailures = field(default_factory=WorkerFailures)
    done: list[Action] = field(default_factory=list)
    lost_usage: int = 0

    def heartbeat(self) -> Heartbeat | None:
        if self.seat is None or not self.meter:
            return None
        return beat(
            self.meter,
            attempt=self.seat.attempt,
            acked=self.acked,
            head=self.head,
            worker_ready=self.worker_ready,
        )

    def observe(self) -> Observed:
        assert self.resource is not None
        return Observed(
            session=self.resource,
            now_us=self.now_us,
            model_found=self.model_found,
            tenant_suspended=self.suspended,
            registered=self.registered,
            seat=self.seat,
            heartbeat=self.heartbeat(),
            failures=self.failures,
        )

    def do(self, action: Action) -> bool:
        """False: it could not be done now."""
        assert self.resource is not None
        self.done.append(action)
        meta = self.resource.metadata
        match action:
            case Register():
                self.registered = not self.ledger_away
                return self.registered
            case Adopt():
                self._meta(finalizers=[labels.METERING_FLUSH], annotations={labels.SESSION_ID: UID})
            case Place(attempt=attempt):
                assert self.registered, "placed before the ledger knew it"
                assert labels.METERING_FLUSH in meta.finalizers, "placed without a finalizer"
                self.seat = Seat(attempt=attempt, endpoint="http://meter", stopping=False)
                self.meter = "Serving"
            case Drain():
                assert self.seat is not None
                self.seat = replace(self.seat, stopping=True)
                self.meter = "Closed"
            case Withdraw():
                self.lost_usage += self.head - self.acked
                self.seat, self.meter = None, ""
            case RemoveFiles(flushed=flushed):
                assert self.seat is None, "files removed under a meter"
                assert not flushed or self.lost_usage == 0, "removed a log that was not posted"
            case Release():
                self._meta(finalizers=[])
                if meta.deletion_time_us is not None:
                    self.resource = None
            case DeleteSession():
                self._meta(deletion_time_us=self.now_us)
        return True

    def _meta(self, **changes: Any) -> None:
        assert self.resource is not None
        metadata = self.resource.metadata.model_copy(update=changes)
        self.resource = self.resource.model_copy(update={"metadata": metadata})

    def settle(self) -> int:
        """Plan and carry out until a plan has no actions. Returns how many plans had some."""
        for step in range(STEPS_MAX):
            if self.resource is None:
                return step
            world = self.observe()
            plan = make_plan(world)
            succeeded = all([self.do(action) for action in plan.actions])
            if self.resource is not None:
                status = next_status(world, plan)
                self.resource = self.resource.model_copy(update={"status": status})
            if (not plan.actions or not succeeded) and status_is_stable(self):
                return step
        raise AssertionError(f"not settled after {STEPS_MAX} plans: {self.done}")

    # --- events ----------------------------------------------------------------------------------

    def happen(self, event: str) -> None:
        if self.resource is None:
            return
        if event in FACTS:
            name, value = FACTS[event]
            setattr(self, name, value)
        elif (event, self.meter) in AT_THE_METER:
            self.meter = AT_THE_METER[event, self.meter]
        elif event in ("stop", "delete"):
            self._wish(event)
        elif event in ("work", "post", "worker_ends"):
            self._run(event)
        elif event == "hour":
            self.now_us += 3600 * SECOND_US

    def _wish(self, event: str) -> None:
        assert self.resource is not None
        if event == "stop":
            spec = self.resource.spec.model_copy(update={"desired_state": "Stopped"})
            self.resource = self.resource.model_copy(update={"spec": spec})
        elif self.resource.metadata.deletion_time_us is None:
            self._meta(deletion_time_us=self.now_us)

    def _run(self, event: str) -> None:
        if event == "work" and self.meter == "Serving" and self.worker_ready:
            self.head += 1
            self.failures = WorkerFailures()
        elif event == "post" and not self.ledger_away:
            self.acked = self.head
        elif event == "worker_ends" and self.seat is not None:
            self.worker_ready = False
            self.failures = WorkerFailures(count=self.failures.count + 1, exit_code=1)


FACTS = {
    "worker_ready": ("worker_ready", True),
    "ledger_away": ("ledger_away", True),
    "ledger_back": ("ledger_away", False),
    "model_gone": ("model_found", False),
    "model_back": ("model_found", True),
    "suspend": ("suspended", True),
    "lift": ("suspended", False),
    "restart": ("registered", False),
}
AT_THE_METER = {
    ("meter_fails", "Serving"): "Failed",
    ("gap", "Serving"): "Blocked",
    ("gap_filled", "Blocked"): "Serving",
}


def status_is_stable(machine: FakeMachine) -> bool:
    """A plan made again says nothing new."""
    if machine.resource is None:
        return True
    world = machine.observe()
    return next_status(world, make_plan(world)) == machine.resource.status


EVENTS = [
    *FACTS, *(event for event, _ in AT_THE_METER), "stop", "delete", "work", "post", "worker_ends", "hour",
]  # fmt: skip


def machine() -> FakeMachine:
    return FakeMachine(session(adopted=False, limits=SessionLimits(lifetime_seconds=10 * 3600)))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=25))
def test_a_session_always_settles_and_settling_again_does_nothing(events: list[str]) -> None:
    world = machine()
    for event in events:
        world.settle()
        world.happen(event)
    world.settle()
    done, resource = len(world.done), world.resource
    world.settle()
    if not world.ledger_away:
        assert len(world.done) == done
    assert world.resource == resource


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=25))
def test_usage_is_given_up_only_after_the_bounded_wait_of_a_deletion(events: list[str]) -> None:
    world = machine()
    for event in events:
        world.settle()
        world.happen(event)
    world.settle()
    if world.lost_usage:
        assert "hour" in events[events.index("delete") :]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=15))
def test_a_deleted_session_is_gone_once_the_ledger_has_its_usage(events: list[str]) -> None:
    world = machine()
    for event in [*events, "delete", "ledger_back"]:
        world.settle()
        world.happen(event)
    world.settle()
    world.happen("post")
    world.settle()
    assert world.resource is None
    assert world.seat is None
