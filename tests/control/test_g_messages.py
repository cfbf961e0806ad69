"""What cannot work is said, in the resource and in an Event, in seconds: what, where, and what to do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.operator_world import (
    IMAGE,
    OperatorWorld,
    operator_world,
    reset,
    session,
    tenant,
)
from gristmill_testing.waiting_volumes import make_volumes

Json = dict[str, Any]
SOON_S = 5.0
CLUSTER_TELLS_S = 15.0
NOWHERE = "nowhere"
"""A profile of `tiny` that no node fits: its pods wait, and the test says how they are."""


@pytest.fixture(scope="module")
def world(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorWorld]:
    folder: Path = tmp_path_factory.mktemp("messages")
    make_volumes(control_cluster, 120, "messages")
    with operator_world(control_cluster, folder) as made:
        made.start_operator(qps="200", burst="200")
        made.tenant()
        made.model(weights={"image": {"reference": IMAGE}}, profiles=profiles())
        yield made
        assert all(each.alive for each in made.operators), "it crashed"
        for each in made.operators:
            assert "reconcile_crashed" not in each.log.read_text()
        reset(made)


def profiles() -> list[Json]:
    small = {"resources": {"cpu": "100m", "memory": "64Mi"}}
    return [
        {"name": "default", **small},
        {"name": "npu", **small, "device": {"resourceName": "example.com/npu", "count": 1}},
        {"name": NOWHERE, **small, "nodeSelector": {"gristmill.dev/nowhere": "true"}},
    ]


def told(
    world: OperatorWorld, name: str, type_: str, reason: str, *, within_s: float = SOON_S,
    namespace: str = "gm-acme",
) -> str:  # fmt: skip
    """The message of the condition, once it and an Event of the same reason are there."""
    found = world.wait_reason(name, type_, reason, namespace, within_s)
    eventually(
        f"an Event {reason} of {name}",
        lambda: reason in {each["reason"] for each in world.events(name, namespace)},
        SOON_S,
    )
    assert found["message"]
    return str(found["message"])


# --- bad input: what the operator itself knows ---------------------------------------------------


def test_an_unknown_model_is_named(world: OperatorWorld) -> None:
    world.cluster.apply(session("no-model", baseModelRef={"name": "missing"}))
    message = told(world, "no-model", "Accepted", "ModelNotFound")
    assert "'missing'" in message
    assert "create it" in message


def test_an_unknown_profile_is_told_with_those_there_are(world: OperatorWorld) -> None:
    world.cluster.apply(session("no-profile", baseModelRef={"name": "tiny", "profile": "huge"}))
    message = told(world, "no-profile", "Accepted", "ProfileNotFound")
    assert "'huge'" in message
    assert "default" in message


def test_a_model_that_is_not_ready_is_waited_for_with_its_reason(world: OperatorWorld) -> None:
    """Weights in a folder of the node, which this installation does not allow."""
    from gristmill_testing.operator_world import model

    world.cluster.apply(model("unready", weights={"path": "/srv/models/x"}))
    world.cluster.apply(session("early", baseModelRef={"name": "unready"}))
    message = told(world, "early", "QuotaReserved", "WaitingForModel")
    assert "'unready'" in message
    assert len(message) > len("BaseModel 'unready' is not ready: "), message
    assert world.state("early") == "Created"


def test_a_session_outside_of_a_tenant_is_told_how_to_get_one(world: OperatorWorld) -> None:
    world.cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "nobodys"}},
        session("stray", "nobodys"),
    )
    message = told(world, "stray", "Accepted", "TenantNotFound", namespace="nobodys")
    assert "'nobodys'" in message
    assert "create" in message
    world.cluster.delete("trainingsession", "stray", "nobodys")
    world.cluster.wait_gone("trainingsession", "stray", "nobodys", 20)


def test_a_suspended_tenant_starts_nothing_and_says_so(world: OperatorWorld) -> None:
    namespace = world.tenant("asleep", suspended=True)
    world.cluster.apply(session("waits", namespace))
    message = told(world, "waits", "Accepted", "TenantSuspended", namespace=namespace)
    assert "spec.suspended" in message
    assert world.pods(namespace=namespace) == []
    world.cluster.apply(tenant("asleep", suspended=False))
    world.wait_state("waits", "Running", namespace, 30)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": {"maxTokens": 0}}, "budget.maxTokens"),
        ({"budget": {"maxCost": "0"}}, "budget.maxCost"),
        ({"workers": 0}, "workers"),
    ],
)
def test_a_budget_of_nothing_is_refused_at_the_door(
    world: OperatorWorld, changes: Json, said: str
) -> None:
    answer = world.cluster.try_apply(session("poor", **changes))
    assert answer.code != 0
    assert said in answer.err
    assert world.cluster.find("trainingsession", "poor", "gm-acme") is None


def test_a_version_that_is_not_served_is_refused_at_the_door(world: OperatorWorld) -> None:
    newer = {**session("newer"), "apiVersion": "gristmill.dev/v9"}
    answer = world.cluster.try_apply(newer)
    assert answer.code != 0
    assert "gristmill.dev/v9" in answer.err


def test_a_spec_of_a_newer_version_is_said_not_to_be_understood(world: OperatorWorld) -> None:
    """A newer chart's resource definition beside an operator that was not updated yet."""
    name = "trainingsessions.gristmill.dev"
    path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/desiredState/enum/-"
    definition = world.cluster.get("customresourcedefinition", name)
    patch = [{"op": "add", "path": path, "value": "Hibernating"}]
    world.cluster.kubectl("patch", "crd", name, "--type=json", f"--patch={json.dumps(patch)}")
    try:
        newer = session("of-tomorrow", desiredState="Hibernating")
        eventually("it is served", lambda: world.cluster.try_apply(newer).code == 0, 15)
        message = told(world, "of-tomorrow", "Accepted", "NotUnderstood")
        assert "desiredState" in message
    finally:
        world.cluster.kubectl(
            "delete", "trainingsession", "of-tomorrow", "--namespace=gm-acme", "--wait=false"
        )
        schema = definition["spec"]
        world.cluster.kubectl(
            "patch", "crd", name, "--type=merge", f"--patch={json.dumps({'spec': schema})}"
        )
    world.cluster.wait_gone("trainingsession", "of-tomorrow", "gm-acme", 20)


