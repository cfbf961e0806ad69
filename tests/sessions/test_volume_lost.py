"""A session's volume is deleted under it: made again where there is no log yet, a recorded loss where there was."""

from dataclasses import replace

import pytest

from gristmill_contracts import conditions as known
from gristmill_contracts.session import LastFailure
from gristmill_sessions.cluster import Volume
from gristmill_sessions.events import events_of
from gristmill_sessions.observed import Observed, Place, RecordGap
from gristmill_sessions.planner import make_plan, next_status
from gristmill_testing.cluster_worlds import pending, pod, resource, running, serving, world
from gristmill_testing.model_cluster import ModelCluster, cluster
from gristmill_testing.worlds import NOW_US, SECOND_US

GONE = Volume()
SILENT = serving(acked=3, head=7)
SILENT.at_us = NOW_US - 10 * SECOND_US
GAP = RecordGap(attempt=1, acked_seq=3, head_seq=7, reason="VolumeLost")
GAP_BETWEEN = replace(GAP, attempt=2, head_seq=None)
LOST = replace(pod(), ready=False, node_lost_since_us=NOW_US, node_gone=True)
BETWEEN = running(
    attempt=2,
    created=0,
    status={"last_failure": LastFailure(reason="WorkerFailed", time_us=NOW_US - SECOND_US)},
)

CASES: list[tuple[str, Observed, str, tuple[object, ...]]] = [
    ("one that never served gets it anew", world(resource(), pending(), volume=GONE), "placement", (Place(1),)),
    ("not while its pod has a node, which protects the claim",
     world(resource(), pending(node="node-1"), volume=GONE), "running", ()),
    ("of several ranks the first alone has it",
     world(resource(workers=2), pending(), pending(1, node="node-1"), volume=GONE), "placement", (Place(1),)),
    ("a log that is gone under a pod that waits is a recorded gap",
     world(running(), pending(), heartbeat=SILENT, volume=GONE), "log_lost", (GAP,)),
    ("and between two attempts", world(BETWEEN, heartbeat=SILENT, volume=GONE), "log_lost", (GAP_BETWEEN,)),
    ("not before the ledger was read",
     world(running(), pending(), heartbeat=SILENT, volume=GONE, ledger_read=False), "log_lost", ()),
    ("not before the meter fell silent", world(running(), pending(), heartbeat=serving(), volume=GONE), "log_lost", ()),
    ("once recorded it is the end",
     world(running(), pending(), heartbeat=SILENT, volume=GONE, gap_recorded=True), "log_lost", ()),
    ("a pod that runs still has it", world(running(), pod(), volume=GONE), "running", ()),
    ("one on a node that is gone has nothing", world(running(), LOST, heartbeat=SILENT, volume=GONE), "log_lost",
     (GAP,)),
    ("a namespace that goes takes all along",
     world(running(), pending(), heartbeat=SILENT, volume=GONE, namespace_terminating=True), "running", ()),
    ("a claim that is going is waited for",
     world(running(), pending(), volume=Volume(found=True, deleting=True)), "running", ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "policy", "actions"),
    [pytest.param(*case[1:], id=case[0]) for case in CASES],
)
def test_what_follows_where_the_claim_is_gone(
    seen: Observed, policy: str, actions: tuple[object, ...]
) -> None:
    plan = make_plan(seen)
    assert (plan.policy, plan.actions) == (policy, actions)


def test_a_session_whose_log_is_gone_says_so_and_what_can_be_done() -> None:
    seen = world(running(), pending(), heartbeat=SILENT, volume=GONE, gap_recorded=True)
    plan = make_plan(seen)
    status = next_status(seen, plan)
    failed = known.find(status.conditions, known.FAILED)
    assert failed is not None
    assert (failed.status, failed.reason, status.state) == ("True", "LogLost", "Failed")
    assert "run-1-state" in failed.message
    assert "Start a new session" in failed.message
    assert status.last_failure is not None
    assert status.last_failure.reason == "LogLost"
    told = events_of(seen.session.status, status, plan, seen)
    assert ("Warning", "LogLost") in {(each.type, each.reason) for each in told}


def test_a_ledger_that_takes_no_record_is_named_and_nothing_is_claimed() -> None:
    seen = world(running(), pending(), heartbeat=SILENT, volume=GONE, error="the ledger is away")
    status = next_status(seen, make_plan(seen))
    assert status.state != "Failed"
    ready = known.find(status.conditions, known.READY)
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", "VolumeLost")
    assert "the ledger is away" in ready.message


def run_on(model: ModelCluster, seconds: int) -> None:
    for _ in range(seconds // 5):
        model.reconcile()
        model.advance(5)
    model.reconcile()


@pytest.mark.parametrize("served", [False, True])
def test_a_claim_taken_from_a_waiting_session_ends_in_a_run_or_in_a_record(served: bool) -> None:
    """In the model of a whole cluster, with pods that start on no node without their volume."""
    model = cluster()
    if served:
        run_on(model, 30)
        model.head = 5
        model.lost_nodes["node-1"] = model.now_us
        model.gone_nodes.add("node-1")
        model.node = 2
    model.held_up = "Unschedulable"
    run_on(model, 100)
    assert [bool(each.node) for each in model.real.pods.values()] == [False]
    model.real.volume = Volume()
    model.held_up = ""
    run_on(model, 60)
    assert model.real.session is not None
    status = model.real.session.status
    if served:
        assert (status.state, [gap.reason for gap in model.ledger.gaps]) == (
            "Failed",
            ["VolumeLost"],
        )
        assert not model.real.pods
        assert not model.real.volume.found
    else:
        assert (status.state, model.ledger.gaps) == ("Running", [])
        assert model.real.volume.found
