"""The node's network: names, services, and policies that drop what they do not allow."""

import json
import urllib.request
from collections.abc import Iterator

import pytest

from gristmill_testing.cluster import Cluster, Json, eventually
from gristmill_testing.cluster_pods import connections, pod

PORT = 8080
OUTSIDE, METADATA = ("203.0.113.10", 80), ("169.254.169.254", 80)
API_SERVICE, API_NODE, KUBELET = ("10.96.0.1", 443), ("172.30.0.2", 6443), ("172.30.0.2", 10250)
DNS_IP = "10.96.0.10"
QUERY = """
import json, socket, struct, sys
def query(name):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\\0" + struct.pack("!2H", 1, 1)
def address(answer):
    return socket.inet_ntoa(answer[-4:]) if answer[3] & 15 == 0 and answer[7] else f"rcode {answer[3] & 15}"
def udp(name):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2)
    s.sendto(query(name), (sys.argv[1], 53)); return address(s.recv(512))
def tcp(name):
    s = socket.create_connection((sys.argv[1], 53), 2); q = query(name)
    s.sendall(struct.pack("!H", len(q)) + q); f = s.makefile("rb")
    return address(f.read(struct.unpack("!H", f.read(2))[0]))
print(json.dumps([[udp(name), tcp(name)] for name in sys.argv[2:]]))
"""


def server(name: str, **labels: str) -> Json:
    """A pod that serves HTTP on PORT."""
    return pod(
        name, "-m", "http.server", str(PORT), "--directory", "/etc", labels={"app": name, **labels},
        container={"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1}},
    )  # fmt: skip


def policy(name: str, **spec: object) -> Json:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {"podSelector": {}, **spec},
    }


def service(name: str, cluster_ip: str | None = None) -> Json:
    spec: Json = {"selector": {"app": "server"}, "ports": [{"port": PORT}]}
    if cluster_ip:
        spec["clusterIP"] = cluster_ip
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def neighbour(node_cluster: Cluster, namespace: str) -> Iterator[str]:
    """Another namespace, with a pod `client`."""
    name = f"{namespace}-next"
    node_cluster.kubectl("create", "namespace", name)
    node_cluster.apply(server("client"), namespace=name)
    yield name
    node_cluster.delete("namespace", name)


@pytest.fixture
def pods(node_cluster: Cluster, namespace: str, neighbour: str) -> None:
    """`server` and `peer` in the test's namespace, all of them Ready: before that a policy does not know them."""
    node_cluster.apply(server("server"), server("peer"), service("server"), namespace=namespace)
    for place, name in ((namespace, "server"), (namespace, "peer"), (neighbour, "client")):
        node_cluster.wait_condition("pod", name, "Ready", place)


def test_names_are_answered_by_udp_and_tcp(
    node_cluster: Cluster, namespace: str, pods: None
) -> None:
    node_cluster.apply(service("headless", "None"), namespace=namespace)
    ip = node_cluster.pod_ip(namespace, "server")
    service_ip = node_cluster.get("service", "server", namespace)["spec"]["clusterIP"]
    suffix = f"{namespace}.svc.cluster.local"
    names = {f"server.{suffix}": service_ip, f"headless.{suffix}": ip, "outside.example.com": OUTSIDE[0],
             "nothing.invalid": "rcode 3"}  # fmt: skip

    def answers() -> dict[str, list[str]]:
        output = node_cluster.pod_exec(namespace, "peer", "python3", "-c", QUERY, DNS_IP, *names)
        return dict(zip(names, json.loads(output), strict=True))

    wanted = {name: [address, address] for name, address in names.items()}
    eventually("all names are answered", lambda: answers() == wanted, seconds=20)


def test_a_pod_reaches_a_service_and_the_world_sees_its_address(
    node_cluster: Cluster, namespace: str, pods: None
) -> None:
    code = (
        "import urllib.request as u, sys; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"
    )
    name = f"http://server.{namespace}.svc.cluster.local:{PORT}/passwd"

    def fetch(url: str) -> str:
        return node_cluster.pod_exec(namespace, "peer", "python3", "-c", code, url)

    assert "gristmill" in eventually("the service answers", lambda: fetch(name))
    assert (
        fetch(f"http://{OUTSIDE[0]}/").strip()
        == f"outside sees {node_cluster.pod_ip(namespace, 'peer')}"
    )
    ip = node_cluster.pod_ip(namespace, "server")
    with urllib.request.urlopen(
        f"http://{ip}:{PORT}/passwd", timeout=5
    ) as answer:  # the test is in the network
        assert b"gristmill" in answer.read()


def test_policies_drop_what_they_do_not_allow_and_nothing_once_they_are_gone(
    node_cluster: Cluster, namespace: str, neighbour: str, pods: None
) -> None:
    ip = {name: node_cluster.pod_ip(place, name)
          for name, place in (("server", namespace), ("peer", namespace), ("client", neighbour))}  # fmt: skip
    from_server = [(ip["client"], PORT), API_SERVICE, API_NODE, KUBELET, OUTSIDE, METADATA]

    def all_met(place: str, name: str, *targets: tuple[str, int]) -> set[str]:
        return set(connections(node_cluster, place, name, *targets).values())

    def to_server() -> dict[str, str]:
        return {
            name: connections(node_cluster, place, name, (ip["server"], PORT))[
                f"{ip['server']}:{PORT}"
            ]
            for name, place in (("peer", namespace), ("client", neighbour))
        }

    assert all_met(namespace, "server", *from_server) == {"open"}
    assert to_server() == {"peer": "open", "client": "open"}

    node_cluster.apply(policy("deny", policyTypes=["Ingress", "Egress"]), namespace=namespace)
    eventually("all is dropped", lambda: all_met(namespace, "server", *from_server) == {"dropped"})
    eventually("nobody comes in", lambda: to_server() == {"peer": "dropped", "client": "dropped"})

    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": neighbour}}}
    come = policy(
        "come", ingress=[{"from": [here], "ports": [{"port": PORT}]}], policyTypes=["Ingress"]
    )
    block = {"ipBlock": {"cidr": f"{OUTSIDE[0]}/32"}}
    go = policy("go", egress=[{"to": [block], "ports": [{"port": 80}]}], policyTypes=["Egress"])
    node_cluster.apply(come, go, namespace=namespace)
    eventually("one may come in", lambda: to_server() == {"peer": "dropped", "client": "open"})
    eventually("one way leads out", lambda: all_met(namespace, "server", OUTSIDE) == {"open"})
    others = [target for target in from_server if target != OUTSIDE]
    assert all_met(namespace, "server", *others) == {"dropped"}

    for name in ("deny", "come", "go"):
        node_cluster.delete("networkpolicy", name, namespace)
    eventually("all is open", lambda: all_met(namespace, "server", *from_server) == {"open"})


def test_without_the_policy_agent_no_pod_connects(
    node_cluster: Cluster, namespace: str, pods: None
) -> None:
    """The queue fails closed, so a test that sees a packet dropped by a policy could also see the agent gone."""
    ip = node_cluster.pod_ip(namespace, "server")
    node_cluster.stop("netpol")
    try:
        assert connections(node_cluster, namespace, "peer", (ip, PORT)) == {
            f"{ip}:{PORT}": "dropped"
        }
    finally:
        node_cluster.start("netpol")
    eventually(
        "the agent is back",
        lambda: "open" in connections(node_cluster, namespace, "peer", (ip, PORT)).values(),
    )
