"""What the API says of a pod, in the planner's words: a table of statuses as kubelet and scheduler write them."""

from typing import Any

import pytest

from gristmill_contracts import labels
from gristmill_contracts.resources import format_time
from gristmill_operator.job_view import drain_view
from gristmill_operator.pod_view import Devices, NodeView, node_view, pod_view
from gristmill_sessions.cluster import Pod

T0 = 1_790_000_000_000_000
GPU = Devices(wanted="nvidia.com/gpu", offered=frozenset({"amd.com/gpu"}))


def at(seconds: float) -> str:
    return format_time(T0 + int(seconds * 1e6))


def pod(status: dict[str, Any], *, rank: int = 0, **meta: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"run-a2-{rank}", "namespace": "gm-acme", "uid": "pod-1",
            "creationTimestamp": at(0),
            "labels": {labels.SESSION: "run", labels.ATTEMPT: "2", labels.RANK: str(rank)},
            "ownerReferences": [{"uid": "session-1", "kind": "TrainingSession", "controller": True}],
            **meta,
        },
        "spec": {"nodeName": "n1"},
        "status": status,
    }  # fmt: skip


def view(status: dict[str, Any], devices: Devices | None = None, **meta: Any) -> Pod:
    return pod_view(pod(status, **meta), NodeView(), devices or Devices())


def container(name: str, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "state": state, **more}


RUNNING = {"running": {"startedAt": at(3)}}
METER_UP = container("meter", RUNNING, started=True)


def unscheduled(message: str) -> dict[str, Any]:
    scheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    return {"phase": "Pending", "conditions": [scheduled]}


def starting(meter: dict[str, Any], worker: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "initContainerStatuses": [meter],
        "containerStatuses": [
            worker or container("worker", {"waiting": {"reason": "PodInitializing"}})
        ],
    }


def ended(terminated: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "phase": "Failed",
        "initContainerStatuses": [container("meter", {"terminated": {"exitCode": 0}})],
        "containerStatuses": [container("worker", {"terminated": terminated})],
        **more,
    }


@pytest.mark.parametrize(
    ("status", "devices", "reason", "said"),
    [
        pytest.param(unscheduled("0/3 nodes: 3 Insufficient cpu"), None, "Unschedulable", "3 Insufficient cpu", id="no room"),
        pytest.param(unscheduled("0/3 nodes: 3 Insufficient nvidia.com/gpu"), GPU, "ResourceNotOffered", "nodes offer amd.com/gpu", id="no such device"),
        pytest.param(unscheduled("pod has unbound immediate PersistentVolumeClaims"), None, "VolumePending", "unbound", id="volume"),
        pytest.param(unscheduled("cannot allocate all claims: resourceclaim x"), None, "ClaimPending", "resourceclaim", id="dra claim"),
        pytest.param({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}, None, "PullingImage", "", id="no word from the kubelet"),
        pytest.param(
            starting(container("meter", {"waiting": {"reason": "ImagePullBackOff", "message": "no such manifest"}})),
            None, "ImagePullFailed", "container meter: no such manifest", id="meter's image",
        ),
        pytest.param(
            starting(METER_UP, container("worker", {"waiting": {"reason": "ErrImageNeverPull"}})),
            None, "ImagePullFailed", "container worker: ErrImageNeverPull", id="worker's image",
        ),
        pytest.param(
            starting(METER_UP, container("worker", {"waiting": {"reason": "InvalidImageName", "message": "bad"}})),
            None, "ImageInvalid", "bad", id="no image name",
        ),
        pytest.param(
            starting(METER_UP, container("worker", {"waiting": {"reason": "CreateContainerError", "message": "no such user"}})),
            None, "StartFailed", "no such user", id="runtime refuses",
        ),
        pytest.param(starting(container("meter", RUNNING, started=False)), None, "MeterNotReady", "start-up probe", id="meter starts"),
        pytest.param(
            starting(container("meter", {"waiting": {"reason": "CrashLoopBackOff"}}, lastState={"terminated": {"exitCode": 3}})),
            None, "MeterNotReady", "exit code 3", id="meter dies",
        ),
        pytest.param(starting(METER_UP), None, "PullingImage", "", id="worker waits"),
        pytest.param(
            {"phase": "Running", "initContainerStatuses": [METER_UP], "containerStatuses": [container("worker", RUNNING)]},
            None, "LoadingWeights", "", id="worker loads",
        ),
        pytest.param(
            {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}, None, "", "", id="ready",
        ),
        pytest.param(ended({"exitCode": 1, "message": "CUDA error"}), None, "WorkerFailed", "CUDA error", id="worker fails"),
        pytest.param(ended({"exitCode": 137, "reason": "OOMKilled"}), None, "OutOfMemory", "memory", id="out of memory"),
        pytest.param(
            {"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, None, "Evicted", "low on disk", id="evicted",
        ),
        pytest.param(
            ended({"exitCode": 137}, conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "for x"}]),
            None, "Preempted", "for x", id="preempted",
        ),
        pytest.param(
            ended({"exitCode": 137}, conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]),
            None, "NodeLost", "", id="node lost",
        ),
        pytest.param(
            {"phase": "Failed", "initContainerStatuses": [container("meter", {"terminated": {"exitCode": 3}})]},
            None, "MeterFailed", "exit code 3", id="meter ends before the worker",
        ),
        pytest.param(
            {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "device is busy"},
            None, "StartFailed", "device is busy", id="the node refuses",
        ),
    ],
)  # fmt: skip
def test_reason(status: dict[str, Any], devices: Devices | None, reason: str, said: str) -> None:
    seen = view(status, devices)
    assert seen.reason == reason
    assert said in seen.message


