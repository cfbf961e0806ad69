"""The runtime plane through the official client: submit, poll, refuse, and what happens without a meter."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gristmill_contracts.credentials import EndpointSecret
from gristmill_contracts.errors import (
    ConflictError,
    GristmillError,
    LogFullError,
    LogLostError,
    OverloadedError,
    UnavailableError,
    VolumeFailedError,
)
from gristmill_contracts.operations import (
    ComputeLogprobs,
    ForwardBackward,
    LoadState,
    LoadWeightsForSampling,
    Sample,
    SaveWeights,
)
from gristmill_contracts.session import TrainingSession
from gristmill_testing.gateway_world import (
    UID,
    World,
    checkpoint,
    gateway_world,
    package_arn,
)
from gristmill_testing.wire_shapes import error_codes, operation, output_problems, shape_problems

SERVICE = "sagemakertrainingsessionruntime"
PROMPT = {"chunks": [{"tokens": [7, 11], "type": "encoded_text"}]}
DATUM = {
    "modelInput": PROMPT,
    "lossFnInputs": {
        "target_tokens": {"data": [11, 13], "dtype": "int64", "shape": [2]},
        "weights": {"data": [1, 0.5], "dtype": "float32"},
    },
}
PASS = {"forwardBackward": {"lossFnName": "cross_entropy", "datumList": [DATUM]}}
STEP = {"optimizerStep": {"adamParamsConfig": {"learningRate": 1e-4}}}
SAMPLE = {"sample": {"prompt": PROMPT, "numSamples": 1, "samplingParams": {"maxTokens": 4}}}


@pytest.fixture(name="running", scope="module")
def running_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with gateway_world(tmp_path_factory.mktemp("world"), result_wait_s=0.3) as world:
        yield world


@pytest.fixture(name="world")
def world_fixture(running: World) -> World:
    running.reset()
    return running


def train(world: World, config: Any, number: int = 1, name: str = "run-1", **fields: Any) -> str:
    answer = world.client().execute_training_operation(
        trainingSessionName=name, sequenceNumber=number, operationConfig=config, **fields
    )
    return str(answer["operationId"])


def sample(world: World, config: Any) -> str:
    answer = world.client().execute_sampling_operation(
        trainingSessionName="run-1", operationConfig=config
    )
    return str(answer["operationId"])


def raw_get(world: World, operation_id: str, kind: str = "operations") -> tuple[int, Any]:
    path = f"/v1/training-sessions/run-1/{kind}/{operation_id}"
    status, _, body = world.call("GET", path)
    return status, json.loads(body)


def refusal(call: Callable[[], Any]) -> tuple[str, int, str]:
    with pytest.raises(ClientError) as caught:
        call()
    response = caught.value.response
    error = response["Error"]
    return error["Code"], response["ResponseMetadata"]["HTTPStatusCode"], error["Message"]


# --- submit and result ---------------------------------------------------------------------------

TRAINING = [
    ("forward", {"forward": PASS["forwardBackward"]}),
    ("forwardBackward", PASS),
    ("optimizerStep", STEP),
    ("saveWeights", {"saveWeights": {"mergeWeights": True}}),
    ("saveState", {"saveState": {}}),
    ("loadState", {"loadState": {"modelPackageArn": package_arn(1), "loadOptimizer": False}}),
]


@pytest.mark.parametrize(("member", "config"), TRAINING, ids=[row[0] for row in TRAINING])
def test_a_training_operation_runs_and_its_result_has_the_modelled_shape(
    world: World, member: str, config: Any
) -> None:
    world.ledger.checkpoints["acme", "runs", 1] = checkpoint(1, "state")
    status, answer = raw_get(world, train(world, config))
    assert status == 200
    assert output_problems(SERVICE, "GetTrainingOperationResult", answer) == []
    assert answer["status"] == "Completed"
    assert list(answer["operationResult"]) == [member]


SAMPLING = [
    ("sample", SAMPLE),
    ("sample", {"sample": SAMPLE["sample"] | {"numSamples": 3, "includePromptLogprobs": True, "topkPromptLogprobs": 2}}),
    ("computeLogprobs", {"computeLogprobs": {"prompt": PROMPT}}),
    ("loadWeightsForSampling", {"loadWeightsForSampling": {"modelPackageArn": package_arn(1)}}),
]  # fmt: skip


@pytest.mark.parametrize(("member", "config"), SAMPLING)
def test_a_sampling_operation_runs_and_its_result_has_the_modelled_shape(
    world: World, member: str, config: Any
) -> None:
    world.ledger.checkpoints["acme", "runs", 1] = checkpoint(1, "weights")
    status, answer = raw_get(world, sample(world, config), "sampling-operations")
    assert status == 200
    logprobs = answer["operationResult"].get("computeLogprobs", {}).get("logprobs")
    if logprobs is not None:
        # The model's list has no nulls, yet this one begins with one, and the SDK expects it.
        assert logprobs == [None, -0.5]
        logprobs[0] = 0.0
    assert output_problems(SERVICE, "GetSamplingOperationResult", answer) == []
    assert list(answer["operationResult"]) == [member]


def test_the_submit_that_the_meter_sees(world: World) -> None:
    train(world, PASS, number=5, clientToken="token-1")
    (submit,) = world.meter.submits
    assert (submit.stream, submit.number, submit.client_token) == ("train", 5, "token-1")
    assert isinstance(submit.operation, ForwardBackward)
    assert len(submit.body_hash) == 32
    sample(world, SAMPLE)
    keyless = world.meter.submits[1]
    assert (keyless.stream, keyless.number, keyless.client_token) == ("log", None, None)
    assert {submit.key, keyless.key} == {world.keys["acme"]}


def test_results_in_numbers(world: World) -> None:
    _, trained = raw_get(world, train(world, PASS))
    result = trained["operationResult"]["forwardBackward"]
    assert trained["tokenUsage"] == result["tokenUsage"] == {"trainingTokens": 2}
    # The fake's mean ratio is NaN and its clip fraction infinite: neither leaves.
    assert result["metrics"] == {
        "actor/pg_loss": 6.0,
        "global_token_num": 2.0,
        "actor/ppo_kl": 0.25,
    }
    assert result["lossFnOutputs"] == [
        {"logprobs": {"data": [-0.5, -0.5], "dtype": "float32", "shape": [2]}}
    ]
    _, stepped = raw_get(world, train(world, STEP, number=2))
    assert stepped["operationResult"]["optimizerStep"]["metrics"] == {
        "actor/grad_norm": 1.5,
        "actor/step": 1.0,
    }
    _, saved = raw_get(world, train(world, {"saveState": {}}, number=3))
    assert saved["operationResult"]["saveState"]["modelPackageArn"] == package_arn(7)
    config = {
        "sample": SAMPLE["sample"]
        | {"numSamples": 2, "includePromptLogprobs": True, "topkPromptLogprobs": 1}
    }
    _, sampled = raw_get(world, sample(world, config), "sampling-operations")
    found = sampled["operationResult"]["sample"]
    assert [each["tokenUsage"] for each in found["sequences"]] == [
        {"prefill": 2, "decode": 3},
        {"prefill": 0, "decode": 3},
    ]
    assert found["promptLogprobs"] == [0.0, -0.5]
    assert found["topkPromptLogprobs"] == [[], [{"tokenId": 0, "logprob": -1.0}]]


def test_a_save_goes_to_the_sessions_own_folder(world: World) -> None:
    train(world, {"saveWeights": {}})
    saved = world.meter.submits[0].operation
    assert isinstance(saved, SaveWeights)
    assert saved.location == "acme/data/run-1/output"


def test_a_sample_without_a_seed_gets_another_one_each_time(world: World) -> None:
    sample(world, SAMPLE)
    sample(world, SAMPLE)
    seeds = {
        s.operation.params.seed for s in world.meter.submits if isinstance(s.operation, Sample)
    }
    assert len(seeds) == 2


def test_a_resend_is_the_same_operation_and_another_request_under_its_number_is_not(
    world: World,
) -> None:
    first = train(world, PASS, number=1, clientToken="a")
    assert train(world, PASS, number=1, clientToken="a") == first
    assert train(world, PASS, number=1) == first
    code, status, _ = refusal(lambda: train(world, STEP, number=1, clientToken="a"))
    assert (code, status) == ("ValidationException", 400)
    code, status, message = refusal(lambda: train(world, STEP, number=1))
    assert (code, status) == ("ConflictException", 409)
    assert "the last received number is 1" in message


@pytest.mark.parametrize("state", ["Pending", "InProgress", "Failed", "Skipped"])
@pytest.mark.parametrize("plane", ["operations", "sampling-operations"])
def test_the_states_of_an_operation(world: World, state: str, plane: str) -> None:
    submit = train(world, PASS) if plane == "operations" else sample(world, SAMPLE)
    world.meter.state = state
    status, answer = raw_get(world, submit, plane)
    assert status == 200
    name = "GetTrainingOperationResult" if plane == "operations" else "GetSamplingOperationResult"
    assert output_problems(SERVICE, name, answer) == []
    expected = "Failed" if (plane, state) == ("sampling-operations", "Skipped") else state
    assert answer["status"] == expected
    assert answer.get("errorDetails") == (
        "it did not work" if state in ("Failed", "Skipped") else None
    )


def test_a_get_is_held_by_the_meter_until_the_wait_is_over(world: World) -> None:
    operation_id = train(world, PASS)
    world.meter.state = "InProgress"
    started = time.monotonic()
    assert raw_get(world, operation_id)[1] == {"status": "InProgress"}
    assert time.monotonic() - started >= 0.25
    assert world.meter.waits_s[0] == pytest.approx(0.3, abs=0.1)


# --- refusals ------------------------------------------------------------------------------------

BAD_PASS = {"forwardBackward": {"lossFnName": "cross_entropy", "datumList": []}}


def test_a_refused_number_is_closed_before_the_client_hears_of_it(world: World) -> None:
    code, status, message = refusal(lambda: train(world, BAD_PASS, number=3, clientToken="t-1"))
    assert (code, status) == ("ValidationException", 400)
    (refused,) = world.meter.refusals
    assert (refused.number, refused.client_token) == (3, "t-1")
    assert refused.message == message
    assert refused.breaks_accumulation
    refusal(lambda: train(world, {"optimizerStep": {"adamParamsConfig": {}}}, number=4))
    assert not world.meter.refusals[1].breaks_accumulation
    assert world.meter.submits == []


def test_a_number_that_cannot_be_read_is_not_closed(world: World) -> None:
    refusal(lambda: train(world, PASS, number=0))
    assert world.meter.refusals == []


def test_a_nan_is_refused_and_its_number_closed(world: World) -> None:
    bad = json.loads(json.dumps(PASS))
    bad["forwardBackward"]["datumList"][0]["lossFnInputs"]["weights"]["data"][1] = float("nan")
    code, _, message = refusal(lambda: train(world, bad, number=2))
    assert code == "ValidationException"
    assert "datumList[0].lossFnInputs.weights.data[1] is nan" in message
    assert [refused.number for refused in world.meter.refusals] == [2]


def test_a_refusal_of_a_number_in_use_is_answered_all_the_same(world: World) -> None:
    train(world, PASS, number=1)
    code, _, message = refusal(lambda: train(world, BAD_PASS, number=1))
    assert code == "ValidationException"
    assert "datumList has 0" in message


def test_a_refusal_that_cannot_be_recorded_now_is_to_be_sent_again(world: World) -> None:
    """The answer to a refusal is final for the SDK: told too early it would leave a gap."""
    world.meter.fault = UnavailableError("the meter is going down")
    code, status, _ = refusal(lambda: train(world, BAD_PASS, number=1))
    assert (code, status) == ("InternalServerException", 503)
    world.meter.fault = None
    assert refusal(lambda: train(world, BAD_PASS, number=1))[0] == "ValidationException"


# --- packages ------------------------------------------------------------------------------------

LOAD = {"modelPackageArn": package_arn(1), "loadOptimizer": True}


def test_a_package_becomes_the_checkpoint_that_it_is(world: World) -> None:
    world.ledger.checkpoints["acme", "runs", 1] = checkpoint(1, "state")
    world.ledger.checkpoints["acme", "runs", 2] = checkpoint(2, "weights")
    train(world, {"loadState": LOAD})
    loaded = world.meter.submits[0].operation
    assert isinstance(loaded, LoadState)
    assert loaded.checkpoint.path == checkpoint(1, "state").path
    for config in (
        {"sample": SAMPLE["sample"] | {"modelPackageArn": package_arn(2)}},
        {"computeLogprobs": {"prompt": PROMPT, "modelPackageArn": package_arn(2)}},
        {"loadWeightsForSampling": {"modelPackageArn": package_arn(1)}},
    ):
        sample(world, config)
        bound = world.meter.submits[-1].operation
        assert isinstance(bound, Sample | ComputeLogprobs | LoadWeightsForSampling)
        assert bound.adapter is not None
        assert bound.adapter.name in (package_arn(1), package_arn(2))
        assert bound.adapter.id


@pytest.mark.parametrize(
    ("arn", "text"),
    [
        (package_arn(9), "does not exist"),
        (package_arn(1, account="100000000009"), "belongs to account 100000000009"),
        (package_arn(1).rsplit("/", 1)[0].replace("model-package/", "model-package-group/"), "the version at its end"),
        (package_arn(0), "counts from 1"),
        ("runs", "is not an ARN of the form"),
        (package_arn(2), "holds weights for sampling"),
        (package_arn(3), "was trained on base model 'other', and this session's is 'tiny'"),
        ("x" * 3000, "3000 characters"),
    ],
)  # fmt: skip
def test_a_package_that_does_not_fit_is_refused(world: World, arn: str, text: str) -> None:
    world.ledger.checkpoints["acme", "runs", 2] = checkpoint(2, "weights")
    world.ledger.checkpoints["acme", "runs", 3] = checkpoint(3, "state", model="other")
    world.ledger.checkpoints["rival", "runs", 1] = checkpoint(1, "state", tenant="rival")
    code, status, message = refusal(
        lambda: train(world, {"loadState": LOAD | {"modelPackageArn": arn}})
    )
    assert (code, status) == ("ValidationException", 400)
    assert text in message
    assert [refused.number for refused in world.meter.refusals] == [1]


def test_without_a_ledger_a_package_is_to_be_asked_for_again(world: World) -> None:
    world.ledger.down = True
    code, status, _ = refusal(lambda: train(world, {"loadState": LOAD}))
    assert (code, status) == ("InternalServerException", 503)
    assert world.meter.refusals == []
    assert train(world, PASS), "what names no package needs no ledger"


# --- whose, and in what state --------------------------------------------------------------------


def test_somebody_elses_session_and_one_that_is_not_there_look_alike(world: World) -> None:
    operation_id = train(world, PASS)
    if "rival" not in world.keys:
        world.add_key("rival")
    stranger = world.client(tenant="rival")
    fields = {"trainingSessionName": "run-1"}
    for call in (
        lambda: stranger.execute_training_operation(
            **fields, sequenceNumber=1, operationConfig=STEP
        ),
        lambda: stranger.get_training_operation_result(**fields, operationId=operation_id),
        lambda: stranger.execute_sampling_operation(**fields, operationConfig=SAMPLE),
        lambda: stranger.get_sampling_operation_result(**fields, operationId=operation_id),
        lambda: stranger.sample_training_session(**fields, body=b"{}"),
        lambda: stranger.sample_training_session_with_response_stream(**fields, body=b"{}"),
        lambda: train(world, STEP, name="run-2"),
        lambda: train(world, STEP, name="a b%2F"),
    ):
        code, status, message = refusal(call)  # type: ignore[arg-type]
        assert (code, status) == ("ResourceNotFoundException", 404)
        assert "does not exist" in message


def test_an_operation_belongs_to_its_session_and_plane(world: World) -> None:
    world.add_session("run-2", uid=UID.replace("1", "2"))
    operation_id = train(world, PASS)
    client = world.client()
    for call in (
        lambda: client.get_training_operation_result(
            trainingSessionName="run-2", operationId=operation_id
        ),
        lambda: client.get_sampling_operation_result(
            trainingSessionName="run-1", operationId=operation_id
        ),
        lambda: client.get_training_operation_result(
            trainingSessionName="run-1", operationId="made-up"
        ),
    ):
        assert refusal(call)[:2] == ("ResourceNotFoundException", 404)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "state", ["Created", "Stopping", "Stopped", "Failed", "Expired", "Deleting"]
)
def test_a_session_that_does_not_run_takes_no_operation(world: World, state: str) -> None:
    session = world.store.get(TrainingSession, "acme", "run-1")
    done = train(world, PASS)
    world.store.delete(EndpointSecret, "acme", "run-1")
    status = session.status.model_copy(update={"state": state, "endpoint": ""})
    world.store.update_status(session.model_copy(update={"status": status}))
    for call in (lambda: train(world, BAD_PASS, number=2), lambda: sample(world, SAMPLE)):
        code, http, message = refusal(call)
        assert (code, http) == ("ConflictException", 409)
        assert state in message
    assert world.meter.refusals == []
    if state in ("Stopped", "Failed", "Expired"):
        assert raw_get(world, done)[0] == 404
    else:
        assert raw_get(world, done) == (200, {"status": "InProgress"})


def test_results_of_a_stopped_session_are_served_while_its_meter_is(world: World) -> None:
    operation_id = train(world, PASS)
    world.set_state(world.store.get(TrainingSession, "acme", "run-1"), "Stopped")
    assert raw_get(world, operation_id)[1]["status"] == "Completed"


# --- meters that are away ------------------------------------------------------------------------

DOWN: list[GristmillError | None] = [
    UnavailableError("no"),
    LogFullError("full"),
    VolumeFailedError("broken"),
    None,
]


@pytest.mark.parametrize("fault", DOWN, ids=lambda fault: fault.code if fault else "not served")
def test_a_submit_is_to_be_sent_again_and_a_poll_goes_on_while_the_meter_is_away(
    world: World, fault: GristmillError | None
) -> None:
    operation_id = train(world, PASS)
    attempts = dict(world.meter.attempts)
    world.meter.fault = fault
    if fault is None:
        world.meter.attempts.clear()
    for call in (lambda: train(world, STEP, number=2), lambda: sample(world, SAMPLE)):
        assert refusal(call)[:2] == ("InternalServerException", 503)
    _, headers, _ = world.call(
        "POST",
        "/v1/training-sessions/run-1/operations",
        {"sequenceNumber": 2, "operationConfig": STEP},
    )
    assert headers["retry-after"] == "1"
    assert headers["x-amzn-errortype"] == "InternalServerException"
    assert raw_get(world, operation_id) == (200, {"status": "InProgress"})
    world.meter.fault = None
    world.meter.attempts.update(attempts)
    assert raw_get(world, operation_id)[1]["status"] == "Completed"


def test_an_endpoint_that_nobody_listens_at_is_a_meter_that_is_away(world: World) -> None:
    operation_id = train(world, PASS)
    session = world.store.get(TrainingSession, "acme", "run-1")
    world.serve_session(session, attempt=2, url="http://127.0.0.1:9")
    assert refusal(lambda: train(world, STEP, number=2))[:2] == ("InternalServerException", 503)
    assert raw_get(world, operation_id) == (200, {"status": "InProgress"})
    assert world.client("sagemaker").describe_training_session(TrainingSessionName="run-1")


def test_a_poll_that_waits_sees_the_meter_come_back(tmp_path: Path) -> None:
    with gateway_world(tmp_path, result_wait_s=15.0) as world:
        operation_id = train(world, PASS)
        world.meter.fault = UnavailableError("restarting")
        asked = threading.Event()
        found: list[Any] = []

        def poll() -> None:
            asked.set()
            found.append(raw_get(world, operation_id))

        thread = threading.Thread(target=poll)
        thread.start()
        asked.wait(5)
        while world.meter.doors.count("GET 1") < 2:
            time.sleep(0.01)  # Until the gateway was turned away at least once.
        world.meter.fault = None
        thread.join(10)
        assert found[0][1]["status"] == "Completed"


def test_a_meter_of_another_attempt_is_looked_up_again(world: World) -> None:
    operation_id = train(world, PASS)
    session = world.store.get(TrainingSession, "acme", "run-1")
    world.meter.attempts[UID] = 2
    assert refusal(lambda: train(world, STEP, number=2))[:2] == ("InternalServerException", 503)
    assert raw_get(world, operation_id) == (200, {"status": "InProgress"})
    world.serve_session(session, attempt=2)
    assert train(world, STEP, number=2)
    assert raw_get(world, operation_id)[1]["status"] == "Completed"


def test_a_full_queue_is_throttled(world: World) -> None:
    world.meter.fault = OverloadedError("4096 operations wait")
    code, status, message = refusal(lambda: train(world, PASS))
    assert (code, status, message) == ("ThrottlingException", 429, "4096 operations wait")


@pytest.mark.parametrize(
    "fault", [ConflictError("session x has failed: gap"), LogLostError("the log is gone")]
)
def test_a_session_that_cannot_go_on_is_a_conflict(world: World, fault: GristmillError) -> None:
    operation_id = train(world, PASS)
    world.meter.fault = fault
    code, status, message = refusal(lambda: train(world, STEP, number=2))
    assert (code, status, message) == ("ConflictException", 409, fault.message)
    assert raw_get(world, operation_id)[0] == 200


def test_a_result_that_is_kept_no_longer_is_told(world: World) -> None:
    operation_id = train(world, PASS)
    world.meter.views.clear()
    status, answer = raw_get(world, operation_id)
    assert status == 404
    assert "no longer kept" in answer["message"]


def test_a_gateway_that_ends_lets_held_polls_go(tmp_path: Path) -> None:
    with gateway_world(tmp_path, result_wait_s=20.0) as world:
        operation_id = train(world, PASS)
        world.meter.fault = UnavailableError("away")
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(raw_get(world, operation_id)))
        thread.start()
        while "GET 1" not in world.meter.doors:
            time.sleep(0.01)
        world.gateway.context.draining._loop.call_soon_threadsafe(world.gateway.begin_drain)  # type: ignore[attr-defined]
        thread.join(5)
        assert found == [(200, {"status": "InProgress"})]
        assert world.send("GET", "/readyz")[0] == 503


# --- errors in their shape -----------------------------------------------------------------------


def test_every_error_name_is_one_that_the_model_has() -> None:
    names = {
        "ConflictException", "ResourceNotFoundException", "ThrottlingException",
        "InternalServerException", "ValidationException",
    }  # fmt: skip
    assert names == error_codes(SERVICE, "ExecuteTrainingOperation")
    assert names == error_codes(SERVICE, "SampleTrainingSession")


def test_the_bodies_that_this_module_sends_are_well_formed() -> None:
    shape = operation(SERVICE, "ExecuteTrainingOperation").input_shape
    for _, config in TRAINING:
        body = {"trainingSessionName": "a", "sequenceNumber": 1, "operationConfig": config}
        assert shape_problems(shape, body) == []


def test_an_unknown_route_says_what_there_is(world: World) -> None:
    for method, path in (
        ("GET", "/v1/training-sessions/run-1"),
        ("PUT", "/v1/training-sessions/run-1/operations"),
        ("POST", "/v1/training-sessions/run-1/operations/"),
        ("GET", "/v2"),
    ):
        status, headers, body = world.call(method, path)
        assert status == 404
        assert headers["x-amzn-errortype"] == "UnknownOperationException"
        assert "ExecuteTrainingOperation" in json.loads(body)["message"]
