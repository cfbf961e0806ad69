"""Token streams: durable before they leave, settled wherever they are cut."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from gristmill_contracts import limits
from gristmill_contracts import operations as ops
from gristmill_contracts.errors import ConflictError, InvalidRequestError
from gristmill_contracts.http import StreamChunk
from gristmill_contracts.usage import Counts
from gristmill_meter.streams import split_chunk
from gristmill_testing.fake_worker import sample_tokens
from gristmill_testing.meter_world import World, compute_logprobs, make_submit, sample


async def test_f04_f06_a_stream_carries_every_token_once_and_is_billed_at_its_end(
    world: World,
) -> None:
    operation = sample(prompt=5, tokens=18)
    chunks = await world.read_stream(operation)
    assert [token for chunk in chunks for token in chunk.tokens] == sample_tokens(operation, 0)
    assert [chunk.final for chunk in chunks] == [None] * 4 + ["length"]
    assert {chunk.number for chunk in chunks} == {1}
    await world.settled()
    (event,) = world.ledger.events
    assert (event.outcome, event.counts) == ("completed", Counts(prefill=5, sample=18))
    view = await world.poll("log", 1)
    assert isinstance(view.result, ops.SampleResult)
    assert view.result.sequences[0].tokens.tolist() == sample_tokens(operation, 0)
    await world.settled()
    assert len(world.ledger.events) == 1


async def test_every_flush_was_durable_before_it_left(world: World) -> None:
    async def check(chunks: int) -> None:
        record = world.session.state.records["log", 1]
        assert record.progress_tokens >= min(4 * chunks, 12)
        assert world.disk.crash().files.keys() == world.disk.files.keys()
        seen = sum(len(content) for content in durable_progress(world))
        assert seen >= 4 * chunks

    def durable_progress(world: World) -> list[bytes]:
        segment = world.disk.crash().files[f"{world.session.state.uid}/log-00000001.seg"]
        progress = segment.content.count(b"progress") * 4
        final = 4 if b"\xa6result" in segment.content else 0
        return [b"x" * progress, b"x" * final]

    await world.read_stream(sample(prompt=5, tokens=16), check)


async def test_f20_a_client_that_leaves_pays_for_what_was_durable_and_the_worker_stops(
    world: World,
) -> None:
    submit = make_submit(None, sample(prompt=5, tokens=400))
    source = await world.driver.stream(submit, msgspec.msgpack.encode(submit.operation))
    received = 0
    async for chunk in source:
        received += len(chunk.tokens)
        if received >= 20:
            break
    await source.aclose()
    await world.settled()
    (event,) = world.ledger.events
    assert (event.outcome, event.kind) == ("aborted", "usage")
    assert event.counts is not None
    assert event.counts.prefill == 5
    # One chunk may wait for the reader and one be on its way to it.
    assert received <= event.counts.sample <= received + 8
    assert world.worker.streams_closed == 1
    assert (await world.poll("log", 1)).state == "Failed"


async def test_a_client_that_leaves_before_the_first_token_pays_nothing(world: World) -> None:
    gate = asyncio.Event()
    world.worker.before_chunk = lambda number: gate.wait()
    submit = make_submit(None, sample())
    source = await world.driver.stream(submit, msgspec.msgpack.encode(submit.operation))
    reading = asyncio.create_task(anext(source))
    await world.until(lambda: world.worker.calls["stream"] == 1)
    reading.cancel()
    await asyncio.wait([reading])
    await source.aclose()
    await world.settled()
    assert world.ledger.events == []
    assert (await world.poll("log", 1)).state == "Failed"


async def test_a_worker_that_dies_in_the_middle_ends_the_stream_with_an_error(
    world: World,
) -> None:
    def kill(number: int) -> None:
        if number == 3:
            world.worker.kill()

    world.worker.before_chunk = kill
    chunks = await world.read_stream(sample(prompt=5, tokens=40))
    assert [len(chunk.tokens) for chunk in chunks] == [4, 4, 4, 0]
    assert chunks[-1].error is not None
    assert "cut after 12 tokens" in chunks[-1].error.message
    await world.settled()
    (event,) = world.ledger.events
    assert (event.outcome, event.counts) == ("aborted", Counts(prefill=5, sample=12))


async def test_f22_an_error_text_of_the_worker_is_never_billed(world: World) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise ConflictError("a very long text about what went wrong")

    world.worker.before_chunk = fail
    chunks = await world.read_stream(sample(prompt=5, tokens=40))
    assert chunks[-1].error is not None
    await world.settled()
    assert world.ledger.billed() == Counts(prefill=5, sample=8)


async def test_a_stream_waits_for_a_worker_that_is_away(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.worker.down = True
    await world.start()
    reading = asyncio.create_task(world.read_stream(sample(tokens=4)))
    await world.until(lambda: world.worker.calls["open_session"] >= 2)
    world.worker.down = False
    assert (await reading)[-1].final == "length"


async def test_a_client_that_reads_nothing_is_cut_in_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STREAM_STALL_S", 0.05)
    submit = make_submit(None, sample(prompt=5, tokens=400))
    source = await world.driver.stream(submit, msgspec.msgpack.encode(submit.operation))
    await anext(source)
    await world.settled()
    (event,) = world.ledger.events
    assert event.outcome == "aborted"
    assert world.worker.streams_closed == 1
    await source.aclose()


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(sample(samples=2), id="two samples"),
        pytest.param(compute_logprobs(), id="scoring"),
    ],
)
async def test_only_single_samples_are_streamed(world: World, operation: ops.Operation) -> None:
    submit = make_submit(None, operation)
    with pytest.raises(InvalidRequestError, match="num_samples 1"):
        await world.driver.stream(submit, msgspec.msgpack.encode(operation))
    assert world.session.state.log_number == 0


async def test_a_stream_cannot_be_read_twice(world: World) -> None:
    submit = make_submit(None, sample(), token="once")
    encoded = msgspec.msgpack.encode(submit.operation)
    async for _ in await world.driver.stream(submit, encoded):
        pass
    with pytest.raises(ConflictError, match="cannot be read twice"):
        await world.driver.stream(submit, encoded)


def test_large_chunks_are_split_and_text_and_end_go_last() -> None:
    chunk = StreamChunk(
        tokens=list(range(10)), logprobs=[0.5] * 10, text="abc", prompt_tokens=4, final="stop"
    )
    pieces = split_chunk(chunk, 4)
    assert [piece.tokens for piece in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [piece.text for piece in pieces] == ["", "", "abc"]
    assert [piece.final for piece in pieces] == [None, None, "stop"]
    assert sum(len(piece.logprobs) for piece in pieces) == 10
