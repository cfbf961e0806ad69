"""What the planner does in each situation of a session in a cluster, and in which order it asks."""

from dataclasses import replace
from typing import Any

import pytest

from gristmill_contracts import labels, limits
from gristmill_contracts.session import (
    FailurePolicy,
    LastFailure,
    PinnedStatus,
    StorageSpec,
    TrainingSession,
    TrainingSessionStatus,
)
from gristmill_sessions.cluster import ApiFailure, Pod, PodRef, TenantView, Volume
from gristmill_sessions.observed import (
    Adopt,
    DeletePods,
    DeleteSession,
    Drain,
    KeepVolume,
    Observed,
    Place,
    RecordGap,
    Register,
    Release,
    RemoveDrainJob,
    RemoveVolume,
    StartDrainJob,
)
from gristmill_sessions.planner import make_plan, next_status
from gristmill_testing.cluster_worlds import (
    PINS,
    ended,
    job,
    new,
    pending,
    pod,
    resource,
    running,
    serving,
    world,
)
from gristmill_testing.worlds import CREATED_US, NOW_US, SECOND_US, condition

STOPPING = condition("Stopped", "False", "Stopping", last_transition_time_us=NOW_US)
STOPPING_LONG = condition(
    "Stopped", "False", "Stopping", last_transition_time_us=NOW_US - 60 * SECOND_US
)
CLOSED = serving(state="Closed", acked=7)
PARTLY = serving(state="Draining")
SILENT = serving(acked=3, head=7)
SILENT.at_us = NOW_US - 10 * SECOND_US
NO_TENANT = TenantView(name="", found=False)
NO_VOLUME = Volume()
QUOTA = ApiFailure(reason="QuotaExceeded", message="exceeded quota")
OVERDUE_US = NOW_US - int(limits.FLUSH_ABANDON_S) * SECOND_US
GAP = RecordGap(attempt=1, acked_seq=3, head_seq=7, reason="VolumeLost")
FOREIGN = Pod(name="theirs", uid="theirs", owner_uid="another", attempt=0, rank=0, phase="Running")


def refs(*pods: Pod) -> tuple[PodRef, ...]:
    return tuple(each.ref for each in pods)


def deleting(each: Pod, seconds: int = 0) -> Pod:
    return replace(each, deleting_since_us=NOW_US - seconds * SECOND_US)


def lost(each: Pod, seconds: int = 60, *, gone: bool = False) -> Pod:
    since_us = NOW_US - seconds * SECOND_US
    return replace(each, ready=False, node_lost_since_us=since_us, node_gone=gone)


def removed(**fields: Any) -> TrainingSession:
    return running(deleted_us=NOW_US - SECOND_US, **fields)


def overdue(by_us: int = 0) -> TrainingSession:
    """Its deletion was noticed so long ago that nothing is waited for any more."""
    noticed = condition(
        "Deleted", "False", "InProgress", last_transition_time_us=OVERDUE_US - by_us
    )
    return running(noticed, deleted_us=OVERDUE_US - by_us)


def over(kind: str = "Failed", **fields: Any) -> TrainingSession:
    return running(condition(kind), status={"end_time_us": NOW_US}, **fields)


def failed(reason: str, seconds_ago: int, pod_name: str = "run-1-a1-0") -> dict[str, Any]:
    """Status of a session whose last attempt failed."""
    failure = LastFailure(
        reason=reason, pod=pod_name, message="it ended.", time_us=NOW_US - seconds_ago * SECOND_US
    )
    return {"restarts": 1, "last_failure": failure}


