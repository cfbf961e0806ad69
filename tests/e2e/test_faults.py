"""Lost answers, a silent ledger, a cut stream and two sessions at once: one bill, one result."""

import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import sagemaker.train.training_session as sdk
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.exceptions import HTTPClientError

from gristmill_contracts.limits import STREAM_FLUSH_TOKENS
from gristmill_testing.books import Books
from gristmill_testing.crash_campaign import PARTS
from gristmill_testing.faulty_proxy import FaultyProxy, faulty_proxy
from gristmill_testing.instance import RunningGristmill
from gristmill_testing.raw_wire import (
    ROLE_ARN,
    Clients,
    RawSession,
    create_session,
    raw_clients,
    wait_until,
)
from gristmill_testing.sdk_loop import TOKENS, batch, step

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("recorded")]

RUNTIME_ENDPOINT = "SAGEMAKER_TRAINING_SESSION_RUNTIME_ENDPOINT"
NOTHING = {"prefill": 0, "cached_prefill": 0, "sample": 0, "train": 0}
STREAM_TOKENS = 400


@pytest.fixture
def proxy(instance: RunningGristmill) -> Iterator[FaultyProxy]:
    with faulty_proxy(instance.url) as proxy:
        yield proxy


@pytest.fixture
def lossy_client(
    proxy: FaultyProxy,
    sdk_environment: dict[str, str],
    base_model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[sdk.TrainingClient]:
    """The official SDK, whose runtime calls go through the relay."""
    monkeypatch.setenv(RUNTIME_ENDPOINT, proxy.url)
    service = sdk.ServiceClient(role_arn=ROLE_ARN)
    with service.create_lora_training_client(base_model, rank=4, alpha=8) as client:
        yield client


@contextmanager
def silent(instance: RunningGristmill, part: str) -> Iterator[None]:
    """Stop a process without ending it: connections hang, as on a machine that is frozen."""
    pid = instance.pid_of(part)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def expect_usage(books: Books, name: str, **tokens: int) -> None:
    books.expect(name, {**NOTHING, **tokens})


# --- lost answers --------------------------------------------------------------------------------


def test_a_lost_answer_to_a_training_submit_runs_it_once(
    proxy: FaultyProxy, lossy_client: sdk.TrainingClient, books: Books
) -> None:
    fault = proxy.lose_answer(r"^POST /v1/training-sessions/[^/]+/operations ", times=2)
    losses = [step(lossy_client) for _ in range(3)]
    assert fault.hits == 2
    assert losses[2] < losses[0]
    expect_usage(books, lossy_client.training_session_name, train=3 * sum(map(len, TOKENS)))
    assert books.operations(lossy_client.training_session_name, operation="forward_backward") == 3


def test_a_lost_answer_to_a_sampling_submit_runs_it_twice_and_bills_it_once(
    proxy: FaultyProxy, lossy_client: sdk.TrainingClient, books: Books
) -> None:
    name = lossy_client.training_session_name
    fault = proxy.lose_answer(r"^POST /v1/training-sessions/[^/]+/sampling-operations ")
    answer = (
        lossy_client.create_sampling_client()
        .sample([7, 11, 13], sampling_params={"max_tokens": 512})
        .result()
    )
    assert fault.hits == 1
    tokens = len(answer.sequences[0].tokens)
    expect_usage(books, name, prefill=3, sample=tokens)
    lossy_client.stop()
    wait_until(
        lambda: books.operations(name, kind="attempt") == 1,
        "the unclaimed run to be kept as an attempt",
        30,
    )
    expect_usage(books, name, prefill=3, sample=tokens)


def test_a_lost_answer_to_a_poll_is_asked_for_again_and_billed_once(
    proxy: FaultyProxy, lossy_client: sdk.TrainingClient, books: Books
) -> None:
    sampler = lossy_client.create_sampling_client()
    fault = proxy.lose_answer(r"^GET /v1/training-sessions/[^/]+/sampling-operations/", times=2)
    answer = sampler.sample([7, 11], num_samples=2, sampling_params={"max_tokens": 512}).result()
    assert fault.hits == 2
    tokens = sum(len(sequence.tokens) for sequence in answer.sequences)
    expect_usage(
        books, lossy_client.training_session_name, prefill=2, cached_prefill=2, sample=tokens
    )


@pytest.mark.parametrize("part", PARTS)
def test_a_sample_survives_a_kill_with_the_same_tokens_and_one_bill(
    part: str, client: sdk.TrainingClient, instance: RunningGristmill, books: Books
) -> None:
    sampler = client.create_sampling_client()
    params = {"max_tokens": 512, "seed": 11, "temperature": 0.5}
    calm = sampler.sample([7, 11, 13], num_samples=8, sampling_params=params).result()
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = sampler.sample([7, 11, 13], num_samples=8, sampling_params=params)
        assert future.operation_id
        waiting = pool.submit(future.result)
        instance.kill(part)
        assert not waiting.done(), "the kill came too late to land inside the operation"
        assert waiting.result() == calm
    sampled = sum(len(sequence.tokens) for sequence in calm.sequences)
    name = client.training_session_name
    expect_usage(books, name, prefill=6, cached_prefill=42, sample=2 * sampled)


# --- the ledger away -----------------------------------------------------------------------------


def test_a_silent_ledger_holds_nobody_up_and_learns_everything_later(
    client: sdk.TrainingClient, instance: RunningGristmill, books: Books
) -> None:
    step(client)
    with silent(instance, "ledger"):
        losses = [step(client) for _ in range(5)]
    assert losses[-1] < losses[0]
    expect_usage(books, client.training_session_name, train=6 * sum(map(len, TOKENS)))


# --- streams -------------------------------------------------------------------------------------


def _long_stream(session: RawSession) -> dict[str, Any]:
    """A chat body whose answer is long enough to be cut: most seeds of a random model end early."""
    for seed in range(50):
        body = {
            "messages": [{"role": "user", "content": "a b"}],
            "max_tokens": STREAM_TOKENS,
            "seed": seed,
            "logprobs": True,
        }
        if session.chat(body)["usage"]["completion_tokens"] == STREAM_TOKENS:
            return body
    raise AssertionError(f"no seed gives {STREAM_TOKENS} tokens")


def _tokens_received(lines: list[str]) -> int:
    """Tokens of the chunks that arrived whole, by their log-probabilities."""
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    return sum(
        len((choice.get("logprobs") or {}).get("content") or [])
        for chunk in chunks
        for choice in chunk.get("choices", [])
    )


@pytest.mark.parametrize("part", ["worker", "meter"])
def test_a_stream_that_dies_is_billed_for_what_was_sent_and_at_most_one_frame_more(
    part: str, clients: Clients, instance: RunningGristmill, books: Books
) -> None:
    session = create_session(clients, instance.model)
    body = _long_stream(session)
    before = session.describe()["BillableTokenUsage"]["SampleTokenCount"]
    lines: list[str] = []
    for line in session.chat_stream(body).iter_lines():
        lines.append(line.decode())
        if len(lines) == 6:
            instance.kill(part)
    assert "data: [DONE]" not in lines
    assert any('"error"' in line for line in lines)
    received = _tokens_received(lines)
    assert 0 < received < STREAM_TOKENS
    wait_until(
        lambda: books.usage(session.name)["sample"] > before, "the cut stream to be billed", 30
    )
    session.stop()
    assert (
        received <= books.usage(session.name)["sample"] - before <= received + STREAM_FLUSH_TOKENS
    )


def test_a_stream_whose_client_is_cut_off_is_billed_for_no_less_than_it_received(
    proxy: FaultyProxy, instance: RunningGristmill, books: Books
) -> None:
    environment = {**instance.environment, RUNTIME_ENDPOINT: proxy.url}
    session = create_session(raw_clients(environment), instance.model)
    body = _long_stream(session)
    proxy.lose_answer(
        r"^POST /training-sessions/[^/]+/sample-with-response-stream ", pass_bytes=4000
    )
    before = session.describe()["BillableTokenUsage"]["SampleTokenCount"]
    lines: list[str] = []
    with pytest.raises((HTTPClientError, BotoConnectionError)):
        lines.extend(line.decode() for line in session.chat_stream(body).iter_lines())
    session.stop()
    billed = books.usage(session.name)["sample"] - before
    assert 0 < _tokens_received(lines) <= billed <= STREAM_TOKENS


# --- two sessions --------------------------------------------------------------------------------


def test_two_interleaved_sessions_equal_two_separate_runs(
    service: sdk.ServiceClient, client: sdk.TrainingClient
) -> None:
    start = client.save_state().result().model_package_arn
    assert start is not None
    resume = service.create_training_client_from_state_with_optimizer
    alone = []
    for name in ("one", "two"):
        with resume(start) as single:
            alone.append([_end(_begin(single, rows)) for rows in _turns(name)])
    together: list[list[Any]] = [[], []]
    with resume(start) as one, resume(start) as two:
        for first, second in zip(_turns("one"), _turns("two"), strict=True):
            begun = [_begin(one, first), _begin(two, second)]
            for results, pending in zip(together, begun, strict=True):
                results.append(_end(pending))
    assert together == alone
    assert alone[0] != alone[1]


def _turns(name: str) -> list[list[list[int]]]:
    rng = random.Random(name)
    return [[rng.choices(range(5, 60), k=rng.randint(3, 12)) for _ in range(3)] for _ in range(6)]


def _begin(client: sdk.TrainingClient, rows: list[list[int]]) -> list[sdk.APIFuture[Any]]:
    """A pass in two parts, a step and a score, all in flight at once."""
    return [
        client.forward_backward(batch(rows[:1])),
        client.forward_backward(batch(rows[1:])),
        client.optim_step(sdk.AdamParams(learning_rate=1e-2)),
        client.forward(batch(rows)),
    ]


def _end(futures: list[sdk.APIFuture[Any]]) -> list[Any]:
    """Everything that came back."""
    results = [future.result() for future in futures]
    return [(result.metrics, getattr(result, "loss_fn_outputs", None)) for result in results]
