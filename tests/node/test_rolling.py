"""Rolling updates of our own parts while the SDK trains: no error, no new pod, no token twice."""

import time
from collections.abc import Iterator

import pytest

from gristmill_testing.chart import NAMESPACE
from gristmill_testing.cluster import Cluster
from gristmill_testing.node_clients import attach, attempts, pod_uids, standing_lab
from gristmill_testing.node_lab import Lab
from gristmill_testing.node_trainer import training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PARTS = ("gateway", "operator", "ledger")
NAME = "rolled"
ROLLOUT_S = 180


@pytest.fixture(scope="module")
def lab(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with standing_lab(node_cluster, tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def test_the_parts_are_rolled_one_after_another_and_the_client_sees_no_error(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    client = attach(lab, NAME)
    table = []
    with training(client) as trainer:
        before = pod_uids(lab, NAME)
        for part in PARTS:
            began = time.monotonic()
            roll(lab, part)
            took = time.monotonic() - began
            trainer.wait_steps(2)
            table.append(f"{part:10} {took:8.1f} s {trainer.longest_pause(began):8.1f} s")
        trainer.stop()
    with capsys.disabled():
        print("\nrolled      rollout   longest pause between results\n" + "\n".join(table))
    assert pod_uids(lab, NAME) == before != []
    assert attempts(lab, NAME) == (1, 0)
    lab.expect_tokens(NAME, {"train": trainer.tokens})
    client.stop()
    lab.wait_state(NAME, "Stopped")


def roll(lab: Lab, part: str) -> None:
    """`kubectl rollout restart`, until the new pods serve alone."""
    deployment = f"deployment/gristmill-{part}"
    lab.cluster.kubectl("rollout", "restart", deployment, f"-n{NAMESPACE}")
    lab.cluster.kubectl(
        "rollout", "status", deployment, f"-n{NAMESPACE}", f"--timeout={ROLLOUT_S}s",
        timeout=ROLLOUT_S + 30,
    )  # fmt: skip
