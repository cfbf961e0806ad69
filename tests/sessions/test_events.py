"""Which Events a step of a session leads to: what changed is told once, with the pod and the remedy."""

from dataclasses import replace

import pytest

from gristmill_contracts.session import TrainingSession, TrainingSessionStatus
from gristmill_sessions.cluster import ApiFailure, TenantView, Volume
from gristmill_sessions.events import SessionEvent, events_of
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
from gristmill_testing.worlds import NOW_US, SECOND_US, condition

STOPPING = condition("Stopped", "False", "Stopping", last_transition_time_us=NOW_US)
WAITED = condition("Serving", "False", "Recovering")
CLOSED = serving(state="Closed", acked=7)
QUOTA = ApiFailure(reason="QuotaExceeded", message="exceeded quota: gristmill")
SUSPENDED = TenantView(name="acme", suspended=True)


def told(seen: Observed) -> tuple[SessionEvent, ...]:
    plan = make_plan(seen)
    return events_of(seen.session.status, next_status(seen, plan), plan, seen)


def fresh() -> TrainingSession:
    return new().model_copy(update={"status": TrainingSessionStatus()})


def removed(seconds: int) -> TrainingSession:
    at_us = NOW_US - seconds * SECOND_US
    noticed = condition("Deleted", "False", "InProgress", last_transition_time_us=at_us)
    return running(noticed, deleted_us=at_us)


def stuck(seconds: int = 180) -> object:
    return replace(pod(), deleting_since_us=NOW_US - seconds * SECOND_US)


Row = tuple[str, Observed, list[tuple[str, str]]]
ROWS: list[Row] = [
    ("accepted, with a place", world(fresh()), [("Normal", "Accepted"), ("Normal", "QuotaReserved")]),
    ("unknown model", world(fresh(), model=model(found=False)), [("Warning", "ModelNotFound")]),
    ("queued", world(fresh(), tenant=TenantView(name="acme", position=1, max_running=1)),
     [("Normal", "Accepted"), ("Normal", "Queued")]),
    ("ledger away", world(fresh(), registered=False, error="503"),
     [("Normal", "Accepted"), ("Warning", "RegistrationFailed")]),
    ("quota", world(resource(condition("Accepted"), created=0), failure=QUOTA), [("Warning", "QuotaExceeded")]),
    ("pods made", world(resource(condition("Accepted"), condition("QuotaReserved"), created=0), pending()),
     [("Normal", "PodsCreated")]),
    ("no room", world(resource(condition("Accepted"), condition("QuotaReserved")), pending(reason="Unschedulable")),
     [("Warning", "Unschedulable")]),
    ("no such image", world(resource(condition("Accepted"), condition("QuotaReserved")),
     pending(reason="ImagePullFailed")), [("Warning", "ImagePullFailed")]),
    ("weights load", world(resource(condition("Accepted"), condition("QuotaReserved")), pending(reason="LoadingWeights")),
     []),
    ("first start", world(resource(condition("Accepted"), condition("QuotaReserved")), pod()), [("Normal", "Started")]),
    ("recovered", world(running(condition("Accepted"), condition("QuotaReserved"), WAITED), pod()),
     [("Normal", "Recovered")]),
    ("worker failed", world(running(), ended()), [("Warning", "WorkerFailed")]),
    ("evicted", world(running(), ended(disrupted=True, reason="Evicted")), [("Warning", "Evicted")]),
    ("restart", world(running(annotations={"gristmill.dev/restart": "x"}), pod()), [("Normal", "RestartRequested")]),
    ("restarts used up", world(running(status={"restarts": 3}), ended()), [("Warning", "MaxRestartsExceeded")]),
    ("blocked", world(running(condition("Accepted"), condition("QuotaReserved"), condition("Serving")), pod(),
     tenant=SUSPENDED), [("Warning", "TenantSuspended")]),
    ("unblocked", world(running(condition("Accepted"), condition("QuotaReserved"), condition("Serving"),
     condition("Blocked")), pod()), [("Normal", "Unblocked")]),
    ("stop asked", world(running(desired_state="Stopped"), pod()), [("Normal", "Stopping")]),
    ("stopped", world(running(STOPPING), heartbeat=CLOSED), [("Normal", "Stopped")]),
    ("Job fails", world(running(STOPPING), job=job("Failed", finished_us=NOW_US)), [("Warning", "FlushFailed")]),
    ("gap", world(running(STOPPING), volume=Volume()), [("Warning", "UsageFlushAbandoned")]),
    ("deleting", world(removed(1), pod()), []),
    ("deletion slow", world(removed(300), job=job()), [("Warning", "FinalizerSlow")]),
    ("deletion fails", world(removed(900), heartbeat=serving(), job=job(), error="503"),
     [("Warning", "FlushFailed"), ("Warning", "UsageFlushAbandoned")]),
    ("stuck pod", world(running(STOPPING), stuck(), heartbeat=CLOSED), [("Warning", "PodStuckTerminating")]),
    ("stuck pod of an earlier attempt", world(running(condition("Accepted"), condition("QuotaReserved"), attempt=2,
     created=0), stuck()), [("Warning", "PodStuckTerminating")]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_a_step_is_told(seen: Observed, expected: list[tuple[str, str]]) -> None:
    found = told(seen)
    assert sorted((each.type, each.reason) for each in found) == sorted(expected)
    assert all(each.message for each in found)


@pytest.mark.parametrize(
    ("seen", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_what_is_known_is_not_told_again(seen: Observed, expected: list[tuple[str, str]]) -> None:
    plan = make_plan(seen)
    status = next_status(seen, plan)
    assert events_of(status, status, replace(plan, actions=()), seen) == ()


def test_an_event_names_the_pod_and_what_follows() -> None:
    (event,) = told(world(running(workers=2), pod(0), ended(1, code=3)))
    assert event.pod == "run-1-a1-1"
    assert "run-1-a1-1 (rank 1 of 2)" in event.message
    assert "Attempt 2 follows, after restart 1 of 3" in event.message
    assert "logs of container `worker`" in event.message


def test_a_pod_that_is_held_up_is_related() -> None:
    seen = world(resource(workers=2), pod(0), pending(1, reason="Unschedulable"))
    assert [each.pod for each in told(seen) if each.reason == "Unschedulable"] == ["run-1-a1-1"]


def test_a_gap_says_how_much_is_missing() -> None:
    silent = serving(acked=3, head=7)
    silent.at_us = 0
    (event,) = [
        each
        for each in told(world(running(STOPPING), heartbeat=silent, volume=Volume()))
        if "Flush" in each.reason
    ]
    assert "3 of 7 records" in event.message
