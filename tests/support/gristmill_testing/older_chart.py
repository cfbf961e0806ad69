"""A chart as an earlier release could have been: made from the present one, never stored.

It differs in its version, in a default, in a template and in the definition of TrainingSessions; which
images it installs is said by values. It fails when the present chart no longer has what it changes.
"""

import shutil
from pathlib import Path
from typing import Any, Final

import yaml

from gristmill_testing.chart import CHART
from gristmill_testing.cluster import Cluster

VERSION: Final = "0.0.9"
NEW_FIELD: Final = "ttlSecondsAfterFinished"
"""A field of TrainingSession.spec that the earlier definition lacks."""
TMP_SIZE: Final = "3Gi"
TMP_SIZE_NOW: Final = "4Gi"
MARK: Final = "gristmill.test/release"
TAG: Final = "older"
PARTS: Final = ("operator", "gateway", "ledger", "meter")


def older_chart(folder: Path) -> Path:
    chart = folder / "older"
    shutil.copytree(CHART, chart)
    replace(chart / "Chart.yaml", "version: 0.1.0\n", f"version: {VERSION}\n")
    replace(
        chart / "values.yaml", f"workerTmpSize: {TMP_SIZE_NOW}\n", f"workerTmpSize: {TMP_SIZE}\n"
    )
    replace(
        chart / "templates/_pod.tpl",
        "  kubectl.kubernetes.io/default-container: {{ index . 1 }}\n",
        f"  kubectl.kubernetes.io/default-container: {{{{ index . 1 }}}}\n  {MARK}: {VERSION}\n",
    )
    forget_field(chart / "files/crds/trainingsessions.yaml")
    return chart


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has {text.count(old)} times {old!r}"
    path.write_text(text.replace(old, new))


def forget_field(path: Path) -> None:
    definition = yaml.safe_load(path.read_text())
    for version in definition["spec"]["versions"]:
        del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][NEW_FIELD]
    text = yaml.safe_dump(definition, sort_keys=False)
    assert NEW_FIELD not in text, f"a rule of the definition names {NEW_FIELD}"
    path.write_text(text)


def older_images(cluster: Cluster) -> dict[str, Any]:
    """Values that install the same programs under other names, as images of another release are."""
    for part in PARTS:
        name = f"gristmill.test/gristmill-{part}"
        cluster.control("ctr", "images", "tag", "--force", f"{name}:dev", f"{name}:{TAG}")
    digests = {f"{part}.image.digest": "" for part in PARTS}
    return {**digests, **{f"{part}.image.tag": TAG for part in PARTS}}
