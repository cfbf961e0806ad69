"""Checkpoints of the official SDK: saved, resumed, listed and deleted."""

from typing import Any

import pytest
import sagemaker.train.training_session as sdk
from botocore.exceptions import ClientError

from gristmill_testing.sdk_loop import step

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("recorded")]


def test_resuming_with_the_optimizer_continues_bit_for_bit_and_without_it_does_not(
    service: sdk.ServiceClient, client: sdk.TrainingClient
) -> None:
    for _ in range(3):
        step(client)
    arn = client.save_state(description="three steps").result().model_package_arn
    assert arn is not None
    uninterrupted = [step(client) for _ in range(3)]
    with service.create_training_client_from_state_with_optimizer(arn) as warm:
        resumed = [step(warm) for _ in range(3)]
    with service.create_training_client_from_state(arn) as cold:
        reset = [step(cold) for _ in range(3)]
    assert resumed == uninterrupted
    assert reset[0] == uninterrupted[0]
    assert reset != uninterrupted


def test_load_state_goes_back_in_the_same_session(client: sdk.TrainingClient) -> None:
    step(client)
    arn = client.save_state().result().model_package_arn
    assert arn is not None
    first = [step(client) for _ in range(2)]
    assert isinstance(client.load_state_with_optimizer(arn).result(), sdk.LoadStateResponse)
    assert [step(client) for _ in range(2)] == first
    client.load_state(arn).result()
    assert step(client) == first[0]


def test_packages_are_listed_newest_first_and_found_by_kind(
    service: sdk.ServiceClient, client: sdk.TrainingClient
) -> None:
    assert client.get_latest_model_package(sdk.ModelPackageKind.MODEL) is None
    state = client.save_state(description="a state").result().model_package_arn
    weights = client.save_weights_for_sampler(description="some weights").result().model_package_arn
    newest = service.list_model_packages(max_results=2)
    assert [package.model_package_arn for package in newest] == [weights, state]
    assert [package.description for package in newest] == ["some weights", "a state"]
    by_kind = {
        kind: client.list_model_packages(kind=kind, max_results=2)[0].model_package_arn
        for kind in sdk.ModelPackageKind
    }
    assert by_kind == {sdk.ModelPackageKind.CHECKPOINT: state, sdk.ModelPackageKind.MODEL: weights}
    for kind in sdk.ModelPackageKind:
        latest = service.get_latest_model_package(kind)
        assert isinstance(latest, sdk.ModelPackageInfo)
        assert latest.model_package_arn == by_kind[kind]
        cached = client.get_latest_model_package(kind)
        assert cached is not None
        assert cached.model_package_arn == by_kind[kind]


def test_a_package_is_deleted_with_or_without_its_artifacts(
    service: sdk.ServiceClient, client: sdk.TrainingClient
) -> None:
    kept, purged = (client.save_state().result().model_package_arn for _ in range(2))
    first = service.delete_model_package(str(kept))
    assert isinstance(first, sdk.ModelPackageDeletion)
    assert (first.model_package_deleted, first.objects_deleted, first.artifacts_retained) == (
        True,
        0,
        True,
    )
    second = service.delete_model_package(str(purged), delete_artifacts=True)
    assert second.model_package_deleted
    assert second.objects_deleted > 0
    assert not second.artifacts_retained
    again = service.delete_model_package(str(purged), delete_artifacts=True)
    assert not again.model_package_deleted
    listed = {
        package.model_package_arn for package in service.list_model_packages(max_results=None)
    }
    assert not listed & {kept, purged}
    with pytest.raises(ClientError):
        client.load_state(str(purged)).result()


def test_artifacts_that_cannot_be_deleted_keep_their_package(
    service: sdk.ServiceClient, client: sdk.TrainingClient
) -> None:
    arn = str(client.save_state().result().model_package_arn)
    events = service._get_s3_client().meta.events

    def fail_every_key(parsed: dict[str, Any], **_: Any) -> None:
        parsed["Errors"] = [{"Key": "a/b", "Code": "AccessDenied"}]

    events.register("after-call.s3.DeleteObjects", fail_every_key)
    try:
        with pytest.raises(sdk.ArtifactDeletionError) as caught:
            service.delete_model_package(arn, delete_artifacts=True)
    finally:
        events.unregister("after-call.s3.DeleteObjects", fail_every_key)
    assert caught.value.failed_keys
    assert arn in {package.model_package_arn for package in service.list_model_packages()}
