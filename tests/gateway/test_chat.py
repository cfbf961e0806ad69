"""SampleTrainingSession and its response stream: OpenAI chat bodies in and out."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gristmill_contracts.errors import (
    BudgetExhaustedError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from gristmill_contracts.http import Problem
from gristmill_contracts.operations import ChatMessage, Operation, Result, Sample, SamplingParams
from gristmill_gateway.sagemaker.chat_requests import ChatRequest, read_chat
from gristmill_gateway.sagemaker.model_facts import SessionFacts
from gristmill_testing.fake_meter import answer as fake_answer
from gristmill_testing.gateway_world import (
    REGION,
    World,
    checkpoint,
    gateway_world,
    package_arn,
)

FACTS = SessionFacts(model="tiny", vocabulary_size=100, context_length=64, location="l")
MESSAGES = [{"role": "user", "content": "hi"}]
SAMPLE = "/training-sessions/run-1/sample"
STREAM = "/training-sessions/run-1/sample-with-response-stream"


@pytest.fixture(name="running", scope="module")
def running_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with gateway_world(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture(name="world")
def world_fixture(running: World) -> World:
    running.reset()
    return running


def read(**fields: Any) -> ChatRequest:
    return read_chat({"messages": MESSAGES, **fields}, FACTS, None, 4711)


def events(body: bytes) -> list[Any]:
    """The decoded events of a stream; [DONE] as a text."""
    lines = [line for line in body.decode().split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


# --- requests ------------------------------------------------------------------------------------


def test_a_chat_with_nothing_named_draws_plainly_up_to_the_context() -> None:
    request = read()
    assert request.sample.messages == [ChatMessage("user", "hi")]
    assert request.sample.params == SamplingParams(
        max_tokens=64, temperature=1.0, top_k=-1, top_p=1.0, seed=4711, stop=None
    )
    assert (request.sample.num_samples, request.sample.include_text) == (1, True)
    assert (request.stream, request.logprobs, request.model) == (False, False, "")


def test_every_field_that_means_something_is_handed_on() -> None:
    request = read(
        model="gpt",
        max_tokens=9,
        max_completion_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=7,
        n=2,
        stop="x",
        seed=1,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        frequency_penalty=0.0,
        response_format={"type": "text"},
        tools=[],
        user="me",
        metadata={"a": 1},
    )
    assert request.sample.params == SamplingParams(
        max_tokens=5, temperature=0.0, top_k=7, top_p=0.5, seed=1, stop=["x"]
    )
    assert request.sample.num_samples == 2
    assert (request.stream, request.logprobs, request.include_usage) == (True, True, True)
    assert request.model == "gpt"


def test_contents_may_come_in_parts_and_a_developer_is_a_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    assert read(messages=messages).sample.messages == [
        ChatMessage("system", "be kind"),
        ChatMessage("user", "ab"),
    ]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "body.messages is required"),
    ({"messages": []}, "messages has 0 elements"),
    ({"messages": "hello"}, "messages is a JSON string"),
    ({"messages": ["hello"]}, "messages[0] is a JSON string"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content has 0"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "content[0].type is 'image_url'"),
    ({"messages": [{"role": "user", "content": "x", "audio": 1}]}, "messages[0].audio is not a member"),
    ({"messages": MESSAGES * 4097}, "messages has 4097"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": True}, "max_tokens is true"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens is 1000000000"),
    ({"temperature": 3}, "temperature is 3"),
    ({"top_p": -1}, "top_p is -1"),
    ({"n": 0}, "n is 0"),
    ({"stop": [""]}, "stop[0] has 0"),
    ({"stop": 3}, "stop is a JSON number"),
    ({"seed": -1}, "seed is -1"),
    ({"stream": "yes"}, "stream is 'yes'"),
    ({"stream_options": {"x": 1}}, "stream_options.x is not a member"),
    ({"logprobs": 5}, "logprobs is 5"),
    ({"top_logprobs": 3}, "top_logprobs is 3, which is not supported"),
    ({"tools": [{"type": "function"}]}, "tools is a JSON array, which is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format is a JSON object"),
    ({"presence_penalty": 0.5}, "presence_penalty is 0.5"),
    ({"ignore_eos": True}, "ignore_eos is true"),
    ({"prompt": "x"}, "body.prompt is not a member"),
    ({"model": 3}, "model is 3"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "text"), BAD)
def test_a_fault_is_refused_by_the_name_of_its_field(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(**fields)
    assert text in caught.value.message, caught.value.message


@pytest.mark.parametrize("path", [SAMPLE, STREAM])
def test_a_wrong_body_is_refused_before_anything_runs(world: World, path: str) -> None:
    bodies: list[bytes | dict[str, Any]] = [
        b"",
        b"{",
        b"[]",
        {"messages": []},
        {"messages": MESSAGES, "max_tokens": 0},
    ]
    for body in bodies:
        status, headers, _ = world.call("POST", path, body)
        assert (status, headers["x-amzn-errortype"]) == (400, "ValidationException")
    assert world.meter.submits == []


# --- whole answers -------------------------------------------------------------------------------


def test_an_answer_has_the_openai_shape(world: World) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "n": 2, "model": "my-model", "logprobs": True}
    status, headers, content = world.call("POST", SAMPLE, body)
    answer = json.loads(content)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "my-model"
    assert answer["id"].startswith("chatcmpl-")
    assert abs(answer["created"] - time.time()) < 60
    first, second = answer["choices"]
    assert first["message"] == {"role": "assistant", "content": "Hello there, you"}
    assert (first["index"], second["index"], first["finish_reason"]) == (0, 1, "stop")
    told = first["logprobs"]["content"]
    assert [each["token"] for each in told] == ["token_id:5", "token_id:6", "token_id:2"]
    assert told[2]["logprob"] < -1e38, "minus infinity has no JSON"
    assert answer["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 6,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_official_client_reads_the_answer(world: World) -> None:
    body = json.dumps({"messages": MESSAGES}).encode()
    answer = world.client().sample_training_session(
        trainingSessionName="run-1", contentType="application/json", body=body
    )
    assert answer["contentType"] == "application/json"
    content = answer["body"].read() if hasattr(answer["body"], "read") else answer["body"]
    assert json.loads(content)["choices"][0]["message"]["content"] == "Hello there, you"
    (submit,) = world.meter.submits
    assert isinstance(submit.operation, Sample)
    assert submit.operation.adapter is None
    assert submit.key == world.keys["acme"]


@pytest.mark.parametrize("path", [SAMPLE, STREAM])
def test_a_package_is_named_by_a_header(world: World, path: str) -> None:
    world.ledger.checkpoints["acme", "runs", 1] = checkpoint(1, "weights")
    for arn, expected in ((package_arn(1), 200), (package_arn(2), 400), ("x" * 3000, 400)):
        headers = {"X-Amzn-SageMaker-Model-Package": arn}
        assert world.call("POST", path, {"messages": MESSAGES}, headers)[0] == expected
    (submit,) = world.meter.submits
    assert isinstance(submit.operation, Sample)
    assert submit.operation.adapter is not None
    assert submit.operation.adapter.name == package_arn(1)


def test_stream_true_belongs_to_the_other_operation(world: World) -> None:
    status, _, body = world.call("POST", SAMPLE, {"messages": MESSAGES, "stream": True})
    assert status == 400
    assert "SampleTrainingSessionWithResponseStream" in json.loads(body)["message"]


def test_a_failed_answer_is_an_error_of_the_operation(world: World) -> None:
    world.meter.state = "Failed"
    status, headers, _ = world.call("POST", SAMPLE, {"messages": MESSAGES})
    assert (status, headers["x-amzn-errortype"]) == (500, "InternalServerException")


def test_an_answer_is_waited_for_longer_than_a_poll_is_held(world: World) -> None:
    world.meter.state = "InProgress"
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(world.call("POST", SAMPLE, {"messages": MESSAGES}))
    )
    thread.start()
    while world.meter.doors.count("GET 1") < 3:
        time.sleep(0.01)
    world.meter.state = "Completed"
    thread.join(10)
    assert found[0][0] == 200


# --- streams -------------------------------------------------------------------------------------


def test_a_stream_is_chunks_then_usage_then_done(world: World) -> None:
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    status, headers, content = world.call("POST", STREAM, body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(content)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    pieces = [choice["delta"].get("content", "") for c in chunks for choice in c["choices"]]
    assert "".join(pieces) == "Hello there, you"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["usage"]["prompt_tokens"] == 9
    assert world.meter.streams_open == 0


def test_a_stream_names_tokens_if_asked(world: World) -> None:
    _, _, content = world.call("POST", STREAM, {"messages": MESSAGES, "logprobs": True})
    told = [
        entry["token"]
        for chunk in events(content)[:-1]
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert told == ["token_id:10", "token_id:11", "token_id:12"]


@pytest.mark.parametrize("cut", [1, -1])
def test_a_stream_that_breaks_says_so_and_does_not_say_done(world: World, cut: int) -> None:
    world.meter.cut_stream_after = cut
    status, _, content = world.call("POST", STREAM, {"messages": MESSAGES})
    assert status == 200
    *_, text, last = events(content)
    assert text["choices"][0]["delta"]["content"] == "Hello"
    assert last["error"]["code"] == "unavailable"
    assert last["error"]["message"]
    assert b"[DONE]" not in content


def test_what_fails_before_the_first_token_is_an_ordinary_error(world: World) -> None:
    world.meter.cut_stream_after = 0
    status, headers, _ = world.call("POST", STREAM, {"messages": MESSAGES})
    assert (status, headers["x-amzn-errortype"]) == (503, "InternalServerException")
    world.meter.fault = OverloadedError("too many")
    assert world.call("POST", STREAM, {"messages": MESSAGES})[0] == 429
    world.meter.fault = UnavailableError("away")
    assert world.call("POST", STREAM, {"messages": MESSAGES})[0] == 503
    world.meter.fault = None
    world.meter.attempts.clear()
    assert world.call("POST", STREAM, {"messages": MESSAGES})[0] == 503
    assert world.meter.streams_open == 0


def test_a_stream_that_a_budget_cuts_short_says_why(world: World) -> None:
    world.meter.budget = Problem(code="budget_exhausted", message="the budget affords 3 tokens")
    status, _, content = world.call("POST", STREAM, {"messages": MESSAGES})
    assert status == 200
    last = events(content)[-3]
    assert last["choices"][0]["finish_reason"]
    assert last["budget"] == {
        "code": "budget_exhausted", "message": "the budget affords 3 tokens"
    }  # fmt: skip
    assert b"[DONE]" in content
    world.meter.budget = None
    _, _, content = world.call("POST", STREAM, {"messages": MESSAGES})
    assert all("budget" not in chunk for chunk in events(content))


def test_a_chat_that_no_budget_affords_is_told_at_once(world: World) -> None:
    world.meter.fault = BudgetExhaustedError("budget acme/tenant has 0 tokens left")
    for path in (STREAM, SAMPLE):
        status, headers, body = world.call("POST", path, {"messages": MESSAGES})
        assert (status, headers["x-amzn-errortype"]) == (429, "ThrottlingException")
        assert "acme/tenant" in json.loads(body)["message"]
    world.meter.fault = None
    world.call("POST", SAMPLE, {"messages": MESSAGES})
    assert not world.meter.submits[-1].may_wait


def test_a_stream_holds_one_answer(world: World) -> None:
    status, _, body = world.call("POST", STREAM, {"messages": MESSAGES, "n": 2})
    assert status == 400
    assert "n is 2" in json.loads(body)["message"]


def test_a_client_that_leaves_ends_the_stream_at_the_meter(world: World) -> None:
    world.meter.never_ends = True
    connection = open_connection(world, STREAM, {"messages": MESSAGES})
    assert connection.getresponse().readline().startswith(b"data: ")
    assert world.meter.streams_open == 1
    assert connection.sock is not None
    connection.sock.close()
    connection.close()
    deadline = time.monotonic() + 10
    while world.meter.streams_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert world.meter.streams_open == 0


def test_a_client_that_leaves_ends_the_poll_at_the_meter(world: World) -> None:
    """A result that nobody reads must not be claimed."""
    world.meter.hold_polls = True
    connection = open_connection(world, SAMPLE, {"messages": MESSAGES})
    while not world.meter.polls_held:
        time.sleep(0.01)
    assert connection.sock is not None
    connection.sock.close()
    connection.close()
    deadline = time.monotonic() + 10
    while world.meter.polls_held and time.monotonic() < deadline:
        time.sleep(0.01)
    assert world.meter.polls_held == 0


def open_connection(world: World, path: str, body: Any) -> http.client.HTTPConnection:
    """A signed request sent, its answer not read."""
    data = json.dumps(body).encode()
    request = AWSRequest(method="POST", url=world.url + path, data=data)
    key_id = world.keys["acme"]
    SigV4Auth(Credentials(key_id, f"secret-of-{key_id}"), "sagemaker", REGION).add_auth(request)
    parts = urlsplit(world.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
    connection.request("POST", path, body=data, headers=dict(request.headers.items()))
    return connection


def test_a_sample_without_text_still_has_a_content(world: World) -> None:
    def textless(operation: Operation) -> Result:
        assert isinstance(operation, Sample)
        return fake_answer(
            Sample(
                prompt=None,
                messages=operation.messages,
                num_samples=1,
                params=operation.params,
                include_prompt_logprobs=False,
                topk_prompt_logprobs=0,
                include_text=False,
                adapter=None,
            )
        )

    world.meter.result = textless
    _, _, content = world.call("POST", SAMPLE, {"messages": MESSAGES})
    assert json.loads(content)["choices"][0]["message"]["content"] == ""