Case = tuple[str, Observed, str, tuple[object, ...]]
STARTING: list[Case] = [
    ("nothing is planned on a stale cache", world(new(adopted=False), settled=False), "settling", ()),
    ("a new session is adopted first", world(new(adopted=False)), "adoption", (Adopt(),)),
    ("one whose label says another tenant is adopted again",
     world(new(), tenant=TenantView(name="globex")), "adoption", (Adopt(),)),
    ("one without a tenant waits", world(new(), tenant=NO_TENANT), "acceptance", ()),
    ("the ledger is told before a place is claimed", world(new().model_copy(update={"status":
     TrainingSessionStatus()}), registered=False), "registration", (Register(),)),
    ("a registered one is not told again after a restart", world(new(), registered=False), "claim", ()),
    ("a place is claimed before pods are made", world(new()), "claim", ()),
    ("then they are made", world(resource(created=0)), "placement", (Place(1),)),
    ("also what is missing of them", world(resource(workers=2, created=1), pending(0)), "placement", (Place(1),)),
    ("not while the tenant is suspended", world(resource(created=0), tenant=TenantView(name="acme", suspended=True)),
     "placement", ()),
    ("they start", world(resource(), pending()), "running", ()),
    ("and serve", world(resource(), pod()), "running", ()),
    ("a part that fits into no quota is given back", world(resource(workers=2, created=1), pending(0), failure=QUOTA),
     "attempt_over", ()),
    ("foreign pods are left alone", world(resource(), pod(), FOREIGN), "running", ()),
    ("own pods of no known rank are removed", world(resource(), pod(), pod(7)), "strays",
     (DeletePods(pods=refs(pod(7))),)),
    ("and such with a wrong name", world(resource(), pod(), pod(name="odd", uid="odd")), "strays",
     (DeletePods(pods=(PodRef(name="odd", uid="odd"),)),)),
]  # fmt: skip

FAILING: list[Case] = [
    ("a worker that fails ends the attempt", world(running(), ended()), "attempt_over", ()),
    ("its pods are removed, the survivors with their grace",
     world(running(workers=2, attempt=2, created=0, status=failed("WorkerFailed", 1)), ended(0), pod(1)), "strays",
     (DeletePods(pods=refs(ended(0), pod(1))),)),
    ("the next attempt waits for their end",
     world(running(attempt=2, created=0, status=failed("Evicted", 20)), deleting(pod())), "placement", ()),
    ("and for the pause", world(running(attempt=2, created=0, status=failed("WorkerFailed", 7))), "placement", ()),
    ("and starts", world(running(attempt=2, created=0, status=failed("WorkerFailed", 13))), "placement", (Place(2),)),
    ("a lost node is not waited for",
     world(running(attempt=2, created=0, status=failed("NodeLost", 0)), deleting(lost(pod()))), "placement",
     (Place(2, beside=("uid-1-0",)),)),
    ("a node that is away for a moment is", world(running(), lost(pod(), 59)), "running", ()),
    ("one that is away for long is lost", world(running(), lost(pod(), 60)), "attempt_over", ()),
    ("pods of a node that is gone are forced",
     world(running(attempt=2, created=0, status=failed("NodeLost", 0)), deleting(lost(pod(), gone=True))), "strays",
     (DeletePods(pods=refs(pod()), force=True),)),
    ("a pod that was deleted by hand ends the attempt", world(running(), deleting(pod())), "attempt_over", ()),
    ("one that vanished too", world(running(workers=2), pod(0)), "attempt_over", ()),
    ("a restart that was asked for too", world(running(annotations={labels.RESTART: "x"}), pod()), "attempt_over",
     ()),
    ("and is not done again for pods that carry its value",
     world(running(annotations={labels.RESTART: "x"}), pod(restart="x")), "running", ()),
    ("a meter that dies twice at once ends the attempt",
     world(running(), pending(phase="Running", meter_started=True, meter_deaths=2, meter_last_run_s=5.0)),
     "attempt_over", ()),
    ("one that died once is waited for",
     world(running(), pending(phase="Running", meter_started=True, meter_deaths=1, meter_last_run_s=5.0)), "running",
     ()),
    ("one that ran for long before is not given up",
     world(running(), pending(phase="Running", meter_started=True, meter_deaths=2, meter_last_run_s=60.0)), "running",
     ()),
    ("an attempt is given up once only", world(running(attempt=1), ended(), ended(attempt=2)), "strays",
     (DeletePods(pods=refs(ended())),)),
]  # fmt: skip

