"""The table of states and conditions: what users are shown in each situation of a session in a cluster.

One row per state, condition and reason of the specification: the world, the state, and what one condition
then says, with the words that help (the pod, the number, the remedy).
"""

from typing import Any, get_args

import pytest

from gristmill_contracts import conditions as known
from gristmill_contracts import labels
from gristmill_contracts.http import Problem
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import FailurePolicy, SessionLimits, State, TrainingSession
from gristmill_sessions.cluster import ApiFailure, TenantView, Volume
from gristmill_sessions.observed import Observed
from gristmill_sessions.planner import make_plan, next_status
from gristmill_testing.cluster_worlds import (
    ended,
    job,
    model,
    new,
    pending,
    pod,
    resource,
    running,
    serving,
    world,
)
from gristmill_testing.worlds import CREATED_US, NOW_US, SECOND_US, condition

LONG_AGO_US = NOW_US - 1000 * SECOND_US
SUSPENDED = TenantView(name="acme", suspended=True)
NO_TENANT = TenantView(name="", found=False)
NO_VOLUME = Volume()
QUOTA = ApiFailure(reason="QuotaExceeded", message="exceeded quota: gristmill, requested: pods=1")
REFUSED = ApiFailure(reason="Refused", message='admission webhook "p" denied the request')
TAKEN = ApiFailure(reason="NameTaken", message="pod acme/run-1-a1-0 belongs to nobody")
INVALID = ApiFailure(reason="Invalid", message="spec.containers[0].resources: Invalid value")
AWAY = ApiFailure(reason="Unavailable", message="etcdserver: request timed out")
STOPPING = condition("Stopped", "False", "Stopping")
LATE = SessionLimits(pending_seconds=30)

Row = tuple[str, Observed, State, str, str, str, tuple[str, ...]]
"""What it is about, world, state, condition, its status and reason, words in its message."""

