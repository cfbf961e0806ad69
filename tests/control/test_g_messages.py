"""What only the cluster can tell is passed on in its own words; and what a hundred idle sessions cost."""

import json
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts.resources import format_time
from gristmill_contracts.units import now_us
from gristmill_testing.cluster import WRITES, Cluster, eventually
from gristmill_testing.operator_lives import told
from gristmill_testing.operator_world import (
    ACCOUNT,
    IMAGE,
    OperatorWorld,
    operator_world,
    reset,
    session,
    tenant,
)
from gristmill_testing.waiting_volumes import make_volumes

Json = dict[str, Any]
CLUSTER_TELLS_S = 15.0
NOWHERE = "nowhere"
"""A profile of `tiny` that no node fits: its pods wait, and the test says how they are."""


@pytest.fixture(scope="module")
def world(
    control_cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[OperatorWorld]:
    folder: Path = tmp_path_factory.mktemp("messages")
    make_volumes(control_cluster, 220, "messages")
    with operator_world(control_cluster, folder) as made:
        made.start_operator(qps="200", burst="200")
        made.tenant()
        made.model(weights={"image": {"reference": IMAGE}}, profiles=profiles())
        if any(item.name.startswith("test_g22_") for item in request.session.items):
            quiet_mark.append(fall_quiet(made))
        yield made
        assert all(each.alive for each in made.operators), "it crashed"
        for each in made.operators:
            assert "reconcile_crashed" not in each.log.read_text()
        reset(made)


QUIET = "gm-quiet"
IDLE_S = float(os.environ.get("GRISTMILL_IDLE_S", "300"))
"""How long 100 idle sessions are watched; the other tests of this module run meanwhile."""
quiet_mark: list[tuple[float, int]] = []
"""From when on nothing may be written of them, and the length of the audit log before."""
SETTLED_S = 90.0
"""What they cost is told once, a minute after their start."""


def fall_quiet(world: OperatorWorld) -> tuple[float, int]:
    """100 sessions that run, in a namespace of their own. Returns when nothing more may be written of them."""
    world.tenant("quiet")
    text = "\n---\n".join(json.dumps(session(f"q{number}", QUIET)) for number in range(100))
    world.cluster.apply(text, timeout=120)

    def running() -> bool:
        found = world.cluster.objects("trainingsessions", QUIET)
        return all((each.get("status") or {}).get("state") == "Running" for each in found)

    eventually("all run", running, 180, 1)
    return time.time() + SETTLED_S, world.cluster.audit_mark()


def quiet_writes(world: OperatorWorld, mark: int, since: float) -> list[str]:
    """Of the operator, about the sessions that should need nothing, from a time on."""
    return [
        f"{each['stageTimestamp']} {each['verb']} {each['requestURI']}"
        for each in world.cluster.audit(mark, user=ACCOUNT, verbs=WRITES)
        if (QUIET in each["requestURI"] or "/tenants/quiet" in each["requestURI"])
        and datetime.fromisoformat(each["stageTimestamp"]).timestamp() > since
    ]


def profiles() -> list[Json]:
    small = {"resources": {"cpu": "100m", "memory": "64Mi"}}
    return [
        {"name": "default", **small},
        {"name": "npu", **small, "device": {"resourceName": "example.com/npu", "count": 1}},
        {"name": NOWHERE, **small, "nodeSelector": {"gristmill.dev/nowhere": "true"}},
    ]


# --- what the cluster tells ----------------------------------------------------------------------


def test_g20_a_quota_of_nothing_is_told_in_the_apis_words(world: OperatorWorld) -> None:
    """G20: child creation refused by the quota."""
    namespace = world.tenant("broke", quota={"pods": 0})
    world.cluster.apply(session("squeezed", namespace))
    message = told(world, "squeezed", "QuotaReserved", "QuotaExceeded", namespace=namespace)
    assert "exceeded quota" in message
    assert "pods=0" in message.replace(" ", "")
    assert world.state("squeezed", namespace) in {"Created", "Scheduled"}
    world.cluster.apply(tenant("broke", quota={"pods": 5}))
    world.wait_state("squeezed", "Running", namespace, 90)


def test_g20_a_pod_that_admission_refuses_is_told_in_the_apis_words(world: OperatorWorld) -> None:
    """G20: child creation refused by a policy of the platform's own."""
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "no-denied-pods"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                ]
            },
            "validations": [
                {
                    "expression": "!object.metadata.name.startsWith('denied-')",
                    "message": "the platform team forbids it, ask at desk 7",
                }
            ],
        },
    }  # fmt: skip
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "no-denied-pods"},
        "spec": {"policyName": "no-denied-pods", "validationActions": ["Deny"]},
    }
    world.cluster.apply(policy, binding)
    try_one = ("run", "denied-probe", "--image=x", "--dry-run=server", "--namespace=default")
    eventually("it denies", lambda: "desk 7" in world.cluster.try_kubectl(*try_one).err, 30)
    try:
        world.cluster.apply(session("denied"))
        message = told(world, "denied", "PodsReady", "CreationRefused")
        assert "the platform team forbids it, ask at desk 7" in message
    finally:
        world.cluster.kubectl("delete", "validatingadmissionpolicybinding", "no-denied-pods")
    world.wait_state("denied", "Running", seconds=90)