STOP = {"desired_state": "Stopped"}
ENDING: list[Case] = [
    ("a stop is handed to the meter", world(running(**STOP), pod()), "halt", (Drain(),)),
    ("once", world(running(STOPPING), pod(), directive_given=True), "halt", ()),
    ("again after the operator's restart", world(running(STOPPING), pod()), "halt", (Drain(),)),
    ("a meter that drains may take its time", world(running(STOPPING_LONG), pod(), directive_given=True,
     heartbeat=PARTLY), "halt", ()),
    ("one that does not answer loses its pods", world(running(STOPPING_LONG), pod(), directive_given=True,
     heartbeat=SILENT), "halt", (DeletePods(pods=refs(pod())),)),
    ("one that has closed loses them at once", world(running(STOPPING), pod(), heartbeat=CLOSED), "halt",
     (DeletePods(pods=refs(pod())),)),
    ("pods that never ran are just deleted", world(resource(**STOP), pending()), "halt",
     (DeletePods(pods=refs(pending())),)),
    ("a log without a meter is shipped by a Job", world(running(STOPPING), heartbeat=SILENT), "halt",
     (StartDrainJob(attempt=1),)),
    ("not while the old pod ends", world(running(STOPPING), deleting(pod()), heartbeat=SILENT), "halt", ()),
    ("the Job runs", world(running(STOPPING), job=job()), "halt", ()),
    ("a Job of an earlier attempt is removed", world(running(STOPPING, attempt=2), job=job(attempt=1)), "halt",
     (RemoveDrainJob(name="run-1-drain-a1", uid="job"),)),
    ("a failed Job rests for a while", world(running(STOPPING), job=job("Failed", finished_us=NOW_US)), "halt", ()),
    ("and is made again", world(running(STOPPING), job=job("Failed", finished_us=NOW_US - 60 * SECOND_US)), "halt",
     (RemoveDrainJob(name="run-1-drain-a1", uid="job"),)),
    ("a Job that did its work is removed", world(running(STOPPING), job=job("Succeeded"), heartbeat=CLOSED), "halt",
     (RemoveDrainJob(name="run-1-drain-a1", uid="job"),)),
    ("then it is stopped", world(running(STOPPING), heartbeat=CLOSED), "halt", ()),
    ("a log that is gone is a recorded gap", world(running(STOPPING), heartbeat=SILENT, volume=NO_VOLUME), "halt",
     (GAP,)),
    ("not before the meter fell silent", world(running(STOPPING), heartbeat=serving(), volume=NO_VOLUME), "halt", ()),
    ("not before the ledger was read", world(running(STOPPING), heartbeat=SILENT, volume=NO_VOLUME,
     ledger_read=False), "halt", ()),
    ("once recorded it is stopped", world(running(STOPPING), heartbeat=SILENT, volume=NO_VOLUME, gap_recorded=True),
     "halt", ()),
    ("a failed session is drained", world(over(), pod()), "over", (Drain(),)),
    ("a finished one has no pods", world(over(), pod(), heartbeat=CLOSED), "over", (DeletePods(pods=refs(pod())),)),
    ("and deletes itself when asked to", world(over(ttl_seconds_after_finished=0), heartbeat=CLOSED), "over",
     (DeleteSession(),)),
    ("not a moment early", world(over(ttl_seconds_after_finished=1), heartbeat=CLOSED), "over", ()),
    ("not before its usage is in", world(over(ttl_seconds_after_finished=0), heartbeat=SILENT), "over",
     (StartDrainJob(attempt=1),)),
    ("a stop wins over a failure", world(running(STOPPING, status={"restarts": 9}), ended()), "halt",
     (DeletePods(pods=refs(ended())),)),
    ("what is over stays over", world(over(**STOP), heartbeat=CLOSED), "over", ()),
]  # fmt: skip

