"""What can never work as it stands is said in seconds, in the resource and in an Event: what, where, what to do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.operator_lives import SOON_S, told
from gristmill_testing.operator_world import (
    IMAGE,
    OperatorWorld,
    model,
    operator_world,
    reset,
    session,
    tenant,
)
from gristmill_testing.waiting_volumes import make_volumes

Json = dict[str, Any]


@pytest.fixture(scope="module")
def world(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorWorld]:
    folder: Path = tmp_path_factory.mktemp("input")
    make_volumes(control_cluster, 30, "input")
    with operator_world(control_cluster, folder) as made:
        made.start_operator(qps="200", burst="200")
        made.tenant()
        made.model(weights={"image": {"reference": IMAGE}})
        yield made
        assert all(each.alive for each in made.operators), "it crashed"
        for each in made.operators:
            assert "reconcile_crashed" not in each.log.read_text()
        reset(made)


def test_tenant_model_and_session_applied_at_once_come_to_run(world: OperatorWorld) -> None:
    """What a first user does. Nobody waits for a resync: what the operator's own writes change is news, too."""
    at_once = [
        tenant("newcomer"),
        model("new-model", weights={"image": {"reference": IMAGE}}),
    ]
    world.cluster.apply(*at_once)
    in_time = session("quick", "gm-newcomer", baseModelRef={"name": "new-model"})
    eventually(
        "its namespace is there", lambda: world.cluster.try_apply(in_time).code == 0, 10, 0.05
    )
    world.wait_state("quick", "Running", "gm-newcomer", 20)


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


def test_a_priority_class_that_the_tenant_does_not_have_is_named_and_may_be_added(
    world: OperatorWorld,
) -> None:
    """Pods of a higher class push those of others aside."""
    world.cluster.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
            "metadata": {"name": "urgent"}, "value": 1000,
        }
    )  # fmt: skip
    namespace = world.tenant("pushy")
    world.cluster.apply(session("first", namespace, priorityClassName="urgent"))
    message = told(world, "first", "Accepted", "PriorityNotAllowed", namespace=namespace)
    assert "'urgent'" in message
    assert "spec.priorityClasses" in message
    assert world.pods(namespace=namespace) == []
    world.cluster.apply(tenant("pushy", priorityClasses=["urgent"]))
    world.wait_state("first", "Running", namespace, 30)
    [pod] = world.pods("first", namespace)
    assert (pod["spec"]["priorityClassName"], pod["spec"]["priority"]) == ("urgent", 1000)


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


def test_a_tenants_budget_of_nothing_is_refused_at_the_door(world: OperatorWorld) -> None:
    answer = world.cluster.try_apply(tenant("broke", budget={"hard": "0"}))
    assert answer.code != 0
    assert "spec.budget.hard is 0; set more than 0" in answer.err
    assert "suspended: true" in answer.err


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
