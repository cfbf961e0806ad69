"""Futures of the official SDK, and how what goes wrong reaches its user."""

import pickle
from typing import Any

import pytest
import sagemaker.train.training_session as sdk
from botocore.exceptions import ClientError

from gristmill_testing.raw_wire import model_arn
from gristmill_testing.sdk_loop import batch, step

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("recorded")]


def test_a_future_answers_like_a_standard_one(client: sdk.TrainingClient) -> None:
    future = client.forward_backward(batch())
    assert isinstance(future, sdk.APIFuture)
    assert not future.cancel()
    assert not future.cancelled()
    assert future.exception(timeout=60) is None
    assert future.done()
    assert future.operation_id
    assert isinstance(future.result(), sdk.ForwardBackwardOutput)


def test_a_wait_that_is_too_short_times_out_and_the_operation_goes_on(
    client: sdk.TrainingClient,
) -> None:
    future = client.forward_backward(batch())
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    assert future.result(timeout=60).metrics


def test_a_failed_operation_raises_and_the_session_goes_on(client: sdk.TrainingClient) -> None:
    future = client.optim_step()
    with pytest.raises(sdk.OperationError, match="without a forward_backward") as caught:
        future.result()
    assert caught.value.operation_id == future.operation_id
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert not sdk.is_retryable(caught.value)
    assert step(client) > 0


def test_a_refused_operation_raises_the_wires_error_and_leaves_no_gap(
    client: sdk.TrainingClient,
) -> None:
    refused = client.optim_step(sdk.AdamParams(learning_rate=0.5))
    with pytest.raises(ClientError) as caught:
        refused.result()
    assert caught.value.response["Error"]["Code"] == "ValidationException"
    assert "learningRate" in caught.value.response["Error"]["Message"]
    assert not sdk.is_retryable(caught.value)
    assert step(client) > 0


def test_a_result_of_the_wrong_length_is_not_believed(client: sdk.TrainingClient) -> None:
    events = client._runtime.meta.events
    hook = "after-call.sagemakertrainingsessionruntime.GetSamplingOperationResult"

    def drop_one(parsed: dict[str, Any], **_: Any) -> None:
        scored = (parsed.get("operationResult") or {}).get("computeLogprobs")
        if scored:
            scored["logprobs"] = scored["logprobs"][:-1]

    events.register(hook, drop_one)
    try:
        with pytest.raises(sdk.ResultMismatchError):
            client.create_sampling_client().compute_logprobs([7, 11, 13]).result()
    finally:
        events.unregister(hook, drop_one)


def test_an_unknown_model_is_refused_with_the_ids_that_exist(service: sdk.ServiceClient) -> None:
    with pytest.raises(ValueError, match=service.list_base_models()[0]):
        service.create_lora_training_client("nobody/no-such-model")
    with pytest.raises(ClientError) as caught:
        service.create_lora_training_client(model_arn(service._region, "no-such-model"))
    assert caught.value.response["Error"]["Code"] in {"ResourceNotFound", "ValidationException"}
    assert "no-such-model" in caught.value.response["Error"]["Message"]
