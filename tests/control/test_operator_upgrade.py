"""Another operator over running sessions, and definitions that are deleted and made again: nothing is lost."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_testing.cluster import WRITES, Cluster, eventually
from gristmill_testing.operator_world import (
    ACCOUNT,
    IMAGE,
    METER_IMAGE,
    OperatorWorld,
    install_chart,
    operator_world,
    reset,
    session,
)
from gristmill_testing.waiting_volumes import make_volumes

SESSIONS = 20
NEWER_METER = "registry.example.com/gristmill-meter@sha256:" + "c" * 64
NEWER = {
    "meter_image": NEWER_METER,
    "meter_memory": "768Mi",
    "worker_tmp_size": "8Gi",
    "pod_environment": json.dumps({"NEW": "1"}),
}
"""What another release may do otherwise: image, defaults and template."""


VOLUMES = SESSIONS + 5


@pytest.fixture
def world(control_cluster: Cluster, tmp_path: Path) -> Iterator[OperatorWorld]:
    make_volumes(control_cluster, VOLUMES, "upgrade")
    with operator_world(control_cluster, tmp_path) as made:
        made.start_operator()
        made.tenant()
        made.model(weights={"image": {"reference": IMAGE}})
        yield made
        reset(made)
    names = [f"upgrade-{number}" for number in range(VOLUMES)]
    control_cluster.kubectl("delete", "persistentvolumes", *names, "--wait=false")


def meter_image(pod: dict[str, Any]) -> str:
    image: str = pod["spec"]["initContainers"][0]["image"]
    return image


def test_another_release_touches_no_session_that_runs(world: OperatorWorld) -> None:
    """G10: 20 sessions run on, and one that has to start again does so as it began."""
    cluster = world.cluster
    cluster.apply(*(session(f"s{number}") for number in range(SESSIONS)))
    for number in range(SESSIONS):
        world.wait_state(f"s{number}", "Running", seconds=120)
    before = world.pod_uids()
    assert len(before) == SESSIONS

    world.operators[-1].stop()
    mark = cluster.audit_mark()
    world.start_operator(**NEWER)
    eventually("the newer one leads", lambda: world.leader() == "operator-2", 60)
    cluster.apply(session("fresh"))
    world.wait_state("fresh", "Running")
    assert before <= world.pod_uids()
    touched = [
        each["requestURI"]
        for each in cluster.audit(mark, user=ACCOUNT, verbs=WRITES)
        if "/namespaces/gm-acme/" in each["requestURI"] and "fresh" not in str(each)
    ]
    assert [uri for uri in touched if "/pods" in uri or "/secrets" in uri] == []
    assert meter_image(world.pods("fresh")[0]) == NEWER_METER

    cluster.kubectl(
        "delete", "pod", "s0-a1-0", "--namespace=gm-acme", "--grace-period=0", "--force"
    )
    again = eventually("the next attempt", lambda: cluster.find("pod", "s0-a2-0", "gm-acme"), 60)
    assert meter_image(again) == METER_IMAGE


def test_definitions_that_are_made_again_lose_nothing(world: OperatorWorld) -> None:
    """G14: namespaces, volumes and what lies in them stay; the tenant is taken up again."""
    cluster = world.cluster
    cluster.apply(session("kept", storage={"size": "1Gi", "retain": "Retain"}))
    world.wait_state("kept", "Running")
    namespace = cluster.get("namespace", "gm-acme")["metadata"]["uid"]
    volume_uid = cluster.get("pvc", "kept-state", "gm-acme")["metadata"]["uid"]
    cluster.kubectl("create", "configmap", "g14", "--namespace=gm-acme")
    definitions = [
        f"{kind}.gristmill.dev" for kind in ("trainingsessions", "tenants", "basemodels")
    ]
    cluster.kubectl("delete", "crd", *definitions, "--wait=false")
    for each in definitions:
        cluster.wait_gone("crd", each, seconds=120)
    assert cluster.get("namespace", "gm-acme")["metadata"]["uid"] == namespace

    install_chart(cluster)
    for each in definitions:
        cluster.wait_condition("crd", each, "Established")
    # As the kubelet does with a process whose watches have ended.
    world.stop_operators()
    world.start_operator()
    world.tenant()
    world.model(weights={"image": {"reference": IMAGE}})
    assert cluster.get("namespace", "gm-acme")["metadata"]["uid"] == namespace
    assert cluster.get("pvc", "kept-state", "gm-acme")["metadata"]["uid"] == volume_uid
    assert cluster.find("configmap", "g14", "gm-acme") is not None
    cluster.apply(session("kept", storage={"size": "1Gi", "retain": "Retain"}))
    world.wait_state("kept", "Running")
    assert cluster.get("pvc", "kept-state", "gm-acme")["metadata"]["uid"] == volume_uid
