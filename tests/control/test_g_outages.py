"""Operators, API servers and nodes that die, hang or are crowded: sessions come to where they should."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts.resources import format_time
from gristmill_contracts.units import now_us
from gristmill_testing.api_proxy import ApiProxy, Seen, api_proxy
from gristmill_testing.cluster import Cluster, condition, eventually
from gristmill_testing.operator_lives import NAMESPACE, apply_all, clear, pods_made, wait_served
from gristmill_testing.operator_world import (
    IMAGE,
    OperatorWorld,
    now,
    operator_world,
    reset,
    session,
)
from gristmill_testing.waiting_volumes import make_volumes

Json = dict[str, Any]
OPERATOR: Json = {"qps": "500", "burst": "500", "request_timeout_s": "2", "log_level": "WARNING"}


@pytest.fixture(scope="module")
def world(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorWorld]:
    folder: Path = tmp_path_factory.mktemp("outages")
    make_volumes(control_cluster, 250, "outages")
    with operator_world(control_cluster, folder) as made:
        made.start_operator(**OPERATOR)
        made.tenant()
        made.model(weights={"image": {"reference": IMAGE}})
        yield made
        reset(made)


# --- who leads -----------------------------------------------------------------------------------


def test_a_leader_that_hung_writes_nothing_when_it_wakes(world: OperatorWorld) -> None:
    """Two operators, each through a proxy of its own. The first hangs, the second leads, the first wakes."""
    first = world.operators[-1]
    names = [f"led{number}" for number in range(6)]
    with api_proxy(world.proxy.target, world.proxy.tls) as other:
        world.start_operator(**OPERATOR, api_server_url=other.url)
        assert not writes_of(other)
        apply_all(world, [session(each) for each in names])
        before = world.leader()
        first.process.send_signal(signal.SIGSTOP)
        hung = time.monotonic()
        eventually("the other leads", lambda: world.leader() not in ("", before), 25)
        assert time.monotonic() - hung < 22
        led = now()
        first.process.send_signal(signal.SIGCONT)
        assert first.process.wait(30) == 1, "it ends by itself"
        apply_all(world, [session(f"{each}b") for each in names])
        wait_served(world, [*names, *(f"{each}b" for each in names)])
        assert [each.line for each in writes_of(world.proxy, since=led)] == []
        assert writes_of(other, since=led)
        world.stop_operators()
    world.start_operator(**OPERATOR)
    clear(world)


def writes_of(proxy: ApiProxy, since: float = 0.0) -> list[Seen]:
    """But for the Lease, which two may try to take, and for questions."""
    return [
        each
        for each in proxy.requests(since=since)
        if each.writes and "/leases" not in each.line and "accessreviews" not in each.line
    ]


def revive(world: OperatorWorld) -> None:
    """What the kubelet does with a process that ended because it could not renew its Lease."""
    if not any(each.alive for each in world.operators):
        world.start_operator(**OPERATOR)


# --- what the API server stands on ---------------------------------------------------------------


@pytest.mark.parametrize("component", ["kube-apiserver", "etcd"])
def test_a_killed_api_server_delays_and_breaks_nothing(
    world: OperatorWorld, component: str
) -> None:
    """Killed while twenty sessions start: all serve within 60 s after the API answers again."""
    names = [f"{component[-4:]}{number}" for number in range(20)]
    mark = world.cluster.audit_mark()
    apply_all(world, [session(each) for each in names])
    eventually("some pods are there", world.pods, 30, 0.05)
    world.cluster.kill(component)
    world.cluster.wait_api()
    began = time.monotonic()
    revive(world)
    wait_served(world, names, max(1.0, 60 - (time.monotonic() - began)))
    made = pods_made(world, mark)
    assert not {name: count for name, count in made.items() if count > 1}
    assert len(world.pods()) == 20
    clear(world)


def test_g4_an_api_server_that_hangs_is_no_reason_to_be_restarted(world: OperatorWorld) -> None:
    """G4, its other half: the process is well as long as it is the API server that is silent."""
    operator = world.operators[-1]
    world.cluster.freeze("kube-apiserver")
    try:
        for _ in range(5):
            assert operator.ask("/healthz")[0] == 200
            time.sleep(1)  # nothing tells of a probe that does not fail
    finally:
        world.cluster.thaw("kube-apiserver")
    world.cluster.wait_api()
    apply_all(world, [session("thawed")])

    def thawed() -> bool:
        revive(world)
        found = world.session("thawed")
        return condition(found, "PodsReady") == "True"

    eventually("it serves", thawed, 60)
    clear(world)
    # It may still end, rightly, for want of a renewed Lease.
    world.stop_operators()
    world.start_operator(**OPERATOR)


# --- a node that is silent -----------------------------------------------------------------------


def test_a_silent_node_is_fenced_by_the_number_of_the_attempt(world: OperatorWorld) -> None:
    """Two nodes. The old pod may still run where nobody hears of it: the next attempt does not wait for it."""
    apply_all(world, [session("fenced")])
    wait_served(world, ["fenced"])
    old = world.pods("fenced")[0]
    node = old["spec"]["nodeName"]
    silent = "gristmill.dev/fake-node-silent"
    world.cluster.kubectl("annotate", "node", node, f"{silent}=true")
    try:
        set_ready(world, node, "Unknown", since_s=90)
        found = eventually("attempt 2 serves", lambda: served_by(world, "fenced", 2), 60)
        there = {pod["metadata"]["name"]: pod for pod in world.pods("fenced")}
        assert "fenced-a1-0" in there, "the silent node still holds it"
        assert there["fenced-a2-0"]["spec"]["nodeName"] != node
        assert there["fenced-a2-0"]["status"]["podIP"] in found["status"]["endpoint"]
        assert found["status"]["lastFailure"]["reason"] == "NodeLost"
        assert found["status"].get("restarts", 0) == 0
        first, second = (
            world.cluster.get("secret", f"fenced-a{number}", NAMESPACE)["data"] for number in (1, 2)
        )
        assert set(first.values()).isdisjoint(second.values()), "no secret is shared"
    finally:
        world.cluster.kubectl("annotate", "node", node, f"{silent}-")
        set_ready(world, node, "True", since_s=0)
    eventually("the old pod ends", lambda: len(world.pods("fenced")) == 1, 60)
    assert world.session("fenced")["status"]["attempt"] == 2
    clear(world)


def served_by(world: OperatorWorld, name: str, attempt: int) -> Json | None:
    found = world.session(name)
    is_there = found["status"].get("attempt") == attempt and condition(found, "PodsReady") == "True"
    return found if is_there else None


def set_ready(world: OperatorWorld, node: str, status: str, since_s: int) -> None:
    since = format_time(now_us() - since_s * 1_000_000)
    ready = {
        "type": "Ready", "status": status, "reason": "Test", "message": "", "lastTransitionTime": since,
        "lastHeartbeatTime": since,
    }  # fmt: skip
    world.cluster.kubectl(
        "patch", "node", node, "--subresource=status", "--type=strategic",
        f"--patch={json.dumps({'status': {'conditions': [ready]}})}",
    )  # fmt: skip


# --- many ----------------------------------------------------------------------------------------


def test_g58_a_burst_is_worked_off_at_the_configured_rate(world: OperatorWorld) -> None:
    """G58: a client's throttle stalled many resources. Requests go out at what was configured, not at less."""
    world.stop_operators()
    rate = 20.0
    world.start_operator(**{**OPERATOR, "qps": "20", "burst": "20"})
    names = [f"burst{number}" for number in range(25)]
    began = now()
    apply_all(world, [session(each) for each in names])
    wait_served(world, names, 120)
    mine = [
        each
        for each in world.proxy.requests(since=began)
        if "watch=true" not in each.line
        and "/leases" not in each.line
        and "/events" not in each.line
    ]
    # The last ones wait for pods, not for their turn.
    busy = mine[: len(mine) * 3 // 4]
    took_s = busy[-1].at - busy[0].at
    assert (len(busy) - 20) / took_s == pytest.approx(rate, rel=0.15)
    world.stop_operators()
    world.start_operator(**OPERATOR)
    clear(world)


def test_g60_pods_of_others_cost_no_memory(world: OperatorWorld) -> None:
    """G60: a cache of all pods of the cluster. 400 pods of 100 kB stand for the 10 000 small ones."""
    world.stop_operators()
    operator = world.start_operator(**OPERATOR)
    before = operator.rss_bytes
    world.stop_operators()
    world.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "crowd"}})
    heavy = "x" * 100_000
    pod = {
        "apiVersion": "v1", "kind": "Pod",
        "spec": {"schedulingGates": [{"name": "example.com/never"}],
                 "containers": [{"name": "c", "image": "registry.example.com/c"}]},
    }  # fmt: skip
    for batch in range(10):
        many = [
            {**pod, "metadata": {"name": f"p{batch}-{number}", "namespace": "crowd",
                                 "annotations": {"example.com/heavy": heavy}}}
            for number in range(40)
        ]  # fmt: skip
        apply_all(world, many)
    try:
        operator = world.start_operator(**OPERATOR)
        apply_all(world, [session("small")])
        wait_served(world, ["small"])
        assert operator.rss_bytes - before < 10e6
    finally:
        world.cluster.kubectl(
            "delete", "pods", "--all", "--namespace=crowd", "--grace-period=0", "--force",
            "--wait=false", timeout=60,
        )  # fmt: skip
    clear(world)
