"""What the official SDK needs in the test process to work with the chart on the node."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing.cluster import Cluster
from gristmill_testing.node_lab import TINY, Lab, open_lab
from gristmill_testing.raw_wire import ROLE_ARN, model_arn
from gristmill_testing.release import remove_everything

GROUP = "sdk-tests"
FOREIGN = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")
"""Variables that would lead the SDK to somebody's real account."""


@contextmanager
def sdk_variables(lab: Lab) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in FOREIGN:
            patch.delenv(name, raising=False)
        for name, value in lab.environment.items():
            patch.setenv(name, value)
        yield


@contextmanager
def standing_lab(cluster: Cluster, folder: Path) -> Iterator[Lab]:
    """The present chart on a cluster that has nothing of ours, and nothing again afterwards."""
    remove_everything(cluster)
    lab = open_lab(cluster, folder)
    with sdk_variables(lab):
        yield lab
    remove_everything(cluster)


def service_of(lab: Lab) -> sdk.ServiceClient:
    """With a package group, so that states can be saved."""
    registry = sdk.ServiceClient(role_arn=ROLE_ARN)._get_model_registry_client()
    group = registry.create_model_package_group(ModelPackageGroupName=GROUP)
    return sdk.ServiceClient(
        region=lab.environment["AWS_REGION"],
        role_arn=ROLE_ARN,
        model_package_group_arn=group["ModelPackageGroupArn"],
        s3_output_path="s3://sdk-tests/output",
    )


def attach(lab: Lab, name: str, model: str = TINY) -> sdk.TrainingClient:
    """A training client of the session, made by the SDK or found by its name."""
    arn = model_arn(lab.environment["AWS_REGION"], model)
    service = sdk.ServiceClient(role_arn=ROLE_ARN)
    return service.create_lora_training_client(arn, training_session_name=name, rank=8, alpha=16)


def pod_uids(lab: Lab, name: str) -> list[str]:
    return sorted(pod["metadata"]["uid"] for pod in lab.pods(name))


def attempts(lab: Lab, name: str) -> tuple[int, int]:
    """How many attempts the session had, and how many of its failures counted."""
    status = lab.session(name)["status"]
    return status["attempt"], status.get("restarts", 0)
