"""Training with the official SageMaker SDK, unmodified, against `gristmill up`."""

import asyncio
import functools
import math
from types import SimpleNamespace

import pytest
import sagemaker.train.training_session as sdk
from sagemaker.train.training_session import training_client as sdk_training_client

from gristmill_testing.sdk_loop import TOKENS, batch, step

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("recorded")]


def test_a_listed_base_model_trains_under_its_id_and_loads_its_tokenizer(
    service: sdk.ServiceClient,
) -> None:
    listed = service.list_base_models()
    assert len(listed) >= 1
    with service.create_lora_training_client(base_model=listed[0], rank=2, alpha=4) as client:
        text = "a b c"
        assert client.get_tokenizer().encode(
            text
        ) == client.create_sampling_client().get_tokenizer().encode(text)
        ids = client.get_tokenizer().encode(text)
        inputs = {"target_tokens": ids, "weights": [1.0] * len(ids)}
        by_text = client.forward([text], loss_fn_inputs=inputs).result()
        by_ids = client.forward([ids], loss_fn_inputs=inputs).result()
        assert by_text.metrics["actor/pg_loss"] == by_ids.metrics["actor/pg_loss"]


def test_a_training_loop_lowers_the_loss_and_counts_its_operations(
    client: sdk.TrainingClient,
) -> None:
    assert client.current_sequence_number == 0
    losses = [step(client) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert client.current_sequence_number == 16


def test_forward_reports_the_loss_and_leaves_no_gradient(client: sdk.TrainingClient) -> None:
    scored = client.forward(batch()).result()
    passed = client.forward_backward(batch()).result()
    assert scored.metrics["actor/pg_loss"] == passed.metrics["actor/pg_loss"]
    outputs = scored.loss_fn_outputs
    assert outputs is not None
    assert [len(output["logprobs"]["data"]) for output in outputs] == [len(row) for row in TOKENS]


def test_every_loss_trains(client: sdk.TrainingClient) -> None:
    scored = client.forward(batch()).result().loss_fn_outputs
    assert scored is not None
    for loss in sdk.LossFunction:
        datums = batch()
        if loss is not sdk.LossFunction.CROSS_ENTROPY:
            for datum, output in zip(datums, scored, strict=True):
                inputs = datum.loss_fn_inputs
                assert inputs is not None
                inputs["logprobs"] = sdk.TensorData(data=output["logprobs"]["data"])
                inputs["advantages"] = sdk.TensorData(data=[0.5] * len(output["logprobs"]["data"]))
        result = client.forward_backward(datums, loss_fn=loss).result()
        assert math.isfinite(result.metrics["actor/pg_loss"]), loss


def test_an_adam_step_reports_its_norm(client: sdk.TrainingClient) -> None:
    client.forward_backward(batch()).result()
    params = SimpleNamespace(learning_rate=1e-3, grad_clip_norm=1.0, lora_plus_lr_ratio=4.0)
    metrics = client.optim_step(sdk.AdamParams.from_any(params)).result().metrics
    assert metrics["actor/grad_norm"] > 0


def test_a_chunked_pass_equals_an_unchunked_one(
    service: sdk.ServiceClient, base_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service.create_lora_training_client(base_model, rank=4, alpha=8) as client:
        whole = client.forward_backward(batch()).result()
        number = client.current_sequence_number
        two_a_chunk = functools.partial(sdk_training_client.chunk_datum_list, max_len=2)
        monkeypatch.setattr(sdk_training_client, "chunk_datum_list", two_a_chunk)
        chunked = client.forward_backward(batch())
        assert client.current_sequence_number == number + 2
        assert chunked.operation_id
        result = chunked.result()
        assert chunked.done()
        assert asyncio.run(client.forward(batch()).result_async()).metrics == pytest.approx(
            result.metrics
        )
    assert result.metrics["actor/pg_loss"] == pytest.approx(
        whole.metrics["actor/pg_loss"], rel=1e-6
    )
    assert result.metrics["global_token_num"] == sum(len(row) for row in TOKENS)
    assert len(result.loss_fn_outputs or []) == len(TOKENS)


async def test_the_coroutine_twins_train_save_load_and_sample(
    service: sdk.ServiceClient, base_model: str
) -> None:
    client = await service.create_lora_training_client_async(base_model, rank=4, alpha=8)
    scored = await (await client.forward_async(batch()))
    passed = await client.forward_backward_async(batch())
    stepped = await client.optim_step_async(sdk.AdamParams())
    assert (await passed).metrics["actor/pg_loss"] == scored.metrics["actor/pg_loss"]
    assert (await stepped).metrics
    state = await (await client.save_state_async(description="async"))
    weights = await (await client.save_weights_for_sampler_async(description="async"))
    assert state.model_package_arn
    await (await client.load_state_async(state.model_package_arn))
    await (await client.load_state_with_optimizer_async(state.model_package_arn))
    sampler = await client.save_weights_and_get_sampling_client_async()
    answer = await sampler.sample_async([7, 11], sampling_params={"max_tokens": 512, "seed": 3})
    assert len(answer.sequences) == 1
    assert len(await sampler.compute_logprobs_async([7, 11, 13])) == 3
    bound = await client.create_sampling_client_async(
        model_package_arn=str(weights.model_package_arn)
    )
    assert bound.model_package_arn == weights.model_package_arn
    own = await service.create_sampling_client_async(base_model=base_model)
    own.stop()
    for factory in (
        service.create_training_client_from_state_async,
        service.create_training_client_from_state_with_optimizer_async,
    ):
        resumed = await factory(state.model_package_arn)
        resumed.stop()
    client.stop()