def test_two_sessions_of_one_display_name(world: OperatorWorld) -> None:
    world.cluster.apply(session("one", displayName="same-name"))
    world.wait_state("one", "Running")
    world.cluster.apply(session("two", displayName="same-name"))
    message = told(world, "two", "Accepted", "NameTaken")
    assert "'same-name'" in message
    assert "'one'" in message
    assert world.pods("two") == []
    kubectl = world.cluster.kubectl
    kubectl("delete", "trainingsession", "one", "--namespace=gm-acme", "--wait=false")
    world.wait_state("two", "Running", seconds=30)


def test_a_spec_that_is_edited_after_the_start_is_refused_or_said(world: OperatorWorld) -> None:
    world.cluster.apply(session("settled"))
    world.wait_state("settled", "Running")
    before = world.pod_uids("settled")
    answer = world.cluster.try_apply(session("settled", workers=4))
    assert answer.code != 0
    assert "workers" in answer.err
    world.cluster.apply(session("settled", failurePolicy={"maxRestarts": 7}))
    eventually(
        "it is observed",
        lambda: (
            (found := world.session("settled"))["status"]["observedGeneration"]
            == found["metadata"]["generation"]
        ),
        SOON_S,
    )
    assert world.pod_uids("settled") == before


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


def test_g24_a_device_that_no_node_has_is_told_with_what_there_is(world: OperatorWorld) -> None:
    """G24: Unschedulable for hours without a word; here a reason in 15 s, and an end at the limit."""
    world.cluster.apply(
        session(
            "npu", baseModelRef={"name": "tiny", "profile": "npu"}, limits={"pendingSeconds": 30}
        )
    )
    message = told(world, "npu", "PodsReady", "ResourceNotOffered", within_s=CLUSTER_TELLS_S)
    assert "example.com/npu" in message
    assert "nvidia.com/gpu" in message
    found = world.wait_reason("npu", "Failed", "PendingTimeout", seconds=60)
    assert "example.com/npu" in found["message"]
    eventually("its pod is gone", lambda: not world.pods("npu"), 15)


def test_g46_a_meter_that_never_answers_ends_in_metering_unavailable(
    world: OperatorWorld,
) -> None:
    """G46: a sidecar that is never ready: no free tokens, and a word about it in about a minute."""
    pod = place_nowhere(world, "no-meter", failurePolicy={"maxRestarts": 0})
    from gristmill_contracts.resources import format_time
    from gristmill_contracts.units import now_us

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
