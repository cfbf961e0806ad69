"""Short prompts of several requests in one pass: what shares it, what it changes (nothing), and what bounds it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill_testing.local_runner import Client, datum, load, make_runner
from gristmill_testing.peak_memory import peak_bytes
from gristmill_testing.samples_together import (
    FIRST,
    LONG,
    SECOND,
    Asked,
    ask,
    finish,
    ids,
    mixed,
    scores,
    second_client,
    trained_adapters,
)
from gristmill_testing.tiny_models import build_tiny_mistral
from gristmill_worker import memory, room
from gristmill_worker.base_model import BaseModel, Part
from gristmill_worker.room import Room
from gristmill_worker.scheduler import Capacity
from gristmill_worker.sizes import sizes_of

TOO_MUCH = 4.0
"""An estimate that is so many times what was measured keeps prompts apart that would have fitted."""


@pytest.fixture
def llama(llama_dir: Path) -> BaseModel:
    """One of its own for each test: what a failed test leaves in the pools is nobody else's."""
    return load(llama_dir)


@pytest.fixture
def passes(llama: BaseModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts each pass had, those of a single one included."""
    seen: list[int] = []
    each, single = llama.prefill_each, llama.prefill

    def watched_each(prompts: Sequence[Part]) -> torch.Tensor:
        seen.append(len(prompts))
        return each(prompts)

    def watched_single(tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        seen.append(1)
        return single(tokens, cache)

    monkeypatch.setattr(llama, "prefill_each", watched_each)
    monkeypatch.setattr(llama, "prefill", watched_single)
    return seen


def four_short(client: Client) -> list[Asked]:
    return [ask(client, prompt=[9, 8, 7, seed], max_tokens=5, seed=seed) for seed in range(4)]


def test_requests_of_several_adapters_share_a_pass_and_sample_as_alone(
    client: Client, passes: list[int]
) -> None:
    requests = mixed(trained_adapters(client))
    alone = [client.sample(**options) for options in requests]
    passes.clear()
    together = finish(client, *[ask(client, **options) for options in requests])
    assert passes == [7]
    for one, other in zip(alone, together, strict=True):
        assert (one.prompt_tokens, other.cached_tokens) == (other.prompt_tokens, 0)
        for left, right in zip(one.sequences, other.sequences, strict=True):
            assert ids(left) == ids(right)
            assert scores(left) == pytest.approx(scores(right), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a5_what_is_sampled_behind_a_joined_prompt_scores_as_the_trainer_does(
    dtype: torch.dtype, llama_dir: Path, tmp_path: Path
) -> None:
    base = load(llama_dir, dtype)
    client = Client(make_runner(base, tmp_path / "a"), FIRST, str(tmp_path / "s"))
    client.open()
    newest = trained_adapters(client)[-1]
    prompts = [list(range(20, 20 + length)) for length in (30, 3, 30, 64, 7)]
    asked = [
        ask(client, prompt=prompt, max_tokens=24, seed=seed, adapter=newest)
        for seed, prompt in enumerate(prompts)
    ]
    away = [
        abs(score - expected)
        for prompt, result in zip(prompts, finish(client, *asked), strict=True)
        for score, expected in zip(
            scores(result.sequences[0]), trained_on(client, prompt, result), strict=True
        )
    ]
    assert sum(away) / len(away) < (1e-5 if dtype == torch.float32 else 0.06)


def trained_on(client: Client, prompt: list[int], result: Any) -> list[float]:
    whole = prompt + ids(result.sequences[0])
    return client.score([datum(whole[:-1], whole[1:])])[0][len(prompt) - 1 :]


def test_a_sliding_window_is_exact_in_a_joined_pass(tmp_path: Path) -> None:
    client = Client(
        make_runner(load(build_tiny_mistral(tmp_path / "m", window=8)), tmp_path / "a"), FIRST, ""
    )
    client.open()
    prompts = [list(range(20, 20 + length)) for length in (30, 7, 8, 9, 30)]
    asked = [ask(client, prompt=prompt, max_tokens=12) for prompt in prompts]
    for prompt, result in zip(prompts, finish(client, *asked), strict=True):
        expected = trained_on(client, prompt, result)
        assert scores(result.sequences[0]) == pytest.approx(expected, abs=1e-4)


def test_batch_invariant_each_prompt_runs_alone(
    client: Client, llama: BaseModel, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "invariant", True)
    finish(client, *four_short(client))
    assert passes == [1, 1, 1, 1]


def test_a_pass_has_no_more_tokens_than_the_budget(client: Client, passes: list[int]) -> None:
    """4 tokens each: two fit into 11."""
    client.runner.sampler.capacity = Capacity(tokens_max=11)
    finish(client, *four_short(client))
    assert passes == [2, 2]


def test_between_two_steps_prompts_run_no_more_tokens_than_their_blocks_would(
    client: Client, llama: BaseModel, passes: list[int]
) -> None:
    """Four blocks of 256, of which the reader's own prompt took one; the budget would hold ten prompts."""
    sampler = client.runner.sampler
    reader = ask(client, max_tokens=40, top_k=50)
    sampler.turn()
    many = [ask(client, prompt=[7] * 200, max_tokens=2, seed=seed) for seed in range(10)]
    passes.clear()
    sampler.turn()
    assert passes == [3]
    row = sampler.cohorts[0].rows[0]
    assert len(row.tokens) == 1
    sampler.turn()
    assert (passes, len(row.tokens)) == ([3], 2)
    sampler.turn()
    assert (passes, len(row.tokens)) == ([3, 5], 2)
    sampler.turn()
    assert (passes, len(row.tokens)) == ([3, 5], 3)
    finish(client, reader, *many)
    assert llama.block == 256


def test_a_long_prompt_runs_in_blocks_of_its_own(client: Client, passes: list[int]) -> None:
    asked = [ask(client, prompt=[5, 6], max_tokens=3), ask(client, prompt=LONG, max_tokens=3)]
    asked += [ask(client, prompt=[7, 8], max_tokens=3), ask(client, prompt=[9], max_tokens=3)]
    finish(client, *asked)
    assert passes == [1, 1, 1, 1, 2]


def test_nobody_is_passed_by_a_smaller_group(
    client: Client, passes: list[int], tmp_path: Path
) -> None:
    """Three rows may run. The group of three waits, and the request behind it with it."""
    client.runner.sampler.capacity = Capacity(rows_max=3)
    other = second_client(client, tmp_path)
    begun: list[int] = []
    asked = [
        ask(client, prompt=[5, 6], max_tokens=4),
        ask(client, prompt=[5, 7], max_tokens=4, num_samples=3),
        ask(other, prompt=[5, 8], max_tokens=4),
        ask(client, prompt=[5, 9], max_tokens=4),
    ]
    while client.runner.sampler.busy:
        client.runner.sampler.turn()
        begun.append(sum(len(cohort.rows) for cohort in client.runner.sampler.cohorts))
    # The other session's turn comes second; then the group of three, which does not fit beside those two.
    assert passes == [2, 1, 1]
    assert max(begun) == 3
    assert all(one.answers[0].error is None for one in asked)


def test_prompts_run_apart_where_memory_is_short(client: Client, passes: list[int]) -> None:
    alone = [one.result.sequences for one in waited(client, four_short(client))]
    told: list[tuple[list[int], list[int]]] = []

    def holds(prompts: Sequence[int], ranks: Sequence[int]) -> bool:
        told.append((list(prompts), list(ranks)))
        return len(prompts) < 3

    passes.clear()
    client.runner.sampler.holds = holds
    again = [one.result.sequences for one in waited(client, four_short(client))]
    assert passes == [2, 2]
    assert told == [([4, 4], []), ([4, 4, 4], []), ([4, 4], [])]
    assert [ids(each[0]) for each in again] == [ids(each[0]) for each in alone]


def waited(client: Client, asked: list[Asked]) -> list[Asked]:
    finish(client, *asked)
    return asked


def test_a_pass_that_fails_is_run_again_one_prompt_at_a_time(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch, passes: list[int]
) -> None:
    """One of them fails on its own too: it alone has an error."""
    expected = [ids(one.result.sequences[0]) for one in waited(client, four_short(client))]
    single = llama.prefill

    def full(_: Sequence[Part]) -> torch.Tensor:
        raise MemoryError

    def third_fails(tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        if tokens.tolist() == [9, 8, 7, 2]:
            raise MemoryError
        return single(tokens, cache)

    monkeypatch.setattr(llama, "prefill_each", full)
    monkeypatch.setattr(llama, "prefill", third_fails)
    passes.clear()
    asked = four_short(client)
    while client.runner.sampler.busy:
        client.runner.sampler.turn()
    assert passes == [1, 1, 1]
    errors = [one.answers[0].error for one in asked]
    assert [error and error.code for error in errors] == [None, None, "out_of_memory", None]
    for at in (0, 1, 3):
        assert ids(asked[at].result.sequences[0]) == expected[at]


def test_the_engines_time_is_shared_by_the_tokens_of_the_prompts(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of 16 s over 4 and 12 tokens; nothing else takes time."""
    now = 0.0
    each = llama.prefill_each

    def slow(prompts: Sequence[Part]) -> torch.Tensor:
        nonlocal now
        now += 16.0
        return each(prompts)

    monkeypatch.setattr(llama, "prefill_each", slow)
    client.runner.sampler.clock = lambda: now
    short = ask(client, prompt=[5] * 4, max_tokens=3)
    long = ask(client, prompt=[6] * 12, max_tokens=3)
    finish(client, short, long)
    assert [one.answers[0].wall_us for one in (short, long)] == [4_000_000, 12_000_000]


def test_closing_a_session_closes_the_gaps_that_its_rows_leave(
    client: Client, tmp_path: Path
) -> None:
    """Rows of both share a pool; the last ones move into the places of those that go."""
    other = second_client(client, tmp_path)
    prompts = [list(range(20, 20 + length)) for length in (3, 11, 40)]
    expected = [ids(client.sample(prompt=each, max_tokens=9).sequences[0]) for each in prompts]
    kept = []
    for prompt in prompts:
        ask(other, prompt=[9] * 5, max_tokens=400, top_k=50)
        kept.append(ask(client, prompt=prompt, max_tokens=9))
    client.runner.sampler.turn()
    client.runner.sampler.turn()
    assert len(client.runner.sampler.cohorts) == 6
    client.runner.close(SECOND)
    assert [ids(result.sequences[0]) for result in finish(client, *kept)] == expected


# --- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[64] * 16, [200, 31, 64, 7, 90, 250], [3, 4]])
def test_a_joined_pass_takes_what_was_foretold(lengths: list[int], llama: BaseModel) -> None:
    def run() -> None:
        prompts = [
            Part(adapter=None, tokens=torch.arange(1, 1 + n), cache=llama.new_cache(n))
            for n in lengths
        ]
        llama.logits(llama.prefill_each(prompts))

    with torch.inference_mode():
        run()
        taken = peak_bytes(run, llama.device)
    needed = memory.joined_bytes(sizes_of(llama), lengths, [])
    assert taken <= needed <= TOO_MUCH * taken


def test_prompts_are_held_together_as_long_as_memory_is_free(
    llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sizes_of(llama)

    def made(available: Callable[[], int | None]) -> Room:
        return Room(sizes, budget=512, packed=True, world=1, available=available)

    needed = memory.joined_bytes(sizes, [64] * 8, [8, 4])
    assert needed > memory.joined_bytes(sizes, [64] * 8, [8])
    assert made(lambda: 0).holds_together([64] * 8, [8, 4])  # too little to look at
    monkeypatch.setattr(room, "NEVER_REFUSED_BYTES", 0)
    assert made(lambda: needed).holds_together([64] * 8, [8, 4])
    assert not made(lambda: needed - 1).holds_together([64] * 8, [8, 4])
    assert made(lambda: None).holds_together([64] * 8, [8, 4])
