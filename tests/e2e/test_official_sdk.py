"""The official SageMaker SDK, unmodified, against `gristmill up`: every public name is used.

The last test takes the public names from the installed SDK by `inspect` and fails with the list of
those that no test here has called, so that a newer SDK cannot grow a method we never tried.
"""

import ast
import asyncio
import functools
import gc
import inspect
import math
import pickle
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sagemaker.train.training_session as sdk
import torch
from botocore.exceptions import ClientError
from sagemaker.train.training_session import training_client as sdk_training_client

from gristmill_testing.public_surface import Surface
from gristmill_testing.raw_wire import ROLE_ARN, model_arn, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("sdk_environment", "recorded")]

SURFACE = Surface(
    [
        value
        for name in sdk.__all__
        if inspect.isclass(value := getattr(sdk, name)) and not issubclass(value, Enum)
    ],
    package="sagemaker.train.training_session",
)
TOKENS = [[7, 11, 13, 17, 19, 23, 29], [5, 8, 12, 16, 20], [31, 37, 41, 43]]
GROUP = "sdk-tests"


@pytest.fixture(scope="module")
def recorded() -> Iterator[None]:
    with SURFACE.recording():
        yield


@pytest.fixture(scope="module")
def model(instance: Any) -> str:
    return str(instance.model)


@pytest.fixture(scope="module")
def service(sdk_environment: dict[str, str], recorded: None) -> sdk.ServiceClient:
    service = sdk.ServiceClient(role_arn=ROLE_ARN, session_name_prefix="sdk-test")
    group = service._get_model_registry_client().create_model_package_group(
        ModelPackageGroupName=GROUP
    )
    return sdk.ServiceClient(
        region=sdk_environment["AWS_REGION"],
        role_arn=ROLE_ARN,
        model_package_group_arn=group["ModelPackageGroupArn"],
        s3_output_path="s3://sdk-tests/output",
        session_name_prefix="sdk-test",
        max_pool_connections=16,
    )


@pytest.fixture
def base_model(service: sdk.ServiceClient, model: str) -> str:
    return model_arn(service._region, model)


@pytest.fixture
def client(service: sdk.ServiceClient, base_model: str) -> Iterator[sdk.TrainingClient]:
    with service.create_lora_training_client(base_model, rank=4, alpha=8) as client:
        yield client


def batch(rows: list[list[int]] = TOKENS) -> list[sdk.Datum]:
    return [
        sdk.Datum(
            model_input=sdk.ModelInput.from_ints(row),
            loss_fn_inputs={
                "target_tokens": sdk.TensorData(
                    data=[*row[1:], row[0]], dtype=sdk.TensorDtype.INT64
                ),
                "weights": sdk.TensorData(data=[1.0] * len(row)),
            },
        )
        for row in rows
    ]


def step(client: sdk.TrainingClient, rows: list[list[int]] = TOKENS) -> float:
    """One pass and one step, pipelined; returns the loss before the step."""
    passed = client.forward_backward(batch(rows))
    stepped = client.optim_step(sdk.AdamParams(learning_rate=1e-2))
    stepped.result()
    return float(passed.result().metrics["actor/pg_loss"])


def status_of(service: sdk.ServiceClient, name: str) -> str:
    answer = service._sagemaker_client.describe_training_session(TrainingSessionName=name)
    return str(answer["TrainingSessionDetail"]["TrainingSessionStatus"])


# --- models, sessions and their ends -------------------------------------------------------------


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
    sampler = client.create_sampling_client()
    del client
    gc.collect()
    assert status_of(service, "sdk-forgotten") == "Running"
    with pytest.warns(ResourceWarning, match="sdk-forgotten"):
        del sampler
        gc.collect()
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


# --- checkpoints ---------------------------------------------------------------------------------


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


# --- sampling ------------------------------------------------------------------------------------


def test_a_sampling_client_follows_the_saved_weights(client: sdk.TrainingClient) -> None:
    params = sdk.SamplingParams.from_any(
        {"max_tokens": 512, "temperature": 1.0, "seed": 5, "stop": ["zzzz"]}
    )
    before = client.save_weights_and_get_sampling_client(description="before")
    first = before.sample([7, 11, 13], num_samples=2, sampling_params=params).result()
    for _ in range(5):
        step(client)
    after = client.save_weights_and_get_sampling_client(description="after")
    third = after.sample([7, 11, 13], num_samples=2, sampling_params=params).result()
    again = before.sample([7, 11, 13], num_samples=2, sampling_params=params).result()
    assert first == again
    assert first != third
    for sequence in first.sequences:
        assert isinstance(sequence, sdk.SampledSequence)
        assert sequence.stop_reason in set(sdk.StopReason)
        assert sequence.logprobs is not None
        assert len(sequence.logprobs) == len(sequence.tokens) >= 1
    after.stop()
    assert step(client) > 0, "retiring a shared sampling client must not stop the session"


def test_prompt_logprobs_agree_with_compute_logprobs(client: sdk.TrainingClient) -> None:
    prompt = [7, 11, 13, 17]
    with client.create_sampling_client() as sampler:
        answer = sampler.sample(
            prompt,
            sampling_params={"max_tokens": 512},
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
        ).result()
        scored = sampler.compute_logprobs(prompt).result()
    assert scored[0] is None
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[-3:] == pytest.approx(scored[1:], abs=1e-5)
    rows = answer.topk_prompt_logprobs
    assert rows is not None
    assert [len(row) for row in rows] == [0, 3, 3, 3]
    assert all(isinstance(entry, sdk.TokenLogprob) for row in rows for entry in row)


def test_a_package_of_any_rank_is_sampled_in_a_session_of_its_own(
    service: sdk.ServiceClient, client: sdk.TrainingClient
) -> None:
    step(client)
    arn = str(client.save_weights_for_sampler(merge_weights=True).result().model_package_arn)
    bound = client.create_sampling_client(model_package_arn=arn)
    prompt = [7, 11, 13, 17, 19]
    expected = bound.compute_logprobs(prompt).result()
    with service.create_sampling_client(model_package_arn=arn) as sampler:
        assert sampler.compute_logprobs(prompt).result() == pytest.approx(
            expected, abs=1e-5, nan_ok=True
        )
        untrained = client.create_sampling_client
        assert untrained().model_package_arn == ""
    with pytest.raises(ValueError, match="exactly one"):
        service.create_sampling_client()


# --- futures and errors --------------------------------------------------------------------------


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
    with pytest.raises(sdk.OperationError, match="gradient") as caught:
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


# --- value types ---------------------------------------------------------------------------------


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


# --- the surface ---------------------------------------------------------------------------------


def test_no_public_name_of_the_sdk_is_left_uncalled(request: pytest.FixtureRequest) -> None:
    """Only meaningful after the whole module ran: a selection of tests skips it."""
    collected = {item.originalname for item in request.session.items if item.path == Path(__file__)}  # type: ignore[attr-defined]
    defined = {name for name in globals() if name.startswith("test_")}
    if not defined <= collected:
        pytest.skip("only part of this module was selected")
    assert SURFACE.uncalled == []
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "sdk"
    }
    assert sorted(set(sdk.__all__) - used) == []
