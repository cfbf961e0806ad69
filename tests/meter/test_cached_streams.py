"""Streams whose prompt was partly in the worker's prefix cache: what they are billed for."""

import msgspec
import pytest

from gristmill_contracts import operations as ops
from gristmill_contracts.http import StreamChunk
from gristmill_contracts.usage import Counts
from gristmill_meter.streams import split_chunk
from gristmill_testing.meter_world import World, make_submit, sample


@pytest.fixture
def caching(world: World) -> World:
    """The worker finds three tokens of every prompt in its cache."""
    world.worker.cached_tokens = 3
    return world


async def test_a_stream_is_billed_for_cached_tokens_as_such(caching: World) -> None:
    chunks = await caching.read_stream(sample(prompt=5, tokens=18))
    assert {chunk.cached_tokens for chunk in chunks} == {3}
    await caching.settled()
    (event,) = caching.ledger.events
    assert event.counts == Counts(prefill=2, cached_prefill=3, sample=18)
    view = await caching.poll("log", 1)
    assert isinstance(view.result, ops.SampleResult)
    assert (view.result.prompt_tokens, view.result.cached_tokens) == (5, 3)


async def test_a_stream_that_was_cut_is_billed_for_cached_tokens_as_such(caching: World) -> None:
    submit = make_submit(None, sample(prompt=5, tokens=400))
    source = await caching.driver.stream(submit, msgspec.msgpack.encode(submit.operation))
    async for _ in source:
        break
    await source.aclose()
    await caching.settled()
    (event,) = caching.ledger.events
    assert (event.counts.prefill, event.counts.cached_prefill) == (2, 3)
    assert event.counts.sample >= 1


def test_every_piece_of_a_split_chunk_tells_what_was_cached() -> None:
    chunk = StreamChunk(
        tokens=list(range(10)), logprobs=[0.5] * 10, text="", prompt_tokens=4, cached_tokens=2
    )
    assert {piece.cached_tokens for piece in split_chunk(chunk, 4)} == {2}


def test_a_group_counts_every_prompt_token_once_as_prefill_or_cached() -> None:
    """Four samples of a prompt of 600, of which 512 were found."""
    operation = msgspec.structs.replace(sample(prompt=600, tokens=4), num_samples=4)
    row = ops.SampledSequence(
        tokens=ops.tensor("int64", [1, 2]), logprobs=ops.tensor("float32", [0.0, 0.0]),
        stop_reason="stop", text=None,
    )  # fmt: skip
    result = ops.SampleResult(
        sequences=[row] * 4, prompt_logprobs=None, topk_prompt_logprobs=None, prompt_tokens=600,
        cached_tokens=512,
    )  # fmt: skip
    counts = ops.count_result(operation, result)
    assert counts == Counts(prefill=88, cached_prefill=4 * 600 - 88, sample=8)