CREATED: list[Row] = [
    ("no tenant", world(new(), tenant=NO_TENANT), "Created", "Accepted", "False", "TenantNotFound",
     ("'acme'", "spec.namespace")),
    ("suspended before start", world(new(), tenant=SUSPENDED), "Created", "Accepted", "False", "TenantSuspended",
     ("'acme'", "spec.suspended is false")),
    ("tenant being deleted", world(new(), tenant=TenantView(name="acme", terminating=True)), "Created", "Accepted",
     "False", "TenantTerminating", ("being deleted",)),
    ("tenant not ready", world(new(), tenant=TenantView(name="acme", ready=False, message="no quota yet")), "Created",
     "Accepted", "False", "TenantNotReady", ("no quota yet",)),
    ("unknown model", world(new(), model=model(found=False)), "Created", "Accepted", "False", "ModelNotFound",
     ("'tiny'", "kubectl get basemodels")),
    ("model of others", world(new(), model=model(allowed=False)), "Created", "Accepted", "False", "ModelNotAllowed",
     ("'tiny'", "'acme'", "allowedTenants")),
    ("model deprecated", world(new(), model=model(deprecated=True)), "Created", "Accepted", "False",
     "ModelDeprecated", ("successor",)),
    ("unknown profile", world(new(), model=model(profile_found=False, profiles=("big", "default"))), "Created",
     "Accepted", "False", "ProfileNotFound", ("'default'", "big, default")),
    ("no prices", world(new(), tenant=TenantView(name="acme", rate_card_missing="standrad")), "Created", "Accepted",
     "False", "RateCardNotFound", ("'standrad'", "kubectl get ratecards")),
    ("priority of others", world(new(priority_class_name="urgent"), tenant=TenantView(name="acme",
     priority_classes=("batch", "normal"))), "Created", "Accepted", "False", "PriorityNotAllowed",
     ("'urgent'", "'acme'", "batch, normal", "spec.priorityClasses")),
    ("no priority at all", world(new(priority_class_name="urgent")), "Created", "Accepted", "False",
     "PriorityNotAllowed", ("it has: none",)),
    ("its own priority", world(new(priority_class_name="batch"), tenant=TenantView(name="acme",
     priority_classes=("batch",))), "Created", "PodsReady", "False", "Creating", ()),
    ("name taken", world(new(), name_holder="older"), "Created", "Accepted", "False", "NameTaken",
     ("'older'", "displayName")),
    ("full training", world(new(full={})), "Created", "Accepted", "False", "FullTrainingNotServed", ("spec.lora",)),
    ("some layers alone", world(new(lora={"targets": ["v_proj", "q_proj"]})), "Created", "Accepted", "False",
     "FieldNotServed", ("spec.lora.targets is [q_proj, v_proj]", "leave it out")),
    ("all layers by name", world(new(lora={"targets": ["all-linear"]})), "Created", "PodsReady", "False", "Creating", ()),
    ("durable at the ledger", world(new(storage={"durability": "Ledger"})), "Created", "Accepted", "False",
     "FieldNotServed", ("spec.storage.durability", "leave it out")),
    ("encrypted", world(new(encryption={"keyRef": "k"})), "Created", "Accepted", "False", "FieldNotServed",
     ("spec.encryption.keyRef is 'k'", "leave it out")),
    ("parked from the start", world(new(desired_state="Parked")), "Created", "Accepted", "False", "ParkingNotServed",
     ("not served yet", "Running")),
    ("and says so by itself", world(new(desired_state="Parked")), "Created", "Parked", "False", "ParkingNotServed",
     ("not served yet",)),
    ("ledger refuses", world(resource(attempt=0).model_copy(update={"status": new().status.model_copy(
        update={"conditions": []})}), registered=False, error="503 from the ledger"), "Created", "LedgerRegistered",
     "False", "RegistrationFailed", ("503 from the ledger", "tried again")),
    ("ledger not read", world(new(), ledger_read=False), "Created", "QuotaReserved", "False", "LedgerUnreachable",
     ("ledger",)),
    ("model not ready", world(new(), model=model(ready=False, message="fetching weights")), "Created",
     "QuotaReserved", "False", "WaitingForModel", ("'tiny'", "fetching weights")),
    ("budget used up", world(new(), tenant=TenantView(name="acme", budget_exhausted=True, budget_message="10 of 10")),
     "Created", "QuotaReserved", "False", "BudgetExhausted", ("10 of 10", "raised")),
    ("queued", world(new(), tenant=TenantView(name="acme", position=3, max_running=2)), "Created", "QuotaReserved",
     "False", "Queued", ("position 3", "quota.maxRunning of 2")),
    ("given an attempt", world(new()), "Created", "PodsReady", "False", "Creating", ("attempt 1",)),
    ("quota exceeded", world(resource(created=0), failure=QUOTA), "Created", "QuotaReserved", "False",
     "QuotaExceeded", ("exceeded quota: gristmill", "tried again", "Tenant's quota")),
    ("refused by admission", world(resource(created=0), failure=REFUSED), "Created", "PodsReady", "False",
     "CreationRefused", ('admission webhook "p"', "tried again")),
    ("name taken", world(resource(created=0), failure=TAKEN), "Created", "PodsReady", "False", "NameTaken",
     ("run-1-a1-0", "left alone")),
    ("no answer", world(resource(created=0), failure=AWAY), "Created", "PodsReady", "False", "ApiUnavailable",
     ("etcdserver", "tried again")),
]  # fmt: skip


def held(reason: str, **fields: object) -> Observed:
    return world(resource(), pending(reason=reason, message="0/3 nodes are available", **fields))