UNSEEN = running(deleted_us=NOW_US - 3600 * SECOND_US)
DELETED: list[Case] = [
    ("a deleted session is drained first", world(removed(), pod()), "removal", (Drain(),)),
    ("also where nobody saw for long that it was", world(UNSEEN, pod()), "removal", (Drain(),)),
    ("then its pods go", world(removed(), pod(), heartbeat=CLOSED), "removal", (DeletePods(pods=refs(pod())),)),
    ("then it, and its volume stays", world(removed(), heartbeat=CLOSED), "removal",
     (KeepVolume(unflushed=False), Release())),
    ("or goes as the spec says", world(removed(storage=StorageSpec(retain="Delete")), heartbeat=CLOSED), "removal",
     (RemoveVolume(), Release())),
    ("unless it holds usage", world(removed(storage=StorageSpec(retain="Delete")), heartbeat=CLOSED,
     volume=Volume(found=True, unflushed=True)), "removal", (Release(),)),
    ("one that never ran goes at once", world(new(deleted_us=NOW_US), volume=NO_VOLUME), "removal", (Release(),)),
    ("finalizers of others are left alone", world(new(adopted=False, deleted_us=NOW_US)), "removal", ()),
    ("a namespace that ends takes the log with it", world(removed(), heartbeat=SILENT, namespace_terminating=True),
     "removal", (replace(GAP, reason="NamespaceTerminating"),)),
    ("that is recorded, and it goes", world(removed(), heartbeat=SILENT, namespace_terminating=True,
     gap_recorded=True), "removal", (Release(),)),
    ("the wait is bounded", world(overdue(), heartbeat=SILENT, job=job()), "removal",
     (replace(GAP, reason="FlushAbandoned"), KeepVolume(unflushed=True), Release())),
    ("whatever is left", world(overdue(), pod(), heartbeat=PARTLY), "removal",
     (DeletePods(pods=refs(pod())), replace(GAP, reason="FlushAbandoned"), KeepVolume(unflushed=True), Release())),
    ("but not a moment early", world(overdue(by_us=-1), heartbeat=SILENT, job=job()), "removal", ()),
    ("usage that nobody knows of is recorded as such", world(overdue()), "removal",
     (RecordGap(attempt=1, acked_seq=0, head_seq=None, reason="FlushAbandoned"), KeepVolume(unflushed=True),
      Release())),
    ("a pod on a lost node holds nothing up", world(removed(), deleting(lost(pod())), heartbeat=CLOSED), "removal",
     (KeepVolume(unflushed=False), Release())),
    ("foreign pods hold nothing up", world(removed(), FOREIGN, heartbeat=CLOSED), "removal",
     (KeepVolume(unflushed=False), Release())),
]  # fmt: skip
CASES = [*STARTING, *FAILING, *ENDING, *DELETED]


