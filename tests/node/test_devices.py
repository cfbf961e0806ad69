"""Sessions as users write them: one with a device of a real device plugin, and the samples as they are."""

from collections.abc import Iterator
from typing import Any

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.node_clients import attach, standing_lab
from gristmill_testing.node_lab import PLACE, PROFILES, SAMPLES, SMOL, TINY, Lab
from gristmill_testing.node_models import base_model
from gristmill_testing.raw_wire import ROLE_ARN, model_arn
from gristmill_testing.sdk_loop import TOKENS, batch, step

pytestmark = pytest.mark.timeout(600)

PER_STEP = sum(map(len, TOKENS))
GPU = "nvidia.com/gpu"
DEVICE = "on-a-device"
NAME = "with-a-device"
SHOWN = "import os; print(os.environ.get('GRISTMILL_FAKE_GPUS', ''))"


@pytest.fixture(scope="module")
def lab(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """With a profile that asks for a device, and the tiny weights under the samples' model as well."""
    with standing_lab(node_cluster, tmp_path_factory.mktemp("lab")) as lab:
        resources = {"cpu": "600m", "memory": "1500Mi"}
        small = {"name": "default", "resources": resources}
        device = {**small, "name": DEVICE, "device": {"resourceName": GPU, "count": 1}}
        claim = f"weights-{TINY}"
        lab.cluster.apply(
            base_model(lab.cluster, TINY, claim, profiles=[*PROFILES, device]),
            base_model(lab.cluster, SMOL, claim, profiles=[small]),
        )
        lab.cluster.wait_condition("basemodel", SMOL, "Ready")
        yield lab


def test_a_session_gets_the_device_that_its_profile_asks_for(lab: Lab) -> None:
    cluster = lab.cluster
    cluster.wait_condition("basemodel", TINY, "DevicesOffered")
    assert devices_used(lab) == "0"
    cluster.apply({
        "apiVersion": "gristmill.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {"name": NAME, "namespace": PLACE},
        "spec": {
            "baseModelRef": {"name": TINY, "profile": DEVICE},
            "lora": {"rank": 8, "alpha": 16},
            "storage": {"size": "1Gi"},
        },
    })  # fmt: skip
    lab.wait_state(NAME, "Running", seconds=300)
    client = attach(lab, NAME)
    step(client)
    [pod] = [pod["metadata"]["name"] for pod in lab.pods(NAME)]
    given = cluster.pod_exec(PLACE, pod, "python", "-c", SHOWN, container="worker").strip()
    assert given.startswith("gpu-"), given
    assert "," not in given
    assert cluster.pod_exec(PLACE, pod, "python", "-c", SHOWN, container="meter").strip() == ""
    assert devices_used(lab) == "1"
    expect_train(lab, NAME, PER_STEP)
    client.stop()
    lab.wait_state(NAME, "Stopped")
    eventually("the device is free again", lambda: devices_used(lab) == "0", 60)


def expect_train(lab: Lab, name: str, tokens: int) -> None:
    """The ledger's word, within seconds; the status may be a minute behind."""
    eventually(
        f"the ledger has {tokens} tokens of {name}",
        lambda: lab.ledger_tokens(name)["train"] == tokens, 60,
    )  # fmt: skip


def devices_used(lab: Lab) -> str | None:
    """By the tenant's quota, which counts what pods ask for."""
    for quota in lab.cluster.objects("resourcequotas", PLACE):
        used: dict[str, str] = (quota.get("status") or {}).get("used") or {}
        if f"requests.{GPU}" in used:
            return used[f"requests.{GPU}"]
    return None


@pytest.mark.parametrize(
    ("sample", "name", "ranks"),
    [("session.yaml", "first-run", 1), ("session-multi-rank.yaml", "two-ranks", 2)],
)
def test_a_sample_is_applied_as_it_is_and_the_sdk_trains_it(
    lab: Lab, sample: str, name: str, ranks: int
) -> None:
    lab.cluster.apply(SAMPLES / sample, namespace=PLACE)
    lab.wait_state(name, "Running", seconds=300)
    assert len(lab.pods(name)) == ranks
    client = sample_client(lab, name)
    client.forward_backward(batch()).result()
    client.optim_step(sdk.AdamParams(learning_rate=1e-2)).result()
    expect_train(lab, name, PER_STEP)
    client.stop()
    lab.wait_state(name, "Stopped")


def sample_client(lab: Lab, name: str) -> Any:
    """Attached with the adapter that the samples ask for."""
    arn = model_arn(lab.environment["AWS_REGION"], SMOL)
    return sdk.ServiceClient(role_arn=ROLE_ARN).create_lora_training_client(
        arn, training_session_name=name, rank=16, alpha=32
    )