SCHEDULED: list[Row] = [
    (reason, held(reason), "Scheduled", "PodsReady", "False", reason,
     ("run-1-a1-0", "0/3 nodes are available", words, "The session fails at 1970-01-02T00:16:40Z"))
    for reason, words in [
        ("Unschedulable", "when a node has room"),
        ("ResourceNotOffered", "another profile"),
        ("ClaimPending", "ResourceClaim"),
        ("VolumePending", "storageClassName"),
        ("PullingImage", "pulls an image"),
        ("ImagePullFailed", "image exists"),
        ("StartFailed", "kubectl describe pod"),
        ("LoadingWeights", "weights"),
    ]
]  # fmt: skip
SCHEDULED += [
    ("starting", world(resource(), pending()), "Scheduled", "PodsReady", "False", "Starting", ("run-1-a1-0",)),
    ("meter", world(resource(), pending(phase="Running", meter_since_us=NOW_US, reason="MeterNotReady")), "Scheduled",
     "PodsReady", "False", "MeterNotReady", ("It has until 1970-01-01T00:18:40Z",)),
    ("worst of two", world(resource(workers=2), pod(0), pending(1, reason="Unschedulable")), "Scheduled",
     "PodsReady", "False", "Unschedulable", ("run-1-a1-1 (rank 1 of 2)",)),
    ("not ready yet", world(resource(), pending()), "Scheduled", "Ready", "False", "NotStarted", ("other conditions",)),
    ("quota is its own", world(resource(), pending()), "Scheduled", "QuotaReserved", "True", "Reserved", ()),
    ("a failed start", world(resource(created=1), ended()), "Created", "PodsReady", "False", "WorkerFailed",
     ("run-1-a1-0", "Attempt 2 follows, after restart 1 of 3", "logs of container `worker`")),
]  # fmt: skip

RUNNING: list[Row] = [
    ("the first time", world(resource(), pod()), "Running", "Started", "True", "Started", ()),
    ("ready", world(running(), pod()), "Running", "Ready", "True", "TakesOperations", ()),
    ("serving", world(running(), pod(), heartbeat=serving()), "Running", "Serving", "True", "Serving", ()),
    ("replaying", world(running(), pod(), heartbeat=serving(state="Recovering")), "Running", "Serving", "False",
     "Recovering", ("from the log",)),
    ("pods of the next attempt", world(running(attempt=2, status={"restarts": 1}), pending(attempt=2)), "Running",
     "Serving", "False", "Recovering", ("attempt 2, restart 1 of 3",)),
    ("on its way back", world(running(attempt=2), pending(attempt=2)), "Running", "Ready", "True", "Recovering", ()),
    ("no room to recover", world(running(), pending(reason="Unschedulable")), "Running", "Serving", "False",
     "NoCapacity", ("fits on no node",)),
    ("then not ready", world(running(), pending(reason="Unschedulable")), "Running", "Ready", "False", "NoCapacity",
     ()),
    ("no quota to recover", world(running(created=0), failure=QUOTA), "Running", "Serving", "False", "NoCapacity",
     ("exceeded quota",)),
    ("a rank of two fails", world(running(workers=2), pod(0), ended(1)), "Running", "Serving", "False", "Recovering",
     ("run-1-a1-1 (rank 1 of 2)", "Attempt 2")),
    ("old pods end", world(running(attempt=2, created=0), pod(0, deleting_since_us=NOW_US)), "Running", "PodsReady",
     "False", "PodsTerminating", ("run-1-a1-0", "Attempt 2 starts then")),
    ("old pods do not end", world(running(attempt=2, created=0), pod(0, deleting_since_us=LONG_AGO_US)), "Running",
     "PodsReady", "False", "PodStuckTerminating", ("run-1-a1-0", "kubelet of node node-1", "by force")),
    ("node not ready", world(running(), pending(node="node-1", node_lost_since_us=NOW_US)), "Running", "PodsReady",
     "False", "NodeNotReady", ("node-1", "not back by 1970-01-01T00:18:40Z")),
    ("suspended while away", world(running(attempt=2, created=0), tenant=SUSPENDED), "Blocked", "PodsReady", "False",
     "TenantSuspended", ("no pods are made",)),
    ("parking is asked for", world(running(desired_state="Parked"), pod()), "Running", "Parked", "False",
     "ParkingNotServed", ("not served yet",)),
    ("and not any more", world(running(condition("Parked", "False", "ParkingNotServed")), pod()), "Running", "Parked",
     "False", "NotAsked", ()),
]  # fmt: skip