def set_status(world: OperatorWorld, pod: str, **status: Any) -> None:
    """Play the node for a pod that none has."""
    scheduled = {"type": "PodScheduled", "status": "True"}
    body = {"status": {"conditions": [scheduled], **status}}
    world.cluster.kubectl(
        "patch", "pod", pod, "--namespace=gm-acme", "--subresource=status", "--type=strategic",
        f"--patch={json.dumps(body)}",
    )  # fmt: skip


def place_nowhere(world: OperatorWorld, name: str, **spec: Any) -> str:
    world.cluster.apply(session(name, baseModelRef={"name": "tiny", "profile": NOWHERE}, **spec))
    pod = f"{name}-a1-0"
    eventually("its pod is there", lambda: world.cluster.find("pod", pod, "gm-acme"), 20)
    return pod


def test_g20_an_image_that_cannot_be_named_fails_at_once(world: OperatorWorld) -> None:
    """G20: a reference that no node can pull, in the node's words."""
    pod = place_nowhere(world, "bad-image")
    told(world, "bad-image", "PodsReady", "Unschedulable", within_s=CLUSTER_TELLS_S)
    said = 'Failed to apply default image tag "x::y": couldn\'t parse image reference'
    waiting = {"waiting": {"reason": "InvalidImageName", "message": said}}
    status = {"name": "worker", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    set_status(world, pod, containerStatuses=[{**status, "state": waiting}])
    message = told(world, "bad-image", "Failed", "ImageInvalid")
    assert "couldn't parse image reference" in message
    eventually("its pod is gone", lambda: not world.pods("bad-image"), 30)


def test_g24_an_image_that_nobody_has_is_told_and_given_up_at_the_limit(
    world: OperatorWorld,
) -> None:
    """G24: the node's words within 15 s; a pull that is tried again for ever has an end all the same."""
    pod = place_nowhere(world, "no-image", limits={"pendingSeconds": 60})
    said = f'Back-off pulling image "{IMAGE}": not found'
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": said}}
    status = {"name": "worker", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    set_status(world, pod, containerStatuses=[{**status, "state": waiting}])
    message = told(world, "no-image", "PodsReady", "ImagePullFailed", within_s=CLUSTER_TELLS_S)
    assert said in message
    assert "Check that the image exists" in message
    message = told(world, "no-image", "Failed", "PendingTimeout", within_s=90)
    assert "not found" in message
    eventually("its pod is gone", lambda: not world.pods("no-image"), 30)


def test_g24_a_device_that_no_node_has_is_told_with_what_there_is(world: OperatorWorld) -> None:
    """G24: Unschedulable for hours without a word; here a reason in 15 s, and an end at the limit."""
    world.cluster.apply(
        session(
            "npu", baseModelRef={"name": "tiny", "profile": "npu"}, limits={"pendingSeconds": 60}
        )
    )
    message = told(world, "npu", "PodsReady", "ResourceNotOffered", within_s=CLUSTER_TELLS_S)
    assert "example.com/npu" in message
    assert "nvidia.com/gpu" in message
    found = world.wait_reason("npu", "Failed", "PendingTimeout", seconds=90)
    assert "example.com/npu" in found["message"]
    eventually("its pod is gone", lambda: not world.pods("npu"), 15)


def test_g46_a_meter_that_never_answers_ends_in_metering_unavailable(
    world: OperatorWorld,
) -> None:
    """G46: a sidecar that is never ready: no free tokens, and a word about it in about a minute."""
    pod = place_nowhere(world, "no-meter", failurePolicy={"maxRestarts": 0})
    runs = {"running": {"startedAt": format_time(now_us())}}
    meter = {"name": "meter", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    set_status(world, pod, initContainerStatuses=[{**meter, "started": False, "state": runs}])
    assert "until" in world.wait_reason("no-meter", "PodsReady", "MeterNotReady")["message"]
    assert "meter" in told(world, "no-meter", "Failed", "MeteringUnavailable", within_s=75)
    eventually("its pod is gone", lambda: not world.pods("no-meter"), 15)


def test_g28_fifty_sessions_at_once_in_a_namespace_with_a_quota(world: OperatorWorld) -> None:
    """G28: conflicts on the quota's counters are no failure."""
    quota = {"pods": 50, "pvcs": 50, "storage": "50Gi", "cpu": "50", "memory": "100Gi"}
    namespace = world.tenant("many", quota=quota)
    names = [f"n{number}" for number in range(50)]
    text = "\n---\n".join(json.dumps(session(each, namespace)) for each in names)
    world.cluster.apply(text, timeout=60)

    def states() -> list[str]:
        found = world.cluster.objects("trainingsessions", namespace)
        return [(each.get("status") or {}).get("state", "") for each in found]

    eventually("all run", lambda: states().count("Running") == 50, 120, 1)
    found = world.cluster.objects("trainingsessions", namespace)
    assert {each["status"].get("restarts", 0) for each in found} == {0}
    reasons = {each["reason"] for each in world.cluster.objects("events.events.k8s.io", namespace)}
    assert "QuotaExceeded" not in reasons


def test_g34_a_mark_on_a_namespace_is_the_operators_alone(world: OperatorWorld) -> None:
    """G34: ownership of a namespace claimed by a label."""
    world.cluster.apply(
        tenant("acme", subjects=[{"kind": "Group", "name": "tenant-a", "role": "edit"}])
    )
    marks = ("gristmill.dev/tenant=acme", "app.kubernetes.io/managed-by=gristmill")
    alice = ("--as=alice", "--as-group=tenant-a")
    for who in (alice, ()):
        for namespace in ("kube-system", "gm-acme"):
            answer = world.cluster.try_kubectl(
                "label", "namespace", namespace, "gristmill.dev/tenant=other", "--overwrite", *who
            )
            assert answer.code != 0, (who, namespace)
    assert world.cluster.try_kubectl("label", "namespace", "default", marks[1]).code == 0
    try:
        for kind in ("networkpolicies", "resourcequotas", "rolebindings"):
            for namespace in ("default", "kube-system"):
                made = world.cluster.objects(kind, namespace, marks[1])
                assert made == [], (kind, namespace)
        assert world.cluster.get("namespace", "default")["metadata"].get("annotations") is None
    finally:
        world.cluster.kubectl("label", "namespace", "default", "app.kubernetes.io/managed-by-")


def test_g50_a_name_of_forty_characters_runs_and_one_more_is_refused(
    world: OperatorWorld,
) -> None:
    """G50: long names that are cut somewhere; with two ranks, whose host names are longer still."""
    longest = "n" * 40
    world.cluster.apply(session(longest, workers=2))
    answer = world.cluster.try_apply(session("n" * 41))
    assert answer.code != 0
    assert "40" in answer.err
    world.wait_state(longest, "Running")
    assert {pod["spec"]["hostname"] for pod in world.pods(longest)} == {
        f"{longest}-a1-0", f"{longest}-a1-1"
    }  # fmt: skip


@pytest.mark.waiting
@pytest.mark.timeout(1200)
def test_g22_a_hundred_idle_sessions_cause_no_write_but_the_lease(world: OperatorWorld) -> None:
    """G22: a controller whose own status write started its next pass. By the API server's audit log.

    The last of the module: the others ran while these sessions needed nothing.
    """
    since, mark = quiet_mark[0]
    time.sleep(max(0.0, since + IDLE_S - time.time()))  # nothing tells of what is not written
    assert quiet_writes(world, mark, since) == []
    lately = world.cluster.audit_mark()
    time.sleep(10)
    found = world.cluster.audit(lately, user=ACCOUNT, verbs=WRITES)
    assert {each["requestURI"].split("/")[-2] for each in found} <= {"leases"}
