"""kill -9 of any component: it comes back, and the pods that ran run on."""

import pytest

from gristmill_testing.cluster import NODE, Cluster, Json, eventually
from gristmill_testing.cluster_pods import connections, ended, hardened, pod

SLEEP = ("-c", "import time; time.sleep(3600)")
OUTSIDE = ("203.0.113.10", 80)
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "containerd", "kubelet",
              "kube-proxy", "netpol", "provisioner", "gpuplugin")  # fmt: skip


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_killed_component_comes_back_and_pods_run_on(
    node_cluster: Cluster, namespace: str, component: str
) -> None:
    node_cluster.apply(pod("before", *SLEEP), namespace=namespace)
    before = node_cluster.wait_condition("pod", "before", "Ready", namespace)
    node_cluster.kill(component)
    node_cluster.wait_api()
    eventually("a command in the pod", lambda: node_cluster.try_kubectl(
        "exec", f"-n{namespace}", "before", "--", "true").code == 0)  # fmt: skip
    node_cluster.wait_condition("node", NODE, "Ready")
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}

    def offered() -> bool:
        return node_cluster.get("node", NODE)["status"]["allocatable"].get("nvidia.com/gpu") == "8"

    eventually("the GPUs are offered again", offered)
    node_cluster.apply(pod("after", "-c", "print('ran')", container=gpus), namespace=namespace)
    assert ended(node_cluster, namespace, "after").strip() == "ran"
    now = node_cluster.get("pod", "before", namespace)
    assert now["metadata"]["uid"] == before["metadata"]["uid"]
    assert now["status"]["containerStatuses"][0]["restartCount"] == 0
    eventually("the network works", lambda: connections(
        node_cluster, namespace, "before", OUTSIDE) == {"203.0.113.10:80": "open"})  # fmt: skip


def test_a_killed_container_ends_its_pod_and_a_killed_sidecar_is_started_again(
    node_cluster: Cluster, namespace: str
) -> None:
    sidecar = hardened("sidecar", *SLEEP, restartPolicy="Always")
    node_cluster.apply(pod("p", *SLEEP, initContainers=[sidecar]), namespace=namespace)
    node_cluster.wait_condition("pod", "p", "Ready", namespace)

    def status() -> Json:
        found: Json = node_cluster.get("pod", "p", namespace)["status"]
        return found

    node_cluster.kill_container(namespace, "p", "sidecar")
    eventually(
        "the sidecar is back", lambda: status()["initContainerStatuses"][0]["restartCount"] == 1
    )
    assert status()["phase"] == "Running"
    node_cluster.kill_container(namespace, "p", "c")
    eventually("the pod has failed", lambda: status()["phase"] == "Failed")
    assert status()["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137


def test_a_node_without_kubelet_is_lost_and_its_containers_run_on(
    node_cluster: Cluster, namespace: str
) -> None:
    """What a fence must not trust: the object of a pod can be gone while its container runs."""
    node_cluster.apply(pod("p", *SLEEP), namespace=namespace)
    node_cluster.wait_condition("pod", "p", "Ready", namespace)
    found = node_cluster.find("pod", "p", namespace)
    assert found is not None
    (container,) = found["status"]["containerStatuses"]
    task = container["containerID"].removeprefix("containerd://")

    def runs() -> bool:
        tasks = node_cluster.control("ctr", "tasks", "list").splitlines()
        return any(task in line and "RUNNING" in line for line in tasks)

    assert runs()
    node_cluster.stop("kubelet")
    try:
        node_cluster.wait_condition("node", NODE, "Ready", status="Unknown", seconds=40)
        node_cluster.kubectl("delete", "pod", "p", f"-n{namespace}", "--force", "--grace-period=0")
        assert node_cluster.find("pod", "p", namespace) is None
        assert runs()
    finally:
        node_cluster.start("kubelet")
    node_cluster.wait_condition("node", NODE, "Ready")
    eventually("the container is ended", lambda: not runs())
