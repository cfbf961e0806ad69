"""Start, stop and the traces that are left: none. Each test has a cluster of its own, at the control level where that is enough."""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill_testing.cluster import Cluster, KubectlError, crowding, eventually, must
from gristmill_testing.cluster_pods import pod

START_S = 60.0
"""From nothing to an API, or a Ready node, and our images on it."""


@pytest.fixture
def folder(node_cluster: Cluster) -> Iterator[Path]:
    """Where a cluster of the test's own may be, beside the session's; it is taken down at the end."""
    name = Path(f"/var/tmp/gml-{os.getpid()}")
    yield name
    Cluster(name).control("down")


def up(folder: Path, level: str) -> Cluster:
    cluster = Cluster(folder)
    cluster.control("up", "--level", level, timeout=300)
    return cluster


def traces(folder: Path) -> dict[str, set[str]]:
    """What this cluster could leave on the machine, by kind; other clusters may come and go meanwhile."""
    rules = must(["iptables-save"]).splitlines()
    name = "gristmill-" + hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return {
        "processes": set(map(str, family(folder))),
        "mounts": {
            line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()
        },
        "interfaces": {
            line.split(":")[1].strip() for line in must(["ip", "-o", "link"]).splitlines()
        },
        "rules": {line for line in rules if not line.startswith(("#", ":"))},
        "cgroups": {str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{name}")},
        "folders": {str(folder)} & {str(path) for path in folder.parent.iterdir()},
    }


def new_traces(folder: Path, before: dict[str, set[str]]) -> dict[str, set[str]]:
    return {kind: new for kind, found in traces(folder).items() if (new := found - before[kind])}


def networks() -> set[str]:
    """The network namespaces that some process is in."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))
    return found


def family(folder: Path) -> list[int]:
    """Every process that was started with the cluster's folder in its environment, or in a pod below it."""
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if marked(path, folder)
    ]


def marked(environ: Path, folder: Path) -> bool:
    try:
        mine = f"GRISTMILL_CLUSTER_DIR={folder}\0".encode() in environ.read_bytes()
        return mine or str(folder) in (environ.parent / "mountinfo").read_text()
    except OSError:  # it has just ended
        return False


@pytest.mark.parametrize("level", ["control", "node"])
def test_down_leaves_nothing(folder: Path, level: str) -> None:
    before = traces(folder)
    assert before["processes"] == before["cgroups"] == set()
    begin = time.monotonic()
    cluster = up(folder, level)
    seconds = time.monotonic() - begin
    print(f"up --level {level}: {seconds:.1f} s")
    assert seconds < START_S * crowding()
    network = os.readlink(cluster.network)
    if level == "node":
        cluster.apply(pod("p", "-c", "import time; time.sleep(3600)"), namespace="default")
        cluster.wait_condition("pod", "p", "Ready", "default")
    during = traces(folder)
    assert len(during["processes"]) >= 5
    assert during["cgroups"]
    cluster.control("down")
    assert new_traces(folder, before) == {}
    assert network not in networks()


def test_down_works_after_process_1_was_killed(folder: Path) -> None:
    before = traces(folder)
    cluster = up(folder, "control")
    os.kill(int((folder / "init.pid").read_text().split()[0]), 9)
    eventually("the cluster is gone", lambda: not cluster.network.exists())
    cluster.control("down")
    assert new_traces(folder, before) == {}


def test_down_leaves_a_folder_alone_that_is_no_cluster(folder: Path) -> None:
    folder.mkdir()
    (folder / "precious").touch()
    with pytest.raises(KubectlError, match="is not the state folder of a cluster"):
        Cluster(folder).control("down")
    assert (folder / "precious").exists()
    (folder / "precious").unlink()


def test_two_clusters_do_not_know_of_one_another(node_cluster: Cluster, folder: Path) -> None:
    other = up(folder, "control")
    other.kubectl("create", "namespace", "only-there")
    assert node_cluster.find("namespace", "only-there") is None
    other.control("down")
    node_cluster.wait_api()


def test_a_folder_too_long_for_sockets_is_refused(node_cluster: Cluster, tmp_path: Path) -> None:
    far = tmp_path / ("x" * 60)
    with pytest.raises(KubectlError, match="longer than 60 bytes"):
        Cluster(far).control("up", "--level", "control")
