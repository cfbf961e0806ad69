"""Sessions of the official SDK: made, listed, stopped, deleted, forgotten, and made by default."""

import gc
from types import SimpleNamespace

import pytest
import sagemaker.train.training_session as sdk
from botocore.exceptions import ClientError

from gristmill_testing.raw_wire import ROLE_ARN, wait_until
from gristmill_testing.sdk_loop import status_of

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("recorded")]


def test_sessions_are_listed_by_name_and_status(
    service: sdk.ServiceClient, client: sdk.TrainingClient
) -> None:
    name = client.training_session_name
    found = service.list_sessions(name_contains=name, status_equals=sdk.SessionStatus.RUNNING)
    assert [summary.training_session_name for summary in found] == [name]
    assert found[0].creation_time is not None
    for status in sdk.SessionStatus:
        hits = service.list_sessions(name_contains=name, status_equals=status)
        assert bool(hits) == (status is sdk.SessionStatus.RUNNING)
    assert len(service.list_sessions(max_results=1)) == 1


def test_stop_is_idempotent_by_name_and_by_arn(service: sdk.ServiceClient, base_model: str) -> None:
    client = service.create_lora_training_client(base_model, training_session_name="sdk-stopped")
    client.stop()
    client.stop()
    service.stop_session("sdk-stopped")
    arn = service.list_sessions(name_contains="sdk-stopped")[0].training_session_arn
    service.stop_session(arn)
    wait_until(lambda: status_of(service, "sdk-stopped") == "Stopped", "the session to stop")
    with pytest.raises(sdk.TrainingSessionError, match="closed"):
        client.optim_step().result()


def test_a_running_session_is_deleted_only_when_asked_to_stop_first(
    service: sdk.ServiceClient, base_model: str
) -> None:
    client = service.create_lora_training_client(base_model, training_session_name="sdk-deleted")
    with pytest.raises(ClientError, match="invalid session state transition from Running to"):
        client.delete()
    client.delete(stop_if_active=True)
    wait_until(
        lambda: not service.list_sessions(name_contains="sdk-deleted"), "the session to be gone"
    )
    with pytest.raises(ClientError) as caught:
        service.stop_session("sdk-deleted")
    assert caught.value.response["Error"]["Code"] == "ResourceNotFound"


def test_the_service_client_deletes_a_stopped_session_by_arn(
    service: sdk.ServiceClient, base_model: str
) -> None:
    client = service.create_lora_training_client(
        base_model, training_session_name="sdk-deleted-by-arn"
    )
    client.stop()
    arn = service.list_sessions(name_contains="sdk-deleted-by-arn")[0].training_session_arn
    wait_until(lambda: status_of(service, "sdk-deleted-by-arn") == "Stopped", "the session to stop")
    service.delete_session(arn)
    wait_until(
        lambda: not service.list_sessions(name_contains="sdk-deleted-by-arn"), "the session to go"
    )


def test_leaving_a_with_block_stops_the_session(
    service: sdk.ServiceClient, base_model: str
) -> None:
    with service.create_sampling_client(base_model=base_model) as sampler:
        name = sampler.training_session_name
        assert status_of(service, name) == "Running"
    assert status_of(service, name) in {"Stopping", "Stopped"}


def test_a_collected_client_warns_and_stops_its_session(
    service: sdk.ServiceClient, base_model: str
) -> None:
    client = service.create_lora_training_client(base_model, training_session_name="sdk-forgotten")
    samplers = [client.create_sampling_client()]
    del client
    gc.collect()
    assert status_of(service, "sdk-forgotten") == "Running"
    with pytest.warns(ResourceWarning, match="sdk-forgotten"):
        forget(samplers)
    wait_until(
        lambda: status_of(service, "sdk-forgotten") == "Stopped", "the forgotten session to stop"
    )


def test_the_defaults_need_no_aws(sdk_environment: dict[str, str], base_model: str) -> None:
    """No group, no bucket, no path given: the SDK makes the shared group and asks for the bucket."""
    service = sdk.ServiceClient(role_arn=ROLE_ARN)
    with service.create_lora_training_client(base_model) as client:
        assert client.training_session_name.startswith(sdk.DEFAULT_SESSION_NAME_PREFIX)
        assert client._model_package_group_arn.endswith(f"/{sdk.DEFAULT_MODEL_PACKAGE_GROUP_NAME}")
        detail = service._sagemaker_client.describe_training_session(
            TrainingSessionName=client.training_session_name
        )["TrainingSessionDetail"]
        assert detail["OutputConfig"]["S3Location"]["Path"].startswith("s3://")
        assert detail["LoraConfig"] == {"Rank": 32, "Alpha": 64}
        client.save_state().result()
        assert client.list_model_packages(kind=sdk.ModelPackageKind.CHECKPOINT, max_results=1)


def test_a_vpc_and_a_key_travel_with_the_session(
    service: sdk.ServiceClient, base_model: str
) -> None:
    vpc = sdk.VpcConfig.from_any(SimpleNamespace(subnets=["subnet-1"], security_group_ids=["sg-1"]))
    with service.create_lora_training_client(base_model, vpc_config=vpc) as client:
        detail = service._sagemaker_client.describe_training_session(
            TrainingSessionName=client.training_session_name
        )["TrainingSessionDetail"]
    assert detail["VpcConfig"] == {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}


def forget(clients: list[sdk.SamplingClient]) -> None:
    """Let go of the last client of a session, as a notebook cell that is run again does."""
    clients.clear()
    gc.collect()
