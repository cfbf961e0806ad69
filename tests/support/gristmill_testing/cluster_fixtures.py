"""Fixtures over the test cluster, for every test folder.

`control_cluster` has an API server, controllers and a scheduler; `node_cluster` a node as well. A session
uses the cluster that $GRISTMILL_CLUSTER_DIR names if it is of that level, else it starts one of its own and
takes it down at the end. Either way the test process is in the cluster's network: plain clients work.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill_testing.cluster import PROGRAM, UP_S, Cluster, Level

FIXTURES: dict[str, Level] = {"control_cluster": "control", "node_cluster": "node"}
REQUIRED = "GRISTMILL_CLUSTER_REQUIRED"
FAILURE_LINES_MAX = 40
TEST_S = 900
"""For a test that names no limit: a whole Kubernetes on a crowded machine takes its time."""


def why_not() -> str | None:
    """Why no cluster can be started here; None where one can."""
    if os.geteuid() != 0:
        return "the test cluster needs root: run `sudo make test-cluster`"
    refused = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    if refused.returncode:
        return f"the test cluster needs network namespaces: {refused.stderr.decode().strip()}"
    if not programs_are_built():
        return "the test cluster is not built: run `make cluster-build`"
    return None


def refuse_without_cluster() -> None:
    """Skip the test with the one reason, or fail it where clusters are required, as in CI."""
    reason = why_not()
    if reason is not None:
        refuse = pytest.fail if os.environ.get(REQUIRED) else pytest.skip
        refuse(reason)


def programs_are_built() -> bool:
    check = [sys.executable, str(PROGRAM), "is-built"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


def running(folder: Path) -> Cluster | None:
    """The cluster in this folder, if it is up."""
    ready = (folder / "ready").exists() and (folder / "init.pid").exists()
    return Cluster(folder) if ready and Cluster(folder).network.exists() else None


def _cluster(level: Level) -> Iterator[Cluster]:
    named = os.environ.get("GRISTMILL_CLUSTER_DIR")
    found = running(Path(named)) if named else None
    if found is not None and found.level == level:
        found.enter()
        yield found
        return
    refuse_without_cluster()
    with tempfile.TemporaryDirectory(prefix="gmc-", dir="/var/tmp") as parent:
        cluster = Cluster(Path(parent) / "c")
        try:
            cluster.control("up", "--level", level, timeout=UP_S)
            cluster.enter()
            yield cluster
        finally:
            cluster.control("down")


@pytest.fixture(scope="session")
def control_cluster() -> Iterator[Cluster]:
    """API server, controllers and scheduler, without a node; `start_fake_nodes` gives it some."""
    yield from _cluster("control")


@pytest.fixture(scope="session")
def node_cluster() -> Iterator[Cluster]:
    """A whole cluster with one real node."""
    yield from _cluster("node")


def cluster_of(request: pytest.FixtureRequest) -> Cluster:
    names = [name for name in FIXTURES if name in request.fixturenames]
    if len(names) != 1:
        raise pytest.UsageError(
            f"{request.node.nodeid}: name one of {', '.join(FIXTURES)} beside `namespace`"
        )
    cluster: Cluster = request.getfixturevalue(names[0])
    return cluster


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own, in the cluster whose fixture it names; its end is not waited for."""
    cluster = cluster_of(request)
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.delete("namespace", name)


def levels_of(item: pytest.Item) -> set[Level]:
    names = getattr(item, "fixturenames", ())
    return {level for fixture, level in FIXTURES.items() if fixture in names}


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that name a cluster; deselect those of another level than the one that was named.

    Tests of one level stay together: the process is in the network of one cluster at a time.
    """
    for item in items:
        if levels_of(item):
            item.add_marker("cluster")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_S))
    named = os.environ.get("GRISTMILL_CLUSTER_DIR")
    found = running(Path(named)) if named else None
    if found is not None:
        others = [item for item in items if levels_of(item) - {found.level}]
        if others:
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if item not in others]
    items.sort(key=lambda item: ("node" in levels_of(item)) * 2 + ("control" in levels_of(item)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the cluster's last events to the report of a test that failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when != "call" or not report.failed:
        return
    for name in FIXTURES:
        cluster = getattr(item, "funcargs", {}).get(name)
        if isinstance(cluster, Cluster):
            answer = cluster.try_kubectl("get", "events", "-A", "--sort-by=.lastTimestamp")
            lines = (answer.out or answer.err).splitlines()[-FAILURE_LINES_MAX:]
            report.sections.append((f"events of the cluster in {cluster.folder}", "\n".join(lines)))
