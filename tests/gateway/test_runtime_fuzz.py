"""Whatever is sent to a route of the runtime plane: an answer of its shape, or the caller's fault; in time.

GRISTMILL_FUZZ_CASES sets the cases for each route.
"""

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill_testing.gateway_world import (
    REGION,
    RUNTIME,
    World,
    checkpoint,
    gateway_world,
    package_arn,
)
from gristmill_testing.shape_strategies import JUNK, inputs
from gristmill_testing.wire_shapes import error_codes, operation, output_problems

CASES = int(os.environ.get("GRISTMILL_FUZZ_CASES", "200"))
CASE_S_MAX = 10.0
TOKENS = {"chunks": [{"tokens": [7, 11], "type": "encoded_text"}]}
TARGETS = {"data": [11, 13], "dtype": "int64", "shape": [2]}
FLOATS = {"data": [1, 0.5], "dtype": "float32"}
INPUTS = {"target_tokens": TARGETS, "weights": FLOATS}
RL_INPUTS = INPUTS | {"advantages": FLOATS, "logprobs": FLOATS}
DATUM = {"modelInput": TOKENS, "lossFnInputs": RL_INPUTS}
A_PASS = {"lossFnName": "ppo", "datumList": [DATUM]}
SOUND: dict[str, list[Any]] = {
    "ExecuteTrainingOperation": [
        {"forward": A_PASS},
        {"forwardBackward": A_PASS},
        {"optimizerStep": {"adamParamsConfig": {"learningRate": 1e-4}}},
        {"saveState": {}},
    ],
    "ExecuteSamplingOperation": [
        {"sample": {"prompt": TOKENS, "numSamples": 2, "samplingParams": {"maxTokens": 4}}},
        {"computeLogprobs": {"prompt": TOKENS}},
    ],
}
SEEDS: dict[str, list[Any]] = {
    "sequenceNumber": [1, 2, 3, 1000, 2**31, 0],
    "clientToken": ["a", "b-1", "x" * 128, "x" * 129],
    "modelInput": [TOKENS],
    "prompt": [TOKENS],
    "lossFnInputs": [INPUTS, RL_INPUTS],
    "datumList": [[DATUM]],
    "modelPackageArn": [package_arn(1), package_arn(2), package_arn(9), ""],
    "lossFnConfig": [{}, {"clip_low_threshold": 0.8}],
    "learningRate": [1e-4],
    "maxTokens": [1, 512, 131_072],
    "stop": [["a"], []],
}
TRAINING = "ExecuteTrainingOperation"
SAMPLING = "ExecuteSamplingOperation"
GETS = {TRAINING: "GetTrainingOperationResult", SAMPLING: "GetSamplingOperationResult"}
NAMES = st.sampled_from(["run-1"] * 12 + ["run-2", "", "a" * 65, "ü", "a/b", "%2F", "..", "\x00"])
SETTINGS = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant", "tool"]),
        "content": st.text(max_size=9),
    }
)
CHAT_MEMBERS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(-1, 9),
    "temperature": st.floats(0, 2),
    "n": st.sampled_from([1, 1, 2]),
    "stop": st.text(max_size=3),
    "seed": st.integers(-1),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "logprobs": st.booleans(),
    "tools": st.just([]),
    "model": st.text(max_size=9),
}
SOUND_CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=3)}, optional=CHAT_MEMBERS
)
CHAT = st.one_of(
    SOUND_CHAT,
    SOUND_CHAT,
    st.fixed_dictionaries(
        {"messages": st.lists(MESSAGE | JUNK, max_size=3) | JUNK},
        optional={name: member | JUNK for name, member in CHAT_MEMBERS.items()},
    ),
)
BROKEN = st.binary(max_size=30) | st.sampled_from(
    [b"", b"null", b"[" * 5000, b'{"a":' * 5000, b'{"sequenceNumber":1e999}', b"\xff\xfe"]
)


