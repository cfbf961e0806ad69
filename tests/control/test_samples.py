"""The sample manifests are taken by a real API server, in the order that their README names."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gristmill_testing.cluster import Cluster
from gristmill_testing.definitions import install_definitions

SAMPLES = Path(__file__).parents[2] / "recipes/manifests"
FILES = sorted(SAMPLES.glob("*.yaml"))


@pytest.fixture(scope="module")
def definitions(control_cluster: Cluster) -> Iterator[None]:
    missing = install_definitions(control_cluster)
    yield
    for name in missing:
        control_cluster.delete("crd", name, wait=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_sample_is_applied_by_kubectl_alone(
    control_cluster: Cluster, namespace: str, definitions: None, file: Path
) -> None:
    """Client-side apply, as people type it: unknown fields are refused, and again changes nothing."""
    thing = yaml.safe_load(file.read_text())
    asked = (thing["kind"], thing["metadata"]["name"], namespace)
    generations = []
    for _ in range(2):
        control_cluster.kubectl("apply", "--validate=strict", f"-n{namespace}", "-f", str(file))
        generations.append(control_cluster.get(*asked)["metadata"]["generation"])
    assert generations == [1, 1]
    control_cluster.kubectl("delete", f"-n{namespace}", "-f", str(file))


def test_the_samples_fit_together() -> None:
    things = {file.stem: yaml.safe_load(file.read_text()) for file in FILES}
    tenant, model = things["tenant"]["spec"], things["model"]["metadata"]["name"]
    assert tenant["rateCardRef"]["name"] == things["ratecard"]["metadata"]["name"]
    for name in ("session", "session-multi-rank"):
        assert things[name]["spec"]["baseModelRef"]["name"] == model
    assert things["session-multi-rank"]["spec"]["workers"] == 2
    readme = (SAMPLES / "README.md").read_text()
    assert set(re.findall(r"[\w-]+\.yaml", readme)) == {file.name for file in FILES}
