"""What a worker ran of a session is told to the token: by kind, by opening, without replays."""

from typing import Any

import msgspec
import pytest

from gristmill_contracts import operations as ops
from gristmill_contracts.http import Execute, Executed, StreamChunk
from gristmill_contracts.reconciliation import STREAM_KIND, Tally, tally_of
from gristmill_testing.local_runner import Client, datum, sample, step
from gristmill_worker.stream import TokenStream
from gristmill_worker.tallies import Book

FORWARD = ops.Forward(
    loss="cross_entropy",
    loss_config={},
    datums=[ops.Datum(ops.tensor("int64", [1, 2, 3]), {})],
)
SCORED = ops.ForwardResult(outputs=[], metrics={})


def call(opening: int, operation: Any = FORWARD, **changes: Any) -> Execute:
    return Execute(index=1, op_id="s/train/1", operation=operation, opening=opening, **changes)


def test_completed_runs_are_added_up_by_kind() -> None:
    book = Book()
    opening = book.opened("s")
    for device_us in (5, 7):
        book.ran("s", call(opening), SCORED, device_us)
    told = book.told()["s"]
    assert told.opening == opening
    assert told.ran == {"forward": Tally(2, train=6, device_us=12)}


def test_a_stream_is_counted_apart() -> None:
    book = Book()
    opening = book.opened("s")
    sample = ops.Sample(
        prompt=ops.tensor("int64", [1, 2]), messages=None, num_samples=1,
        params=ops.SamplingParams(
            max_tokens=3, temperature=1.0, top_k=-1, top_p=1.0, seed=1, stop=None
        ),
        include_prompt_logprobs=False, topk_prompt_logprobs=0, include_text=False, adapter=None,
    )  # fmt: skip
    tokens = ops.tensor("int64", [7, 8, 9])
    sequence = ops.SampledSequence(tokens=tokens, logprobs=tokens, stop_reason="length", text=None)
    result = ops.SampleResult(
        sequences=[sequence], prompt_logprobs=None, topk_prompt_logprobs=None, prompt_tokens=2
    )
    book.ran("s", call(opening, sample), result, 1)
    book.ran("s", call(opening, sample), result, 1, stream=True)
    one = Tally(1, prefill=2, sample=3, device_us=1)
    assert book.told()["s"].ran == {"sample": one, STREAM_KIND: one}


@pytest.mark.parametrize("why", ["failed", "replay", "earlier opening", "never opened", "closed"])
def test_what_did_not_complete_here_and_now_is_not_counted(why: str) -> None:
    book = Book()
    opening = book.opened("s")
    result = None if why == "failed" else SCORED
    sent = call(opening, replay=why == "replay")
    if why == "earlier opening":
        opening = book.opened("s")
    if why == "closed":
        book.closed("s")
    book.ran("other" if why == "never opened" else "s", sent, result, 1)
    assert {uid: each.ran for uid, each in book.told().items()} == (
        {} if why == "closed" else {"s": {}}
    )


def test_openings_are_told_apart_in_one_process() -> None:
    book = Book()
    assert [book.opened("s"), book.opened("t"), book.opened("s")] == [1, 2, 3]


def test_what_was_told_does_not_change_later() -> None:
    book = Book()
    opening = book.opened("s")
    before = book.told()
    book.ran("s", call(opening), SCORED, 1)
    assert before["s"].ran == {}


# --- a real runner -------------------------------------------------------------------------------


def told(client: Client) -> dict[str, Tally]:
    """Without the time that it took."""
    ran = client.runner.book.told()[client.uid].ran
    return {kind: msgspec.structs.replace(each, device_us=0) for kind, each in ran.items()}


def test_a_runner_tells_what_its_answers_say(client: Client) -> None:
    opening = client.open().opening
    datums = [datum([1, 2, 3, 4]), datum([5, 6, 7])]
    train = ops.ForwardBackward(loss="cross_entropy", loss_config={}, datums=datums)
    expected: dict[str, Tally] = {}
    device_us = 0
    for operation in (
        train,
        step(1e-2),
        sample([1, 2, 3]),
        sample([1, 2, 3], num_samples=2),
        train,
    ):
        executed = client.executed(operation, opening=opening)
        assert executed.result is not None
        one = tally_of(ops.count_result(operation, executed.result))
        kind = ops.kind_of(operation)
        expected[kind] = expected.get(kind, Tally()) + one
        device_us += executed.wall_us
    assert told(client) == expected
    assert expected["forward_backward"] == Tally(2, train=14)
    ran = client.runner.book.told()[client.uid].ran
    assert sum(each.device_us for each in ran.values()) == device_us


def test_a_runner_counts_no_replay_and_begins_anew_when_it_is_opened(client: Client) -> None:
    opening = client.open().opening
    train = ops.ForwardBackward(loss="cross_entropy", loss_config={}, datums=[datum([1, 2, 3])])
    client.executed(train, opening=opening, replay=True)
    assert told(client) == {}
    client.executed(train, opening=opening)
    assert told(client) == {"forward_backward": Tally(1, train=3)}
    assert client.open().opening > opening
    assert told(client) == {}


def test_a_stream_is_counted_before_its_last_chunk_leaves(client: Client) -> None:
    """Whoever has the last chunk and asks then must find it counted."""
    opening = client.open().opening
    operation = sample([1, 2, 3])
    seen: list[int] = []

    def emit(chunk: StreamChunk) -> bool:
        if chunk.final is not None:
            seen.append(told(client)[STREAM_KIND].operations)
        return True

    call = Execute(index=0, op_id=f"{client.uid}/log/1", operation=operation, opening=opening)
    answers: list[Executed] = []
    tokens = TokenStream(client.runner.base, operation, emit)
    client.runner.begin(client.uid, call, answers.append, tokens)
    while not answers:
        client.runner.sampler.turn()
    assert seen == [1]
