"""Fake GPUs by the real device-plugin protocol: counted, handed out, broken."""

from gristmill_testing.cluster import NODE, Cluster, Json, eventually
from gristmill_testing.cluster_pods import ended, pod

GPU = "nvidia.com/gpu"


def on_gpus(name: str, count: int) -> Json:
    code = "import os, time; print(os.environ['GRISTMILL_FAKE_GPUS'])"
    return pod(name, "-c", code, container={"resources": {"limits": {GPU: str(count)}}})


def allocatable(cluster: Cluster) -> str:
    count: str = cluster.get("node", NODE)["status"]["allocatable"].get(GPU, "0")
    return count


def test_a_pod_gets_the_devices_it_asks_for(node_cluster: Cluster, namespace: str) -> None:
    eventually("the node offers its GPUs", lambda: allocatable(node_cluster) == "8")
    node_cluster.apply(on_gpus("two", 2), namespace=namespace)
    devices = ended(node_cluster, namespace, "two").strip().split(",")
    assert len(set(devices)) == 2
    assert all(device.startswith("gpu-") for device in devices)


def test_more_than_the_node_has_is_unschedulable(node_cluster: Cluster, namespace: str) -> None:
    node_cluster.apply(on_gpus("nine", 9), namespace=namespace)
    found = node_cluster.wait_condition("pod", "nine", "PodScheduled", namespace, status="False")
    (condition,) = [c for c in found["status"]["conditions"] if c["type"] == "PodScheduled"]
    assert condition["reason"] == "Unschedulable"
    assert f"Insufficient {GPU}" in condition["message"]


def test_broken_devices_are_not_offered(node_cluster: Cluster) -> None:
    broken = node_cluster.folder / "broken-gpus"
    broken.write_text("gpu-0\ngpu-3\n")
    try:
        eventually("two are gone", lambda: allocatable(node_cluster) == "6")
    finally:
        broken.unlink()
    eventually("all are back", lambda: allocatable(node_cluster) == "8")
