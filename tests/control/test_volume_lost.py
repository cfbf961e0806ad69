"""A volume claim is deleted under a session that waits: made again before there is a log, a record afterwards."""

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill_contracts import secrets
from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.operator_lives import told
from gristmill_testing.operator_world import (
    IMAGE,
    KEY,
    OperatorWorld,
    operator_world,
    reset,
    session,
)
from gristmill_testing.waiting_volumes import make_volumes

Json = dict[str, Any]
NAMESPACE = "gm-acme"


@pytest.fixture(scope="module")
def world(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorWorld]:
    folder: Path = tmp_path_factory.mktemp("volumes")
    make_volumes(control_cluster, 10, "lost")
    with operator_world(control_cluster, folder) as made:
        made.start_operator()
        made.tenant()
        made.model(weights={"image": {"reference": IMAGE}})
        yield made
        reset(made)


def cordon(world: OperatorWorld, *, on: bool) -> None:
    """Nodes take no new pod, or do again."""
    verb = "cordon" if on else "uncordon"
    names = [each["metadata"]["name"] for each in world.cluster.objects("nodes")]
    world.cluster.kubectl(verb, *names)


def rob(world: OperatorWorld, name: str) -> str:
    """Delete the session's claim. Its uid."""
    claim = f"{name}-state"
    uid: str = world.cluster.get("persistentvolumeclaim", claim, NAMESPACE)["metadata"]["uid"]
    world.cluster.delete("persistentvolumeclaim", claim, NAMESPACE)
    return uid


def gaps(world: OperatorWorld, uid: str) -> list[Json]:
    """What the ledger has on record as not brought in."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{world.ledger.port}/v1/sessions/{uid}/gaps",
        headers={
            "Authorization": f"Bearer {secrets.service_secret(KEY, 'operator')}",
            "X-Gristmill-Service": "operator",
        },
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        found: list[Json] = msgspec.msgpack.decode(answer.read())
    return found


def test_a_claim_deleted_under_a_pod_that_waits_is_made_again(world: OperatorWorld) -> None:
    cordon(world, on=True)
    try:
        world.cluster.apply(session("waits"))
        told(world, "waits", "PodsReady", "Unschedulable", within_s=15)
        old = rob(world, "waits")

        def made_again() -> bool:
            found = world.cluster.find("persistentvolumeclaim", "waits-state", NAMESPACE)
            return found is not None and found["metadata"]["uid"] != old

        eventually("the claim is made again", made_again, 15)
    finally:
        cordon(world, on=False)
    found = world.wait_state("waits", "Running")
    assert found["status"]["attempt"] == 1
    assert gaps(world, found["metadata"]["uid"]) == []


def test_a_claim_deleted_under_a_session_that_served_ends_it_with_a_gap_on_record(
    world: OperatorWorld,
) -> None:
    world.cluster.apply(session("robbed"))
    uid = world.wait_state("robbed", "Running")["metadata"]["uid"]
    cordon(world, on=True)
    try:
        world.cluster.delete("pod", "robbed-a1-0", NAMESPACE)
        told(world, "robbed", "PodsReady", "Unschedulable", within_s=60)
        rob(world, "robbed")
        message = told(world, "robbed", "Failed", "LogLost", within_s=30)
    finally:
        cordon(world, on=False)
    assert f"{NAMESPACE}/robbed-state" in message
    assert "Start a new session" in message
    [gap] = gaps(world, uid)
    assert (gap["attempt"], gap["reason"]) == (2, "VolumeLost")
    eventually("its pods are gone", lambda: not world.pods("robbed"), 30)
    assert world.cluster.find("persistentvolumeclaim", "robbed-state", NAMESPACE) is None
    heard = {(each["type"], each["reason"]) for each in world.events("robbed")}
    assert ("Warning", "LogLost") in heard