@pytest.mark.parametrize(
    ("seen", "policy", "actions"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_planner_answers(seen: Observed, policy: str, actions: tuple[object, ...]) -> None:
    plan = make_plan(seen)
    assert (plan.policy, plan.actions) == (policy, actions)


def after(seen: Observed) -> TrainingSessionStatus:
    return next_status(seen, make_plan(seen))


# --- attempts ------------------------------------------------------------------------------------


def test_a_claim_pins_what_the_session_is_made_of_and_its_number_of_ranks() -> None:
    status = after(world(new(workers=3, status={"pinned": None})))
    assert (status.attempt, status.pinned, status.workers.desired) == (1, PINS, 3)
    assert status.queue is None


def test_a_restored_session_goes_on_above_the_attempts_that_the_ledger_knows() -> None:
    assert after(world(new(), heartbeat=serving(attempt=4))).attempt == 5


def test_a_lost_status_is_rebuilt_from_the_pods() -> None:
    bare = running(attempt=0, workers=2)
    seen = world(bare, pod(0, attempt=3), pod(1, attempt=3))
    status = after(seen)
    assert (status.attempt, status.workers.created, status.state) == (3, 2, "Running")
    assert status.endpoint == "http://10.0.3.0:8470"


def test_the_number_of_ranks_is_that_of_the_first_attempt() -> None:
    """Whatever becomes of the model's profile later."""
    fixed = running(workers=2).model_copy(update={"spec": running(workers=5).spec})
    assert make_plan(world(fixed, pod(0), pod(1))).policy == "running"


@pytest.mark.parametrize(
    ("made", "reason", "counted"),
    [
        (ended(), "WorkerFailed", True),
        (ended(code=137, reason="OutOfMemory"), "OutOfMemory", True),
        (ended(reason="MeterFailed"), "MeteringUnavailable", True),
        (ended(code=0, phase="Succeeded", reason=""), "WorkerFailed", True),
        (ended(code=137, reason="Evicted", disrupted=True), "Evicted", False),
        (ended(code=143, reason="Preempted", disrupted=True), "Preempted", False),
        (ended(code=143, disrupted=True), "Disrupted", False),
        (deleting(pod(disrupted=True, reason="Evicted")), "Evicted", False),
        (deleting(pod()), "PodDeleted", False),
        (lost(pod()), "NodeLost", False),
        (
            pending(phase="Running", meter_since_us=NOW_US - 60 * SECOND_US),
            "MeteringUnavailable",
            True,
        ),
    ],
)
def test_an_end_leads_to_the_next_attempt_and_counts_or_not(
    made: Pod, reason: str, counted: bool
) -> None:
    status = after(world(running(status={"restarts": 1}), made))
    assert (status.attempt, status.restarts, status.workers.created) == (2, 2 if counted else 1, 0)
    failure = status.last_failure
    assert failure is not None
    assert (failure.reason, failure.pod, failure.rank, failure.time_us) == (
        reason,
        "run-1-a1-0",
        0,
        NOW_US,
    )
    assert failure.exit_code == made.exit_code
    assert status.endpoint == ""


def test_what_came_from_outside_explains_the_ends_of_the_other_ranks() -> None:
    """A collective fails on all ranks when one is evicted: that is no failure of the session."""
    status = after(world(running(workers=2), ended(0), ended(1, disrupted=True, reason="Evicted")))
    assert status.restarts == 0
    assert status.last_failure is not None
    assert (status.last_failure.reason, status.last_failure.rank) == ("Evicted", 1)


def test_a_failure_is_counted_once_however_often_it_is_looked_at() -> None:
    seen = world(running(), ended())
    counted = seen.session.model_copy(update={"status": after(seen)})
    for restarted in (False, True):
        following = replace(seen, session=counted, registered=not restarted)
        assert after(following).restarts == 1
        assert make_plan(following).policy == "strays"


def test_a_fatal_exit_on_any_rank_is_found() -> None:
    policy = FailurePolicy(fatal_exit_codes=[42])
    status = after(
        world(running(workers=2, failure_policy=policy), ended(0, code=1), ended(1, code=42))
    )
    assert (status.state, status.attempt) == ("Failed", 1)
    assert status.last_failure is not None
    assert status.last_failure.exit_code == 42


@pytest.mark.parametrize(("restarts", "seconds"), [(1, 10), (2, 20), (3, 40), (9, 300)])
def test_pauses_double_up_to_their_maximum(restarts: int, seconds: int) -> None:
    """Give or take a fifth, the same each time that it is asked."""
    status = failed("WorkerFailed", 0) | {"restarts": restarts}
    plan = make_plan(world(running(attempt=2, created=0, status=status)))
    assert plan.again_at_us is not None
    pause_s = (plan.again_at_us - NOW_US) / SECOND_US
    assert 0.8 * seconds <= pause_s <= 1.2 * seconds


def test_a_disruption_of_an_attempt_that_was_ready_is_made_good_at_once() -> None:
    """And not in a loop without a pause, if the attempts never get that far."""
    status = failed("Evicted", 1)
    was_ready = condition(
        "PodsReady", "False", "Evicted", last_transition_time_us=NOW_US - SECOND_US
    )
    never = condition("PodsReady", "False", "Evicted", last_transition_time_us=CREATED_US)
    assert make_plan(world(running(was_ready, attempt=2, created=0, status=status))).actions == (
        Place(2),
    )
    assert make_plan(world(running(never, attempt=2, created=0, status=status))).actions == ()


def test_failures_are_forgiven_after_ten_minutes_of_work() -> None:
    ready = condition("PodsReady", last_transition_time_us=NOW_US - 600 * SECOND_US)
    young = condition("PodsReady", last_transition_time_us=NOW_US - 599 * SECOND_US)
    worked = serving(last_activity_us=NOW_US - SECOND_US)
    idle = serving(last_activity_us=NOW_US - 601 * SECOND_US)
    known_failures = {"restarts": 2}
    assert (
        after(world(running(ready, status=known_failures), pod(), heartbeat=worked)).restarts == 0
    )
    assert after(world(running(ready, status=known_failures), pod(), heartbeat=idle)).restarts == 2
    assert (
        after(world(running(young, status=known_failures), pod(), heartbeat=worked)).restarts == 2
    )


def test_a_restart_moves_to_the_present_images_at_the_old_prices() -> None:
    pinned = PinnedStatus(
        image="worker@1", meter_image="meter@1", rate_card_uid="card", rate_card_hash="h"
    )
    status = after(
        world(running(annotations={labels.RESTART: "x"}, status={"pinned": pinned}), pod())
    )
    assert status.pinned == PINS.model_copy(update={"rate_card_uid": "card", "rate_card_hash": "h"})
    assert (status.attempt, status.restarts, status.last_failure) == (2, 0, None)


def test_another_attempt_keeps_what_was_pinned() -> None:
    pinned = PinnedStatus(image="worker@1")
    assert after(world(running(status={"pinned": pinned}), ended())).pinned == pinned