def test_names_numbers_and_times() -> None:
    seen = view(
        {"phase": "Running", "podIP": "10.0.0.7"},
        deletionTimestamp=at(150),
        deletionGracePeriodSeconds=120,
        annotations={labels.RESTART: "7"},
    )
    assert (seen.attempt, seen.rank, seen.owner_uid) == (2, 0, "session-1")
    assert (seen.ip, seen.node, seen.restart) == ("10.0.0.7", "n1", "7")
    assert seen.created_us == T0
    # The timestamp says when the grace is over.
    assert seen.deleting_since_us == T0 + 30_000_000


@pytest.mark.parametrize("label", [None, "", "x", "-1", "²"])
def test_a_label_that_is_no_number_is_none(label: str | None) -> None:
    known = {} if label is None else {labels.ATTEMPT: label, labels.RANK: label}
    seen = pod_view(pod({}, labels=known), NodeView(), Devices())
    assert (seen.attempt, seen.rank) == (None, None)


def test_only_our_own_controller_counts() -> None:
    theirs = [{"uid": "other", "kind": "Job", "controller": False}]
    assert view({}, ownerReferences=theirs).owner_uid == ""


def test_deaths_and_runs_of_the_meter() -> None:
    last = {"terminated": {"exitCode": 3, "startedAt": at(1), "finishedAt": at(2.5)}}
    dead = container(
        "meter", {"waiting": {"reason": "CrashLoopBackOff"}}, restartCount=1, lastState=last
    )
    seen = view(starting(dead))
    assert (seen.meter_started, seen.meter_since_us, seen.meter_deaths) == (False, None, 2)
    assert seen.meter_last_run_s == 1.5
    up = container("meter", RUNNING, started=True, restartCount=1, lastState=last)
    again = view(starting(up))
    assert (again.meter_started, again.meter_since_us, again.meter_deaths) == (
        True,
        T0 + 3_000_000,
        1,
    )


def test_ranks_above_0_have_no_meter_to_wait_for() -> None:
    seen = view(starting(container("other", RUNNING)), rank=1)
    assert (seen.meter_started, seen.meter_deaths) == (True, 0)


def test_exit_code_is_the_workers() -> None:
    assert view(ended({"exitCode": 9})).exit_code == 9
    assert view({"phase": "Running"}).exit_code is None


def node(ready: str, taints: list[dict[str, str]] | None = None) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": at(10)}
    return {
        "metadata": {"name": "n1"},
        "spec": {"taints": taints or []},
        "status": {"conditions": [condition]},
    }


@pytest.mark.parametrize(
    ("body", "missed", "expected"),
    [
        pytest.param(node("True"), None, NodeView(), id="well"),
        pytest.param(node("Unknown"), None, NodeView(lost_since_us=T0 + 10_000_000), id="silent"),
        pytest.param(node("False"), None, NodeView(lost_since_us=T0 + 10_000_000), id="not ready"),
        pytest.param(None, T0, NodeView(lost_since_us=T0, gone=True), id="gone"),
        pytest.param(
            node("Unknown", [{"key": "node.kubernetes.io/out-of-service"}]),
            None,
            NodeView(lost_since_us=T0 + 10_000_000, gone=True),
            id="out of service",
        ),
    ],
)
def test_node(body: dict[str, Any] | None, missed: int | None, expected: NodeView) -> None:
    assert node_view(body, missed) == expected


def job(attempt: str, *conditions: dict[str, str], component: str = "drain") -> dict[str, Any]:
    known = {"app.kubernetes.io/component": component, labels.ATTEMPT: attempt}
    meta = {"name": f"run-drain-a{attempt}", "uid": f"job-{attempt}", "labels": known}
    return {"metadata": meta, "status": {"conditions": list(conditions)}}


def test_the_drain_job_of_the_newest_attempt_counts() -> None:
    failed = {
        "type": "Failed",
        "status": "True",
        "reason": "BackoffLimitExceeded",
        "lastTransitionTime": at(5),
    }
    done = {"type": "Complete", "status": "True", "lastTransitionTime": at(6)}
    seen = drain_view([job("9"), job("10", failed), job("99", component="fetch")])
    assert seen is not None
    assert (seen.attempt, seen.state, seen.finished_us) == (10, "Failed", T0 + 5_000_000)
    assert seen.message == "BackoffLimitExceeded"
    complete = drain_view([job("1", done)])
    assert complete is not None
    assert complete.state == "Succeeded"
    assert drain_view([]) is None