GAP = serving(state="Blocked", missing_number=4, last_received_number=9)
UNAFFORDABLE = serving(
    state="Blocked", error=Problem(code="budget_exhausted", message="budget acme/tenant has 0 left")
)
BLOCKED: list[Row] = [
    ("gap", world(running(), pod(), heartbeat=GAP), "Blocked", "Blocked", "True", "SequenceGap",
     ("operation 4 is missing", "9 was received")),
    ("budget at the meter", world(running(), pod(), heartbeat=UNAFFORDABLE), "Blocked", "Blocked", "True",
     "BudgetExhausted", ("acme/tenant has 0 left", "go on by themselves")),
    ("budget", world(running(), pod(), tenant=TenantView(name="acme", budget_exhausted=True)), "Blocked", "Blocked",
     "True", "BudgetExhausted", ("raised",)),
    ("suspended", world(running(), pod(), tenant=SUSPENDED), "Blocked", "Blocked", "True", "TenantSuspended",
     ("'acme'",)),
    ("tenant gone", world(running(), pod(), tenant=NO_TENANT), "Blocked", "Blocked", "True", "TenantDeleted",
     ("create it again", "900 s")),
    ("nothing any more", world(running(condition("Blocked")), pod()), "Running", "Blocked", "False", "Unblocked", ()),
]  # fmt: skip

ENDED: list[Row] = [
    ("restarts", world(running(status={"restarts": 3}), ended(code=3)), "Failed", "Failed", "True",
     "MaxRestartsExceeded", ("4 times", "exit code 3", "maxRestarts is 3")),
    ("fatal exit", world(running(failure_policy=FailurePolicy(fatal_exit_codes=[42])), ended(code=42)), "Failed",
     "Failed", "True", "FatalExit", ("42",)),
    ("pending", world(resource(limits=LATE), pending(), now_us=CREATED_US + 30 * SECOND_US), "Failed", "Failed",
     "True", "PendingTimeout", ("limits.pendingSeconds of 30",)),
    ("image invalid", world(resource(), pending(reason="ImageInvalid", message="couldn't parse image")), "Failed",
     "Failed", "True", "ImageInvalid", ("run-1-a1-0", "couldn't parse image", "spec.image of the BaseModel")),
    ("invalid pods", world(resource(created=0), failure=INVALID), "Failed", "Failed", "True", "ConfigRefused",
     ("spec.containers[0].resources", "profile")),
    ("no meter", world(resource(failure_policy=FailurePolicy(max_restarts=0)),
     pending(phase="Running", meter_since_us=NOW_US - 60 * SECOND_US)), "Failed", "Failed", "True",
     "MeteringUnavailable", ("run-1-a1-0", "container `meter`")),
    ("tenant deleted", world(running(), pod(), tenant=TenantView(name="acme", terminating=True)), "Failed", "Failed",
     "True", "TenantDeleted", ("'acme'",)),
    ("by the meter", world(running(), pod(), heartbeat=serving(state="Failed", error=Problem(code="log_lost",
     message="the log is gone"))), "Failed", "Failed", "True", "LogLost", ("the log is gone",)),
    ("expired", world(running(limits=SessionLimits(lifetime_seconds=60), status={"start_time_us": CREATED_US}),
     pod()), "Expired", "Expired", "True", "LifetimeReached", ("lifetimeSeconds of 60",)),
    ("stopping", world(running(desired_state="Stopped"), pod()), "Stopping", "Stopped", "False", "Stopping",
     ("run-1-a1-0", "told to end", "by 1970-01-01T00:18:40Z")),
    ("stop asked by annotation", world(running(annotations={labels.STOP_REQUESTED: "now"}), pod()), "Stopping",
     "Stopped", "False", "Stopping", ()),
    ("a stop is not taken back", world(running(STOPPING), pod()), "Stopping", "Ready", "False", "Stopping", ()),
    ("log shipped by a Job", world(running(STOPPING), job=job()), "Stopping", "UsageFlushed", "False", "Draining",
     ("run-1-drain-a1",)),
    ("Job fails", world(running(STOPPING), job=job("Failed", finished_us=NOW_US, message="no route")), "Stopping",
     "UsageFlushed", "False", "FlushFailed", ("no route", "kubectl logs job/run-1-drain-a1")),
    ("stopped", world(running(STOPPING), heartbeat=serving(state="Closed", acked=7)), "Stopped", "Stopped", "True",
     "Stopped", ()),
    ("stopped without usage", world(new(desired_state="Stopped")), "Stopped", "Stopped", "True", "Stopped", ()),
    ("its place is free", world(running(STOPPING), heartbeat=serving(state="Closed", acked=7)), "Stopped",
     "QuotaReserved", "False", "Released", ()),
]  # fmt: skip


