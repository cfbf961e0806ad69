"""Operators, API servers and nodes that die, hang or are crowded: sessions come to where they should.

Each test begins with one operator that leads and with no session, whatever became of the one before. How long
is waited grows with how crowded the machine is.
"""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts.resources import format_time
from gristmill_contracts.units import now_us
from gristmill_testing.api_proxy import ApiProxy, Seen, api_proxy
from gristmill_testing.cluster import Cluster, condition, crowding, eventually
from gristmill_testing.operator_lives import (
    AWAY,
    NAMESPACE,
    apply_all,
    clear,
    pods_made,
    settle,
    wait_served,
)
from gristmill_testing.operator_world import (
    IMAGE,
    OperatorWorld,
    Process,
    now,
    operator_world,
    reset,
    session,
)
from gristmill_testing.waiting_volumes import make_volumes

pytestmark = pytest.mark.timeout(1200)

Json = dict[str, Any]
OPERATOR: Json = {"qps": "500", "burst": "500", "request_timeout_s": "2", "log_level": "WARNING"}
AGAIN_S = 60.0
"""From the API answering again to everything being served."""
HANDED_OVER_S = 40.0
"""A Lease that is not renewed has ended long before that."""


@pytest.fixture(scope="module")
def shared(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorWorld]:
    folder: Path = tmp_path_factory.mktemp("outages")
    make_volumes(control_cluster, 250, "outages")
    with operator_world(control_cluster, folder) as made:
        made.start_operator(**OPERATOR)
        made.tenant()
        made.model(weights={"image": {"reference": IMAGE}})
        yield made
        settle(made, **OPERATOR)
        reset(made)


@pytest.fixture
def world(shared: OperatorWorld) -> OperatorWorld:
    settle(shared, **OPERATOR)
    return shared


def revive(world: OperatorWorld, **settings: str) -> None:
    """What the kubelet does with a process that ended because it could not renew its Lease."""
    if not any(each.alive for each in world.operators):
        world.start_operator(ready=False, **{**OPERATOR, **settings})


# --- who leads -----------------------------------------------------------------------------------


def test_a_leader_that_hung_writes_nothing_when_it_wakes(world: OperatorWorld) -> None:
    """Two operators, each through a proxy of its own. The first hangs, the second leads, the first wakes."""
    [first] = world.operators
    names = [f"led{number}" for number in range(6)]
    with api_proxy(world.proxy.target, world.proxy.tls) as other:
        world.start_operator(**OPERATOR, api_server_url=other.url)
        assert not writes_of(other)
        apply_all(world, [session(each) for each in names])
        before = world.leader()
        with hung(first):
            others = ("", before)
            eventually("the other leads", lambda: world.leader() not in others, HANDED_OVER_S)
            led = now()
        assert first.process.wait(120) == 1, "it ends by itself"
        apply_all(world, [session(f"{each}b") for each in names])
        every = [*names, *(f"{each}b" for each in names)]
        wait_served(world, every, between=lambda: revive(world, api_server_url=other.url))
        assert [each.line for each in writes_of(world.proxy, since=led)] == []
        assert writes_of(other, since=led)
        world.stop_operators()


@contextmanager
def hung(operator: Process) -> Iterator[None]:
    """Stopped while it works, at a moment when its loop waits.

    Between a look at the clock and the bytes that are sent on the strength of it no process can know that it hung.
    """
    eventually("its loop waits", lambda: _stopped_in_its_loop(operator), 120, 0.01)
    try:
        yield
    finally:
        operator.process.send_signal(signal.SIGCONT)


EPOLL_WAIT, EPOLL_PWAIT = 232, 281


def _stopped_in_its_loop(operator: Process) -> bool:
    """Stop it; let it go on if something is ready to run, or runs."""
    place = Path(f"/proc/{operator.process.pid}")
    operator.process.send_signal(signal.SIGSTOP)
    eventually("it is stopped", lambda: _state(place) == "T", 60, 0.001)
    call = (place / "syscall").read_text().split()
    if int(call[0]) in (EPOLL_WAIT, EPOLL_PWAIT) and int(call[4], 16) & 0xFFFF_FFFF:
        return True
    operator.process.send_signal(signal.SIGCONT)
    return False


def _state(place: Path) -> str:
    return (place / "stat").read_text().rpartition(") ")[2][0]


