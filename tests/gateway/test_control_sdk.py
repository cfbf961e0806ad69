"""The official SDK and botocore against the control plane: what their users call, as they call it."""

import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import msgspec
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from sagemaker.train.training_session import ServiceClient
from sagemaker.train.training_session.types import ModelPackageKind, SessionStatus

from gristmill_contracts.http import RegisterCheckpoint
from gristmill_contracts.session import TrainingSession
from gristmill_testing.control_app import SECRET, gateway_app, key_id
from gristmill_testing.control_plane import (
    ACCOUNT,
    REGION,
    ROLE,
    FakeContext,
    accept,
    checkpoint,
    create_body,
)
from gristmill_testing.faulty_proxy import faulty_proxy
from gristmill_testing.loopback_server import serve

PACKAGE_ARN = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:model-package/sagemaker-default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """A served control plane, its insides, and the folder of its artifacts."""

    url: str
    context: FakeContext
    artifacts: Path

    def save(self, number: int, **changes: Any) -> RegisterCheckpoint:
        """A checkpoint as worker and meter leave it: a folder with a file, and a row in the ledger."""
        message = checkpoint(number, group="sagemaker-default", **changes)
        folder = self.artifacts / message.path
        folder.mkdir(parents=True)
        (folder / "adapter.safetensors").write_bytes(b"weights")
        request = urllib.request.Request(
            f"{self.context.ledger_admin.url}/v1/checkpoints",
            data=msgspec.msgpack.encode(message),
            headers={"Content-Type": "application/msgpack"},
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            response.read()
        return message


@pytest.fixture(name="plane")
def plane_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """Served, planned for, and named by every variable that the SDK reads."""
    config = tmp_path / "sagemaker.yaml"
    config.write_text(
        "SchemaVersion: '1.0'\nSageMaker: {PythonSDK: {Modules: {Session: "
        f"{{DefaultS3Bucket: gristmill-{ACCOUNT}}}}}}}}}\n"
    )
    contexts: list[FakeContext] = []
    with serve(gateway_app(tmp_path, contexts)) as url, planning(contexts[0]):
        for name, value in {
            "SAGEMAKER_TRAINING_SESSION_ENDPOINT": url,
            "SAGEMAKER_TRAINING_SESSION_RUNTIME_ENDPOINT": url,
            "AWS_ENDPOINT_URL_SAGEMAKER": url,
            "AWS_ENDPOINT_URL_S3": url,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": key_id("acme"),
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
        }.items():
            monkeypatch.setenv(name, value)
        yield Plane(url=url, context=contexts[0], artifacts=tmp_path / "artifacts")


def planning(context: FakeContext) -> Any:
    """Plays the planner until the block ends: sessions become ready, and stopped when asked."""
    over = threading.Event()

    def plan() -> None:
        while not over.wait(0.02):
            for session in context.store.list(TrainingSession):
                wanted = session.spec.desired_state
                state = "Running" if wanted == "Running" else "Stopped"
                if session.status.state != state:
                    accept(
                        context.store,
                        session.metadata.name,
                        session.metadata.namespace,
                        state=state,
                    )

    thread = threading.Thread(target=plan, daemon=True)

    class Planning:
        def __enter__(self) -> None:
            thread.start()

        def __exit__(self, *_: object) -> None:
            over.set()
            thread.join(10)

    return Planning()


@pytest.fixture(name="service")
def service_fixture(plane: Plane) -> Any:
    return ServiceClient(region=REGION, role_arn=ROLE)


def raw(plane: Plane, retries: int = 0, url: str = "") -> Any:
    session = boto3.Session(
        aws_access_key_id=key_id("acme"), aws_secret_access_key=SECRET, region_name=REGION
    )
    config = Config(
        retries={"total_max_attempts": 1 + retries, "mode": "standard"}, read_timeout=40
    )
    return session.client("sagemaker", endpoint_url=url or plane.url, config=config)


# --- the SDK -------------------------------------------------------------------------------------


def test_a_client_made_with_nothing_but_a_model_id_is_running_at_once(
    plane: Plane, service: Any
) -> None:
    assert service.list_base_models() == ["Lab/Tiny"]
    client = service.create_lora_training_client("lab/tiny", rank=4, alpha=8)
    name = client.training_session_name
    detail = raw(plane).describe_training_session(TrainingSessionName=name)["TrainingSessionDetail"]
    assert detail["TrainingSessionStatus"] == "Running"
    assert detail["OutputConfig"]["S3Location"]["Path"] == f"s3://gristmill-{ACCOUNT}/{name}/output"
    assert detail["ModelPackageGroupArn"].endswith("model-package-group/sagemaker-default")
    assert detail["LoraConfig"] == {"Rank": 4, "Alpha": 8}
    assert (plane.artifacts / "acme" / f"gristmill-{ACCOUNT}").is_dir()
    client.stop()


def test_sessions_are_listed_stopped_and_deleted(plane: Plane, service: Any) -> None:
    for number in range(3):
        client = service.create_lora_training_client(
            create_body()["ModelConfig"]["BaseModelArn"], training_session_name=f"Run-{number}"
        )
        client.stop()
        client.stop()
    found = service.list_sessions(name_contains="Run", max_results=2)
    assert [each.training_session_name for each in found] == ["Run-2", "Run-1"]
    service.delete_session("Run-0", stop_if_active=True)
    service.delete_session(found[1].training_session_arn, stop_if_active=True)
    (left,) = service.list_sessions(status_equals=SessionStatus.STOPPED)
    assert left.training_session_name == "Run-2"


def test_model_packages_are_found_described_and_deleted_with_their_files(
    plane: Plane, service: Any
) -> None:
    group = raw(plane).create_model_package_group(ModelPackageGroupName="sagemaker-default")
    arn = group["ModelPackageGroupArn"]
    plane.save(1, kind="state")
    last = plane.save(2, kind="weights")
    found = service.list_model_packages(model_package_group_arn=arn)
    assert [each.version for each in found] == [2, 1]
    latest = service.get_latest_model_package(
        ModelPackageKind.CHECKPOINT, model_package_group_arn=arn
    )
    assert latest.version == 1
    deleted = service.delete_model_package(f"{PACKAGE_ARN}/2", delete_artifacts=True)
    assert deleted.model_package_deleted
    assert deleted.objects_deleted == 1
    assert deleted.s3_uri == f"s3://data/run-1/output/{last.id}/"
    assert not (plane.artifacts / last.path / "adapter.safetensors").exists()
    again = service.delete_model_package(f"{PACKAGE_ARN}/2", delete_artifacts=True)
    assert not again.model_package_deleted
    kept = service.delete_model_package(f"{PACKAGE_ARN}/1")
    assert kept.artifacts_retained
    assert kept.s3_uri.startswith("s3://data/run-1/output/")


def test_a_model_that_is_not_there_is_refused_with_those_that_are(service: Any) -> None:
    with pytest.raises(ValueError, match="Lab/Tiny"):
        service.create_lora_training_client("Lab/Other")


# --- botocore ------------------------------------------------------------------------------------


def test_every_error_has_the_name_that_the_service_models(plane: Plane) -> None:
    client = raw(plane)
    client.create_training_session(**create_body("run-1"))
    for call, parameters, code in (
        ("create_training_session", create_body("run-1"), "ResourceInUse"),
        ("create_training_session", create_body("x", LoraConfig={"Rank": 999, "Alpha": 1}), "ValidationException"),
        ("describe_training_session", {"TrainingSessionName": "none"}, "ResourceNotFound"),
        ("stop_training_session", {"TrainingSessionName": "none"}, "ResourceNotFound"),
        ("delete_training_session", {"TrainingSessionName": "run-1"}, "ValidationException"),
    ):  # fmt: skip
        with pytest.raises(ClientError) as caught:
            getattr(client, call)(**parameters)
        assert caught.value.response["Error"]["Code"] == code
        assert caught.value.response["Error"]["Message"]
    client.close()


def test_the_paginator_walks_all_sessions(plane: Plane) -> None:
    client = raw(plane)
    for number in range(5):
        client.create_training_session(**create_body(f"run-{number}"))
    pages = client.get_paginator("list_training_sessions").paginate(
        PaginationConfig={"PageSize": 2}
    )
    names = [
        each["TrainingSessionArn"].rpartition("-")[2]
        for page in pages
        for each in page["TrainingSessionSummaries"]
    ]
    assert names == ["4", "3", "2", "1", "0"]
    client.close()


def test_a_create_whose_answer_was_lost_is_sent_again_and_has_its_session(plane: Plane) -> None:
    with faulty_proxy(plane.url) as proxy:
        fault = proxy.lose_answer("^POST / ")
        client = raw(plane, retries=2, url=proxy.url)
        answer = client.create_training_session(**create_body("run-1"))
        assert fault.hits == 1
        assert answer["TrainingSessionArn"].endswith("/run-1")
        with pytest.raises(ClientError, match="ResourceInUse"):
            client.create_training_session(**create_body("run-1"))
        client.close()
    assert len(plane.context.store.list(TrainingSession, "acme")) == 1
