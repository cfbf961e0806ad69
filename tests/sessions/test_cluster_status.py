"""What the status of a session in a cluster holds beside its conditions, and when it is written."""

from dataclasses import replace

import pytest

from gristmill_contracts import conditions as known
from gristmill_contracts import limits
from gristmill_contracts.session import SessionLimits, TrainingSession, TrainingSessionStatus
from gristmill_sessions.attempts import pod_name
from gristmill_sessions.cluster import Pod, TenantView
from gristmill_sessions.observed import Observed, Plan
from gristmill_sessions.planner import make_plan, next_status, write_is_due
from gristmill_testing.cluster_worlds import (
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
CLOSED = serving(state="Closed", acked=7)
NO_TENANT = TenantView(name="", found=False)
STOP = {"desired_state": "Stopped"}


def after(seen: Observed) -> TrainingSessionStatus:
    return next_status(seen, make_plan(seen))


def deleting(each: Pod) -> Pod:
    return replace(each, deleting_since_us=NOW_US)


def lost(each: Pod, seconds: int) -> Pod:
    return replace(each, ready=False, node_lost_since_us=NOW_US - seconds * SECOND_US)


def removed() -> TrainingSession:
    return running(deleted_us=NOW_US - SECOND_US)


# --- endpoint and workers ------------------------------------------------------------------------


def test_an_endpoint_is_published_only_when_all_ranks_are_ready() -> None:
    assert after(world(running(workers=2), pod(0), pending(1))).endpoint == ""
    ready = after(world(running(workers=2), pod(0), pod(1)))
    assert ready.endpoint == "http://10.0.1.0:8470"
    assert ready.workers.model_dump() == {"desired": 2, "created": 2, "ready": 2}


def test_an_endpoint_stays_while_the_meter_of_an_ending_session_answers() -> None:
    at = {"endpoint": "http://10.0.1.0:8470"}
    assert after(world(running(**STOP, status=at), pod())).endpoint == at["endpoint"]
    assert after(world(running(STOPPING, status=at), deleting(pod()))).endpoint == ""


def test_an_endpoint_of_an_ipv6_pod_has_brackets() -> None:
    assert after(world(running(), pod(ip="fd00::1"))).endpoint == "http://[fd00::1]:8470"


def test_the_first_start_is_kept() -> None:
    assert after(world(resource(), pod())).start_time_us == NOW_US
    assert after(world(running(status={"start_time_us": 7}), pod())).start_time_us == 7


# --- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "at_us"),
    [
        (
            world(resource(limits=SessionLimits(pending_seconds=90)), pending()),
            CREATED_US + 90 * SECOND_US,
        ),
        (
            world(
                running(
                    limits=SessionLimits(lifetime_seconds=90), status={"start_time_us": NOW_US}
                ),
                pod(),
            ),
            NOW_US + 90 * SECOND_US,
        ),
        (world(running(), lost(pod(), 20)), NOW_US + 40 * SECOND_US),
        (
            world(resource(), pending(phase="Running", meter_since_us=NOW_US)),
            NOW_US + 60 * SECOND_US,
        ),
        (world(new(deleted_us=NOW_US), pending()), NOW_US + 300 * SECOND_US),
        (world(removed(), job=job()), NOW_US + 299 * SECOND_US),
        (
            world(
                running(
                    condition("Failed"),
                    status={"end_time_us": NOW_US},
                    ttl_seconds_after_finished=9,
                ),
                heartbeat=CLOSED,
            ),
            NOW_US + 9 * SECOND_US,
        ),
        (world(running(), pod()), None),
    ],
)
def test_it_is_looked_at_again_when_time_alone_has_changed_something(
    seen: Observed, at_us: int | None
) -> None:
    assert make_plan(seen).again_at_us == at_us


def test_a_tenant_that_does_not_come_back_takes_its_sessions_with_it() -> None:
    def blocked_for(seconds: float) -> Observed:
        since_us = NOW_US - int(seconds * SECOND_US)
        said = condition("Blocked", "True", "TenantDeleted", last_transition_time_us=since_us)
        return world(running(said), pod(), tenant=NO_TENANT)

    assert after(blocked_for(limits.FLUSH_ABANDON_S - 1)).state == "Blocked"
    assert after(blocked_for(limits.FLUSH_ABANDON_S)).state == "Failed"


# --- writes --------------------------------------------------------------------------------------


def test_what_only_informs_is_written_once_a_minute_in_a_cluster() -> None:
    before = after(world(running(), pod()))
    informed = before.model_copy(update={"last_received_sequence": 9, "cost": "1 USD"})
    every_s = limits.STATUS_USAGE_EVERY_S
    assert not write_is_due(before, informed, 59, every_s)
    assert write_is_due(before, informed, 60, every_s)
    assert write_is_due(before, before.model_copy(update={"endpoint": "x"}), 0, every_s)
    assert not write_is_due(before, before, 1e9, every_s)


def test_a_stale_look_changes_nothing() -> None:
    stale = world(running(), ended(), settled=False)
    assert after(stale) == stale.session.status


def test_usage_and_cost_are_shown() -> None:
    status = after(
        world(running(), pod(), heartbeat=serving(last_received_number=5), cost="0.5 USD")
    )
    assert (status.last_received_sequence, status.cost) == (5, "0.5 USD")


def test_pods_are_named_after_session_attempt_and_rank() -> None:
    assert pod_name(world(running(), pod()), 3, 1) == "run-1-a3-1"


def test_a_plan_that_another_follows_says_so() -> None:
    plan: Plan = make_plan(world(new(adopted=False)))
    assert plan.more
    assert known.find(plan.conditions, known.ACCEPTED) is None