def writes_of(proxy: ApiProxy, since: float = 0.0) -> list[Seen]:
    """But for the Lease, which two may try to take, and for questions."""
    return [
        each
        for each in proxy.requests()
        if each.came >= since
        and each.writes
        and "/leases" not in each.line
        and "accessreviews" not in each.line
    ]


# --- what the API server stands on ---------------------------------------------------------------


@pytest.mark.parametrize("component", ["kube-apiserver", "etcd"])
def test_a_killed_api_server_delays_and_breaks_nothing(
    world: OperatorWorld, component: str
) -> None:
    """Killed while twenty sessions start: all serve within 60 s after the API answers again."""
    names = [f"{component[-4:]}{number}" for number in range(20)]
    mark = world.cluster.audit_mark()
    apply_all(world, [session(each) for each in names])
    eventually("some pods are there", world.pods, 60, 0.05)
    world.cluster.kill(component)
    eventually("the API answers", lambda: can_list(world), 60)
    wait_served(world, names, AGAIN_S, between=lambda: revive(world))
    made = pods_made(world, mark)
    assert not {name: count for name, count in made.items() if count > 1}
    assert len(world.pods()) == 20


def can_list(world: OperatorWorld) -> bool:
    """It answers, and so does what it stands on."""
    try:
        world.cluster.objects("trainingsessions", NAMESPACE)
    except AWAY:
        return False
    return True


def test_g4_an_api_server_that_hangs_is_no_reason_to_be_restarted(world: OperatorWorld) -> None:
    """G4, its other half: the process is well as long as it is the API server that is silent."""
    [operator] = world.operators
    answers = []
    world.cluster.freeze("kube-apiserver")
    try:
        for _ in range(5):
            answers.append(operator.ask("/healthz")[0])
            time.sleep(1)  # nothing tells of a probe that does not fail
    finally:
        world.cluster.thaw("kube-apiserver")
    assert {status for status in answers if status} == {200}
    eventually("the API answers", lambda: can_list(world), 60)
    apply_all(world, [session("thawed")])
    # It may end, rightly, for want of a renewed Lease.
    wait_served(world, ["thawed"], AGAIN_S, between=lambda: revive(world))


# --- a node that is silent -----------------------------------------------------------------------


def test_a_silent_node_is_fenced_by_the_number_of_the_attempt(world: OperatorWorld) -> None:
    """Two nodes. The old pod may still run where nobody hears of it: the next attempt does not wait for it."""
    apply_all(world, [session("fenced")])
    wait_served(world, ["fenced"])
    [old] = world.pods("fenced")
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
    rate, saved_up = 20.0, 20
    world.start_operator(**{**OPERATOR, "qps": f"{rate:g}", "burst": f"{saved_up}"})
    try:
        names = [f"burst{number}" for number in range(25)]
        began = now()
        apply_all(world, [session(each) for each in names])
        wait_served(world, names, 120)
    finally:
        world.stop_operators()
    mine = sorted(
        each.came
        for each in world.proxy.requests(since=began)
        if "watch=true" not in each.line
        and "/leases" not in each.line
        and "/events" not in each.line
    )
    # The last ones wait for pods, not for their turn.
    busy = mine[: len(mine) * 3 // 4]
    took_s = busy[-1] - busy[0]
    slack = 1.2 * crowding()  # a request that waits for a processor goes out late
    assert rate / slack < (len(busy) - saved_up) / took_s < rate * slack


def test_g60_pods_of_others_cost_no_memory(world: OperatorWorld) -> None:
    """G60: a cache of all pods of the cluster. 400 pods of 100 kB stand for the 10 000 small ones."""
    before = memory_of_one_session(world, "before")
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
        assert memory_of_one_session(world, "small") - before < 10e6
    finally:
        world.cluster.kubectl(
            "delete", "pods", "--all", "--namespace=crowd", "--grace-period=0", "--force",
            "--wait=false", timeout=120,
        )  # fmt: skip


def memory_of_one_session(world: OperatorWorld, name: str) -> int:
    """Bytes of a new operator that looks after one session."""
    clear(world)
    world.stop_operators()
    operator = world.start_operator(**OPERATOR)
    apply_all(world, [session(name)])
    wait_served(world, [name])
    assert operator.alive
    return operator.rss_bytes
