"""The official SDK's value types, on their way through the wire and back."""

from typing import Any

import numpy as np
import pytest
import sagemaker.train.training_session as sdk
import torch

from gristmill_testing.sdk_loop import TOKENS, batch

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("recorded")]


def test_every_way_to_write_a_batch_gives_the_same_loss(client: sdk.TrainingClient) -> None:
    row = TOKENS[0]
    targets, weights = [*row[1:], row[0]], [1.0] * len(row)
    typed = sdk.Datum.from_any(
        {
            "modelInput": {"chunks": [{"tokens": row, "type": "encoded_text"}]},
            "lossFnInputs": {
                "target_tokens": sdk.TensorData.from_any(np.array(targets, dtype=np.int64)),
                "weights": sdk.TensorData.from_any(torch.tensor(weights)),
            },
        }
    )
    pieces = (
        sdk.ModelInput.empty().append(sdk.EncodedTextChunk.from_any(row[:3])).append_int(row[3])
    )
    pieces = pieces.append(sdk.ModelInputChunk(chunk=sdk.EncodedTextChunk(tokens=row[4:])))
    assert pieces.to_ints() == sdk.ModelInput.from_any(row).to_ints() == row
    assert pieces.length == len(row)
    assert sdk.EncodedTextChunk(tokens=row).length == len(row)
    with pytest.raises(ValueError, match="tokenized"):
        sdk.ModelInput.from_text("text").to_ints()
    inputs = {"target_tokens": targets, "weights": weights}
    batches: list[Any] = [
        [typed],
        [sdk.Datum(model_input=pieces, loss_fn_inputs=inputs)],
        [sdk.Datum(prompt=row, loss_fn_inputs=inputs)],
        batch([row]),
    ]
    losses = [client.forward(rows).result().metrics["actor/pg_loss"] for rows in batches]
    losses.append(client.forward(row, loss_fn_inputs=inputs).result().metrics["actor/pg_loss"])
    assert len(set(losses)) == 1


def test_every_dtype_the_sdk_can_name_is_widened(client: sdk.TrainingClient) -> None:
    row = TOKENS[1]
    expected = client.forward(batch([row])).result().metrics["actor/pg_loss"]
    for weights_dtype in (
        sdk.TensorDtype.FLOAT32,
        sdk.TensorDtype.FLOAT16,
        sdk.TensorDtype.BFLOAT16,
    ):
        for targets_dtype in (sdk.TensorDtype.INT64, sdk.TensorDtype.INT32):
            targets = sdk.TensorData(data=[*row[1:], row[0]], dtype=targets_dtype)
            weights = sdk.TensorData(data=[1.0] * len(row), dtype=weights_dtype)
            assert (
                weights.to_torch().tolist()
                == weights.to_numpy().tolist()
                == weights.tolist()
                == weights.data
            )
            datum = sdk.Datum(
                prompt=row, loss_fn_inputs={"target_tokens": targets, "weights": weights}
            )
            assert client.forward([datum]).result().metrics["actor/pg_loss"] == expected


def test_results_have_the_types_the_sdk_names(client: sdk.TrainingClient) -> None:
    client.forward_backward(batch()).result()
    assert isinstance(client.optim_step({"learning_rate": 1e-3}).result(), sdk.OptimStepResponse)
    assert isinstance(client.save_state().result(), sdk.SaveStateResponse)
    assert isinstance(client.save_weights_for_sampler().result(), sdk.SaveWeightsResponse)
    sampler = client.create_sampling_client()
    answer = sampler.sample([7], sampling_params=sdk.SamplingParams(max_tokens=512)).result()
    assert isinstance(answer, sdk.SampleResponse)
    summaries = sampler._service_client.list_sessions(name_contains=client.training_session_name)
    assert isinstance(summaries[0], sdk.TrainingSessionSummary)
    states = {status.value for status in sdk.RequestStatus}
    poll = client._runtime.get_training_operation_result(
        trainingSessionName=client.training_session_name,
        operationId=client.save_state().operation_id,
    )
    assert poll["status"] in states