def gone(*conditions: Condition, seconds: int = 1, **fields: Any) -> TrainingSession:
    at_us = NOW_US - seconds * SECOND_US
    noticed = condition("Deleted", "False", "InProgress", last_transition_time_us=at_us)
    return running(noticed, *conditions, deleted_us=at_us, **fields)


DELETED: list[Row] = [
    ("deleting", world(gone(), pod()), "Deleting", "Deleted", "False", "InProgress", ("told to end",)),
    ("of a failed one", world(gone(condition("Failed")), pod()), "Deleting", "Ready", "False", "Deleting", ()),
    ("slow", world(gone(seconds=300), job=job()), "Deleting", "Deleted", "False", "InProgress",
     ("run-1-drain-a1", "longer than it should")),
    ("no ledger for the gap", world(gone(seconds=900), error="503 from the ledger", job=job()), "DeletionFailed",
     "Deleted", "False", "FlushFailed", ("503 from the ledger", "900 s")),
    ("stuck pod", world(gone(seconds=900), pod(deleting_since_us=NOW_US - 900 * SECOND_US),
     heartbeat=serving(state="Closed", acked=7)), "DeletionFailed", "Deleted", "False", "PodStuckTerminating",
     ("run-1-a1-0", "node-1")),
]  # fmt: skip
ROWS = [*CREATED, *SCHEDULED, *RUNNING, *BLOCKED, *ENDED, *DELETED]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[2]}: {row[0]}" for row in ROWS])
def test_users_are_shown(row: Row) -> None:
    _, seen, state, type_, status, reason, words = row
    after = next_status(seen, make_plan(seen))
    found = known.find(after.conditions, type_)
    assert found is not None, after.conditions
    assert (after.state, found.status, found.reason) == (state, status, reason), found.message
    assert found.message
    for word in words:
        assert word in found.message
    assert found.observed_generation == seen.session.metadata.generation


def test_every_state_has_a_row() -> None:
    assert {row[2] for row in ROWS} == set(get_args(State))


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[2]}: {row[0]}" for row in ROWS])
def test_what_is_said_does_not_change_while_nothing_happens(row: Row) -> None:
    """A message that grew older would be a write every second."""
    seen = row[1]
    plan = make_plan(seen)
    if plan.actions or plan.status.keys() & {"attempt"}:
        return
    after = next_status(seen, plan)
    again = Observed(
        session=seen.session.model_copy(update={"status": after}),
        now_us=seen.now_us + 1,
        registered=seen.registered,
        heartbeat=seen.heartbeat,
        error=seen.error,
        cluster=seen.cluster,
    )
    following = make_plan(again)
    if following.policy == plan.policy:
        assert next_status(again, following) == after


def test_the_main_conditions_are_there_from_the_first_visit_on() -> None:
    seen = world(new(adopted=False), tenant=NO_TENANT)
    seen = world(
        seen.session.model_copy(update={"status": type(seen.session.status)()}), tenant=NO_TENANT
    )
    plan = make_plan(seen)
    found = {each.type: each.status for each in next_status(seen, plan).conditions}
    assert found.keys() >= {
        "Accepted", "LedgerRegistered", "QuotaReserved", "PodsReady", "Started", "Ready", "Serving",
    }  # fmt: skip
    assert set(found.values()) == {"Unknown"}


def test_blocked_is_not_said_before_the_first_start() -> None:
    for seen in (
        world(resource(), pending(), tenant=SUSPENDED),
        world(resource(), pending(), heartbeat=GAP),
        world(resource(), pending(), tenant=NO_TENANT),
    ):
        after = next_status(seen, make_plan(seen))
        assert after.state == "Scheduled"
        assert known.find(after.conditions, known.BLOCKED) is None
