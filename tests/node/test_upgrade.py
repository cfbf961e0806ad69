"""`helm upgrade` from an earlier chart under a session that trains: it notices nothing, new ones are new."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.node_clients import attach, attempts, pod_uids, sdk_variables
from gristmill_testing.node_lab import LAB_VALUES, PLACE, TINY, Lab, open_lab
from gristmill_testing.node_trainer import training
from gristmill_testing.older_chart import (
    MARK,
    NEW_FIELD,
    PARTS,
    TAG,
    TMP_SIZE,
    TMP_SIZE_NOW,
    VERSION,
    older_chart,
    older_images,
)
from gristmill_testing.release import install, pods, remove_everything

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OLD, NEW = "of-old", "of-new"


@pytest.fixture(scope="module")
def lab(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The earlier release."""
    remove_everything(node_cluster)
    folder = tmp_path_factory.mktemp("lab")
    # Definitions outlive an uninstall; helm takes those of the present chart back to the older ones.
    lab = open_lab(
        node_cluster, folder, older_images(node_cluster), chart=older_chart(folder)
    )  # fmt: skip
    with sdk_variables(lab):
        yield lab
    install(node_cluster, LAB_VALUES)
    remove_everything(node_cluster)


def test_an_upgrade_leaves_a_running_session_alone_and_new_ones_are_new(
    lab: Lab, tmp_path: Path
) -> None:
    refused = lab.cluster.try_apply(manifest(NEW))
    assert NEW_FIELD in refused.err, refused
    client = attach(lab, OLD)
    with training(client) as trainer:
        before = pod_uids(lab, OLD)
        assert made_with(lab, OLD) == (f"gristmill.test/gristmill-meter:{TAG}", TMP_SIZE)
        install(lab.cluster, LAB_VALUES)
        expect_no_pod_of_the_older_release(lab)
        trainer.wait_steps(3)
        assert pod_uids(lab, OLD) == before
        assert made_with(lab, OLD) == (f"gristmill.test/gristmill-meter:{TAG}", TMP_SIZE)
        assert attempts(lab, OLD) == (1, 0)
        restart(lab)
        trainer.wait_steps(3)
        trainer.stop()
    assert made_with(lab, OLD) == (lab.cluster.image("meter"), TMP_SIZE_NOW)
    assert attempts(lab, OLD) == (2, 0)
    lab.expect_tokens(OLD, {"train": trainer.tokens})
    client.stop()
    lab.wait_state(OLD, "Stopped")
    expect_new(lab)


def restart(lab: Lab) -> None:
    """The user moves the session onto the present images; it ends at a snapshot and goes on."""
    mark = "gristmill.dev/restart=now"
    lab.cluster.kubectl("annotate", "trainingsession", OLD, f"-n{PLACE}", mark)
    eventually("the second attempt serves", lambda: attempts(lab, OLD)[0] == 2, 120)
    lab.cluster.wait_condition(
        "trainingsession", OLD, "PodsReady", PLACE, seconds=180
    )  # of the new attempt: the old one's ended with it


def expect_new(lab: Lab) -> None:
    """A session made after the upgrade has the new defaults, the new image and the new field."""
    lab.cluster.apply(manifest(NEW))
    assert lab.session(NEW)["spec"][NEW_FIELD] == 1
    lab.wait_state(NEW, "Running")
    assert made_with(lab, NEW) == (lab.cluster.image("meter"), TMP_SIZE_NOW)
    lab.cluster.kubectl("patch", "trainingsession", NEW, f"-n{PLACE}", "--type=merge",
                        "-p", '{"spec": {"desiredState": "Stopped"}}')  # fmt: skip
    lab.cluster.wait_gone("trainingsession", NEW, PLACE, seconds=120)  # it is served


def manifest(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "gristmill.dev/v1alpha1", "kind": "TrainingSession",
        "metadata": {"name": name, "namespace": PLACE},
        "spec": {"baseModelRef": {"name": TINY}, "lora": {"rank": 8, "alpha": 16}, "storage": {"size": "1Gi"},
                 NEW_FIELD: 1},
    }  # fmt: skip


def made_with(lab: Lab, name: str) -> tuple[str, str]:
    """Image of the meter and size of /tmp, of the session's pod."""
    [pod] = lab.pods(name)
    [meter] = pod["spec"]["initContainers"]
    tmp = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "tmp")
    return meter["image"], tmp["emptyDir"]["sizeLimit"]


def expect_no_pod_of_the_older_release(lab: Lab) -> None:
    for part in PARTS[:3]:
        for pod in pods(lab.cluster, part):
            if "deletionTimestamp" not in pod["metadata"]:
                assert pod["metadata"]["annotations"].get(MARK) != VERSION, pod["metadata"]["name"]
                assert pod["spec"]["containers"][0]["image"] == lab.cluster.image(part)
