"""What the pods of a session can see and reach, on a real node with its policies enforced."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from gristmill_testing.chart import NAMESPACE
from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.cluster_pods import connections, pod
from gristmill_testing.node_models import base_model, environment, place_model, share_model
from gristmill_testing.operator_world import session, tenant
from gristmill_testing.release import install, pods, remove_everything, service_ip
from gristmill_testing.tiny_models import build_tiny_llama

OURS, THEIRS = "gm-acme", "gm-beta"
INTERNET = ("203.0.113.10", 80)
METADATA = ("169.254.169.254", 80)
API_SERVICE, API_NODE, KUBELET = ("10.96.0.1", 443), ("172.30.0.2", 6443), ("172.30.0.2", 10250)
DNS = ("10.96.0.10", 53)
METER = 8470


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A running session of two ranks, and a pod of another tenant."""

    cluster: Cluster
    leader: str
    follower: str
    leader_ip: str
    stranger_ip: str
    ledger: tuple[str, int]

    def reach(self, namespace: str, name: str, *targets: tuple[str, int]) -> list[str]:
        found = connections(self.cluster, namespace, name, *targets)
        return [found[f"{host}:{port}"] for host, port in targets]


@pytest.fixture(scope="module")
def pair(node_cluster: Cluster) -> Iterator[Pair]:
    cluster = node_cluster
    remove_everything(cluster)
    folder = place_model(cluster, "tiny", build_tiny_llama)
    install(
        cluster,
        {
            "sessions.environment": environment("tiny"),
            "operator.replicas": 1,
            "gateway.replicas": 1,
            # Nobody tells it where the API server is: what the operator sees must do.
            "networkPolicy.apiServer.cidrs": ["0.0.0.0/0"],
        },
    )
    cluster.apply(tenant("acme", network={"egressCIDRs": ["0.0.0.0/0"]}), tenant("beta"))
    for name in ("acme", "beta"):
        cluster.wait_condition("tenant", name, "Ready")
    claim = share_model(cluster, OURS, folder)
    small = [{"name": "default", "resources": {"cpu": "300m", "memory": "1Gi"}}]
    cluster.apply(base_model(cluster, "tiny", claim, profiles=small))
    cluster.wait_condition("basemodel", "tiny", "Ready")
    cluster.apply(session("pair", OURS, workers=2))
    cluster.apply(pod("stranger", "-c", "import time; time.sleep(3600)"), namespace=THEIRS)
    cluster.wait_condition("pod", "stranger", "Ready", THEIRS)
    for rank in (0, 1):
        eventually(
            f"rank {rank} runs",
            lambda rank=rank: runs(cluster.find("pod", f"pair-a1-{rank}", OURS)),  # type: ignore[misc]
            120,
        )
    yield Pair(
        cluster=cluster,
        leader="pair-a1-0",
        follower="pair-a1-1",
        leader_ip=cluster.pod_ip(OURS, "pair-a1-0"),
        stranger_ip=cluster.pod_ip(THEIRS, "stranger"),
        ledger=(service_ip(cluster, "ledger"), 8460),
    )
    remove_everything(cluster)


def runs(found: dict[str, Any] | None) -> bool:
    """All of its containers run."""
    status = (found or {}).get("status", {})
    states = [
        each["state"]
        for group in ("initContainerStatuses", "containerStatuses")
        for each in status.get(group, [])
    ]
    return bool(states) and all("running" in state for state in states)


LOOK = """
import json, os
def listed(path):
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        return type(error).__name__
def written(path):
    try:
        open(path, "w").close()
        return "written"
    except OSError as error:
        return type(error).__name__
print(json.dumps({
    "ids": [os.getuid(), os.getgid()],
    "state": listed("/var/lib/gristmill"),
    "told": listed("/etc/gristmill"),
    "token": listed("/var/run/secrets/kubernetes.io"),
    "root": written("/x"),
    "weights": written("/models/tiny/x"),
    "services": [name for name in os.environ if name.endswith("_SERVICE_HOST") and "KUBERNETES" not in name],
}))
"""


def look(pair: Pair, name: str, container: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        pair.cluster.pod_exec(OURS, name, "python", "-c", LOOK, container=container)
    )
    return found


def test_the_worker_sees_its_own_state_and_nothing_of_the_meters(pair: Pair) -> None:
    """It cannot edit its own bill, nor speak for the meter."""
    seen = look(pair, pair.leader, "worker")
    assert seen["ids"] == [10002, 10000]
    assert seen["state"] == ["artifacts", "worker"]
    assert seen["told"] == "FileNotFoundError"
    assert seen["token"] == "FileNotFoundError"
    assert (seen["root"], seen["weights"]) == ("OSError", "OSError")
    assert seen["services"] == []


def test_the_meter_has_the_log_and_its_secrets(pair: Pair) -> None:
    seen = look(pair, pair.leader, "meter")
    assert seen["ids"] == [10001, 10000]
    assert seen["state"] == ["artifacts", "meter"]
    assert seen["told"] == ["assignments", "producer"]
    assert seen["token"] == "FileNotFoundError"


def test_what_a_session_needs_is_reached(pair: Pair) -> None:
    assert pair.reach(OURS, pair.leader, pair.ledger, DNS, INTERNET) == ["open"] * 3
    gateway = pods(pair.cluster, "gateway")[0]["metadata"]["name"]
    assert pair.reach(NAMESPACE, gateway, (pair.leader_ip, METER)) == ["open"]
    # Between ranks every port passes; nobody listens on this one.
    assert pair.reach(OURS, pair.follower, (pair.leader_ip, 12345)) == ["refused"]


FORBIDDEN = ("API server's service", "API server", "kubelet", "metadata", "another tenant")


def test_nothing_else_is_reached_until_the_policies_are_gone(pair: Pair) -> None:
    """The same packets arrive without the policies, so that this can fail."""
    cluster = pair.cluster
    targets = (API_SERVICE, API_NODE, KUBELET, METADATA, (pair.stranger_ip, 12345))
    closed = dict(zip(FORBIDDEN, pair.reach(OURS, pair.leader, *targets), strict=True))
    assert set(closed.values()) == {"dropped"}, closed
    assert pair.reach(OURS, pair.follower, pair.ledger) == ["dropped"]
    from_theirs = (pair.leader_ip, METER), INTERNET, pair.ledger
    assert pair.reach(THEIRS, "stranger", *from_theirs) == ["dropped"] * 3

    for namespace in (OURS, THEIRS):
        cluster.kubectl("delete", "networkpolicies", "--all", f"--namespace={namespace}")
    eventually(
        "the policies are gone from the node",
        lambda: pair.reach(THEIRS, "stranger", (pair.leader_ip, METER)) == ["open"],
    )
    opened = dict(zip(FORBIDDEN, pair.reach(OURS, pair.leader, *targets), strict=True))
    assert "dropped" not in opened.values(), opened
