"""A node is drained under a session that trains."""

from collections.abc import Iterator

import pytest

from gristmill_testing.cluster import NODE, Cluster
from gristmill_testing.node_clients import attach, attempts, pod_uids, standing_lab
from gristmill_testing.node_lab import Lab
from gristmill_testing.node_trainer import training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DRAIN_S = 180


@pytest.fixture(scope="module")
def lab(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with standing_lab(node_cluster, tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def drain(lab: Lab, name: str) -> None:
    """`kubectl drain`, of this session's pods alone: the cluster has one node. It is left cordoned."""
    lab.cluster.kubectl(
        "drain", NODE, f"--pod-selector=gristmill.dev/session={name}", "--delete-emptydir-data",
        "--ignore-daemonsets", f"--timeout={DRAIN_S}s", timeout=DRAIN_S + 30,
    )  # fmt: skip


def uncordon(lab: Lab) -> None:
    lab.cluster.kubectl("uncordon", NODE)


def test_a_drained_node_makes_another_attempt_that_does_not_count_and_the_client_goes_on(
    lab: Lab,
) -> None:
    client = attach(lab, "drained")
    with training(client) as trainer:
        before = pod_uids(lab, "drained")
        try:
            drain(lab, "drained")
        finally:
            uncordon(lab)
        trainer.wait_steps(3)
        trainer.stop()
    assert not set(pod_uids(lab, "drained")) & set(before)
    status = lab.session("drained")["status"]
    assert attempts(lab, "drained") == (2, 0), status
    assert status["lastFailure"]["reason"] in ("Disrupted", "Evicted"), status["lastFailure"]
    lab.expect_tokens("drained", {"train": trainer.tokens})
    client.stop()
    lab.wait_state("drained", "Stopped")
