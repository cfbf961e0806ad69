"""What an upgrade of the chart brings, and what the operator says of rights that it lacks."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gristmill_testing.cluster import ROOT, Cluster, eventually
from gristmill_testing.operator_world import (
    IMAGE,
    SYSTEM,
    OperatorWorld,
    operator_world,
    reset,
    session,
)
from gristmill_testing.waiting_volumes import make_volumes

Json = dict[str, Any]
FIELD = "ttlSecondsAfterFinished"
"""Of a session's spec: the older chart lacks it."""


@pytest.fixture(scope="module")
def world(
    control_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorWorld]:
    folder: Path = tmp_path_factory.mktemp("chart")
    make_volumes(control_cluster, 20, "chart")
    with operator_world(control_cluster, folder) as made:
        made.start_operator()
        made.tenant()
        made.model(weights={"image": {"reference": IMAGE}})
        yield made
        reset(made)


def older_chart(folder: Path) -> Path:
    """The chart as it would be without one field of TrainingSession."""
    chart = folder / "gristmill"
    shutil.copytree(ROOT / "charts/gristmill", chart)
    (path,) = (chart / "files/crds").glob("*trainingsessions*")
    definition = yaml.safe_load(path.read_text())
    for version in definition["spec"]["versions"]:
        del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][FIELD]
    path.write_text(yaml.safe_dump(definition))
    return chart


def upgrade(world: OperatorWorld, chart: Path) -> None:
    world.cluster.helm(
        "upgrade", "gristmill", str(chart), f"--namespace={SYSTEM}", "--force-conflicts"
    )


def test_g54_an_upgrade_brings_new_fields_and_restarts_no_pod(
    world: OperatorWorld, tmp_path: Path
) -> None:
    """G54: `helm upgrade` that left the old resource definitions."""
    upgrade(world, older_chart(tmp_path))
    with_field = session("tidy", **{FIELD: 600})
    eventually("the field is unknown", lambda: FIELD in world.cluster.try_apply(with_field).err, 15)
    world.cluster.apply(session("old"))
    world.wait_state("old", "Running")
    before = world.pod_uids("old")
    upgrade(world, ROOT / "charts/gristmill")
    eventually("the field is served", lambda: world.cluster.try_apply(with_field).code == 0, 15)
    world.wait_state("tidy", "Running")
    assert world.session("tidy")["spec"][FIELD] == 600
    assert world.pod_uids("old") == before


def test_g56_a_verb_that_is_missing_is_named_at_the_start(world: OperatorWorld) -> None:
    """G56: rights that are short at run time. The shipped role without one rule, everything else as it is."""
    world.stop_operators()
    role = world.cluster.get("clusterrole", "gristmill-operator")
    rules = [each for each in role["rules"] if "nodes" not in each.get("resources", [])]
    others = [each for each in role["rules"] if "nodes" in each.get("resources", [])]
    assert others
    kept = [
        {**each, "resources": [name for name in each["resources"] if name != "nodes"]}
        for each in others
    ]
    patch = {"rules": rules + [each for each in kept if each["resources"]]}
    set_rules(world, patch)
    try:
        process = world.start_operator(ready=False)
        assert process.process.wait(120) == 3
        said = process.log.read_text()
        assert "list nodes in all namespaces" in said
        assert "list pods" not in said, "only what is missing is named"
    finally:
        set_rules(world, {"rules": role["rules"]})
        world.operators.clear()
    world.start_operator()


def set_rules(world: OperatorWorld, patch: Json) -> None:
    world.cluster.kubectl(
        "patch", "clusterrole", "gristmill-operator", "--type=merge", f"--patch={json.dumps(patch)}"
    )
