"""The prefix cache: what is found, for whom, that it changes no number, and how it is counted."""

from pathlib import Path

import pytest

from gristmill_contracts.operations import count_result
from gristmill_testing.local_runner import Client, datum, sample
from gristmill_testing.samples_together import (
    LONG,
    ask,
    finish,
    ids,
    scores,
    second_client,
    trained_adapters,
)
from gristmill_worker.base_model import BaseModel
from gristmill_worker.prefixes import Prefixes


@pytest.fixture
def remembering(client: Client, llama: BaseModel) -> Client:
    """Room for four blocks."""
    room = 4 * (llama.block or 0) * llama.position_bytes
    client.runner.sampler.prefixes = Prefixes(llama, room)
    return client


def test_a_prompt_that_begins_as_another_did_is_read_from_the_cache(remembering: Client) -> None:
    first = remembering.sample(prompt=LONG, num_samples=2)
    again = remembering.sample(prompt=LONG, num_samples=2)
    assert (first.cached_tokens, again.cached_tokens) == (0, 512)
    assert again.sequences == first.sequences  # to the last bit
    counts = count_result(sample(prompt=LONG, num_samples=2), again)
    assert (counts.prefill, counts.cached_prefill) == (88, 2 * 600 - 88)
    other = remembering.sample(prompt=[*LONG[:300], 7, 8, 9])
    assert other.cached_tokens == 256


def test_the_last_token_of_a_prompt_always_runs(remembering: Client) -> None:
    remembering.sample(prompt=LONG[:512])
    assert remembering.sample(prompt=LONG[:512]).cached_tokens == 256
    assert remembering.sample(prompt=LONG[:256]).cached_tokens == 0


def test_a9_26_another_version_of_an_adapter_finds_nothing_in_the_cache(
    remembering: Client,
) -> None:
    """vllm#42125. Sample, train, sample; and each version as without a cache."""
    adapters = trained_adapters(remembering)
    for adapter in adapters:
        assert remembering.sample(prompt=LONG, adapter=adapter).cached_tokens == 0
    remembered = remembering.sample(prompt=LONG, adapter=adapters[-1], temperature=0.0)
    assert remembered.cached_tokens == 512
    remembering.runner.sampler.prefixes = Prefixes(remembering.runner.base, 0)
    bare = remembering.sample(prompt=LONG, adapter=adapters[-1], temperature=0.0)
    assert bare.cached_tokens == 0
    assert bare.sequences == remembered.sequences


def test_tenants_share_no_prefix(remembering: Client, tmp_path: Path) -> None:
    remembering.sample(prompt=LONG)
    theirs = second_client(remembering, tmp_path, tenant="initech")
    same = ask(theirs, prompt=LONG)
    assert finish(theirs, same)[0].cached_tokens == 0


def test_a_prompt_that_is_scored_runs_as_a_whole(remembering: Client) -> None:
    remembering.sample(prompt=LONG)
    scored = remembering.sample(prompt=LONG, include_prompt_logprobs=True)
    assert scored.cached_tokens == 0
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs.size == 600


def test_the_cache_keeps_the_newest_used_blocks(remembering: Client) -> None:
    remembering.sample(prompt=LONG)
    remembering.sample(prompt=[9] * 600)
    assert remembering.sample(prompt=LONG).cached_tokens == 512
    remembering.sample(prompt=[10] * 600)
    assert len(remembering.runner.sampler.prefixes.held) == 4
    assert remembering.sample(prompt=LONG).cached_tokens == 512
    assert remembering.sample(prompt=[9] * 600).cached_tokens == 0


def test_blocks_of_a_prompt_give_what_a_whole_pass_gives(client: Client) -> None:
    result = client.sample(prompt=LONG, include_prompt_logprobs=True, max_tokens=12)
    whole = LONG + ids(result.sequences[0])
    expected = client.score([datum(whole[:-1], whole[1:])])[0]
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.tolist()[1:] == pytest.approx(expected[:599], abs=1e-4)
    assert scores(result.sequences[0]) == pytest.approx(expected[599:], abs=1e-4)
