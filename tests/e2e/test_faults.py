"""Lost answers, a silent ledger, a cut stream and two sessions at once: one bill, one result."""

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sagemaker.train.training_session as sdk
from gristmill_testing.instance import RunningGristmill

from gristmill_contracts.limits import STREAM_FLUSH_TOKENS
from gristmill_testing.faulty_proxy import FaultyProxy, faulty_proxy
from gristmill_testing.raw_wire import ROLE_ARN, Clients, create_session, raw_clients, wait_until
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


def expect_usage(instance: RunningGristmill, name: str, **tokens: int) -> None:
    expected = {**NOTHING, **tokens}
    wait_until(lambda: instance.usage_by_api(name) == expected, f"{name} to cost {expected}", 30)


# --- lost answers --------------------------------------------------------------------------------


def test_a_lost_answer_to_a_training_submit_runs_it_once(
    proxy: FaultyProxy, lossy_client: sdk.TrainingClient, instance: RunningGristmill
) -> None:
    fault = proxy.lose_answer(r"^POST /v1/training-sessions/[^/]+/operations ", times=2)
    losses = [step(lossy_client) for _ in range(3)]
    assert fault.hits == 2
    assert losses[2] < losses[0]
    expect_usage(instance, lossy_client.training_session_name, train=3 * sum(map(len, TOKENS)))
    assert instance.operations_run(lossy_client.training_session_name, "forward_backward") == 3


def test_a_lost_answer_to_a_sampling_submit_runs_it_twice_and_bills_it_once(
    proxy: FaultyProxy, lossy_client: sdk.TrainingClient, instance: RunningGristmill
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
    expect_usage(instance, name, prefill=3, sample=tokens)
    lossy_client.stop()
    wait_until(
        lambda: instance.attempts(name) == 1, "the unclaimed run to be kept as an attempt", 30
    )
    expect_usage(instance, name, prefill=3, sample=tokens)


def test_a_lost_answer_to_a_poll_is_asked_for_again_and_billed_once(
    proxy: FaultyProxy, lossy_client: sdk.TrainingClient, instance: RunningGristmill
) -> None:
    sampler = lossy_client.create_sampling_client()
    fault = proxy.lose_answer(r"^GET /v1/training-sessions/[^/]+/sampling-operations/", times=2)
    answer = sampler.sample([7, 11], num_samples=2, sampling_params={"max_tokens": 512}).result()
    assert fault.hits == 2
    tokens = sum(len(sequence.tokens) for sequence in answer.sequences)
    expect_usage(
        instance, lossy_client.training_session_name, prefill=2, cached_prefill=2, sample=tokens
    )


# --- the ledger away -----------------------------------------------------------------------------


def test_a_silent_ledger_holds_nobody_up_and_learns_everything_later(
    client: sdk.TrainingClient, instance: RunningGristmill
) -> None:
    step(client)
    with silent(instance, "ledger"):
        losses = [step(client) for _ in range(5)]
    assert losses[-1] < losses[0]
    expect_usage(instance, client.training_session_name, train=6 * sum(map(len, TOKENS)))


# --- streams -------------------------------------------------------------------------------------


def test_a_stream_whose_worker_dies_is_billed_for_what_was_sent_and_at_most_one_frame_more(
    clients: Clients, instance: RunningGristmill
) -> None:
    session = create_session(clients, instance.model)
    body = {
        "messages": [{"role": "user", "content": "a b"}],
        "max_tokens": STREAM_TOKENS,
        "seed": 9,
        "logprobs": True,
    }
    stream = session.chat_stream(body)
    lines: list[str] = []
    for line in stream.iter_lines():
        lines.append(line.decode())
        if len(lines) == 6:
            instance.kill("worker")
    assert "data: [DONE]" not in lines
    assert any('"error"' in line for line in lines)
    received = _logprobs_received(lines)
    assert 0 < received < STREAM_TOKENS
    wait_until(
        lambda: instance.usage_by_api(session.name)["sample"] > 0, "the cut stream to be billed", 30
    )
    billed = instance.usage_by_api(session.name)["sample"]
    assert received <= billed <= received + STREAM_FLUSH_TOKENS
    session.stop()
    assert instance.usage_by_api(session.name)["sample"] == billed


def _logprobs_received(lines: list[str]) -> int:
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    return sum(
        len((choice.get("logprobs") or {}).get("content") or [])
        for chunk in chunks
        for choice in chunk.get("choices", [])
    )


def test_a_stream_whose_client_is_cut_off_is_billed_for_no_less_than_it_received(
    proxy: FaultyProxy, instance: RunningGristmill
) -> None:
    session = create_session(
        raw_clients({**instance.environment, RUNTIME_ENDPOINT: proxy.url}), instance.model
    )
    proxy.lose_answer(
        r"^POST /training-sessions/[^/]+/sample-with-response-stream ", pass_bytes=3000
    )
    body = {
        "messages": [{"role": "user", "content": "a b"}],
        "max_tokens": STREAM_TOKENS,
        "seed": 9,
        "logprobs": True,
    }
    stream = session.chat_stream(body)
    lines: list[str] = []
    with pytest.raises(Exception, match=r"(?i)connection|incomplete|reset|broken"):
        lines.extend(line.decode() for line in stream.iter_lines())
    session.stop()
    billed = instance.usage_by_api(session.name)["sample"]
    assert 0 < _logprobs_received(lines) <= billed


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