class Wire:
    """Signed requests over one connection."""

    def __init__(self, world: World) -> None:
        self.world = world
        parts = urlsplit(world.url)
        self.connection = http.client.HTTPConnection(
            str(parts.hostname), parts.port, timeout=CASE_S_MAX
        )
        key_id = world.keys["acme"]
        credentials = Credentials(key_id, f"secret-of-{key_id}")
        self.signer = SigV4Auth(credentials, "sagemaker", REGION)

    def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any, bytes]:
        """Raises TimeoutError if no answer comes in time."""
        request = AWSRequest(method=method, url=self.world.url + path, data=body)
        self.signer.add_auth(request)
        headers = dict(request.headers.items())
        self.connection.request(method, path, body=body, headers=headers)
        answer = self.connection.getresponse()
        return answer.status, answer.headers, answer.read()


@pytest.fixture(name="wire", scope="module")
def wire_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    with gateway_world(folder, result_wait_s=0.0) as world:
        world.ledger.checkpoints["acme", "runs", 1] = checkpoint(1, "state")
        world.ledger.checkpoints["acme", "runs", 2] = checkpoint(2, "weights")
        wire = Wire(world)
        yield wire
        wire.connection.close()


def check_refusal(status: int, headers: Any, body: bytes, name: str) -> None:
    assert 400 <= status < 500, (status, body)
    error = headers["x-amzn-errortype"]
    assert error in error_codes(RUNTIME, name) | {"UnknownOperationException"}, error
    assert json.loads(body)["message"]


def path_of(name: str, operation_name: str) -> str:
    kind = "operations" if operation_name == TRAINING else "sampling-operations"
    return f"/v1/training-sessions/{quote(name, safe='')}/{kind}"


@pytest.mark.parametrize("name", [TRAINING, SAMPLING])
def test_a_submit_is_taken_or_refused_and_what_was_taken_has_a_result(
    wire: Wire, name: str
) -> None:
    shape = operation(RUNTIME, name).input_shape
    assert shape is not None
    number = {"sequenceNumber": st.integers(1, 2**40)} if name == TRAINING else {}
    sound = st.fixed_dictionaries({"operationConfig": st.sampled_from(SOUND[name]), **number})
    made = st.one_of(inputs(shape, SEEDS), inputs(shape, SEEDS), sound)
    bodies = made.map(
        lambda body: json.dumps(
            {key: value for key, value in body.items() if key != "trainingSessionName"}
        ).encode()
    )
    reached: list[str] = []

    @SETTINGS
    @given(NAMES, st.one_of(bodies, bodies, bodies, bodies, BROKEN))
    def check(session: str, body: bytes) -> None:
        path = path_of(session, name)
        status, headers, content = wire.call("POST", path, body)
        if status != 200:
            check_refusal(status, headers, content, name)
            return
        answer = json.loads(content)
        assert output_problems(RUNTIME, name, answer) == []
        status, _, content = wire.call("GET", f"{path}/{answer['operationId']}")
        result = json.loads(content)
        assert status == 200
        scored = result["operationResult"].get("computeLogprobs")
        if scored:
            assert scored["logprobs"].pop(0) is None
        assert output_problems(RUNTIME, GETS[name], result) == []
        reached.append(name)

    check()
    assert reached, "no case got through"


@pytest.mark.parametrize("name", [TRAINING, SAMPLING])
def test_no_operation_id_that_was_not_given_out_is_answered(wire: Wire, name: str) -> None:
    @SETTINGS
    @given(
        NAMES, st.text(max_size=70) | st.text(alphabet="abcdefg234567", min_size=60, max_size=60)
    )
    def check(session: str, operation_id: str) -> None:
        encoded = quote(operation_id.encode("utf-8", "replace"), safe="")
        path = f"{path_of(session, name)}/{encoded}"
        check_refusal(*wire.call("GET", path), GETS[name])

    check()


@pytest.mark.parametrize("route", ["sample", "sample-with-response-stream"])
def test_a_chat_body_is_answered_or_refused(wire: Wire, route: str) -> None:
    reached: list[int] = []
    name = {"sample": "SampleTrainingSession"}.get(route, "SampleTrainingSessionWithResponseStream")

    @SETTINGS
    @given(NAMES, st.one_of(CHAT.map(json.dumps).map(str.encode), BROKEN))
    def check(session: str, body: bytes) -> None:
        path = f"/training-sessions/{quote(session, safe='')}/{route}"
        status, headers, content = wire.call("POST", path, body)
        if status == 200:
            reached.append(status)
            assert content.endswith(b"[DONE]\n\n") or json.loads(content)["choices"]
        else:
            check_refusal(status, headers, content, name)

    check()
    assert reached, "no case got through"
