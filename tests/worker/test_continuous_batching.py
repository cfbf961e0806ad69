"""One batch for the samples of all sessions and adapters: who joins, who leaves, and what stays the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.http import Execute, Executed, StreamChunk
from gristmill_contracts.operations import SampleResult, count_result
from gristmill_testing.local_runner import Client, datum, load, make_runner, ref, sample
from gristmill_testing.samples_together import (
    FIRST,
    LONG,
    SECOND,
    ask,
    finish,
    ids,
    mixed,
    scores,
    second_client,
    trained_adapters,
)
from gristmill_testing.tiny_models import build_tiny_mistral
from gristmill_worker.base_model import BaseModel, Part
from gristmill_worker.choose import distribution
from gristmill_worker.scheduler import Capacity
from gristmill_worker.stream import TokenStream


@pytest.fixture(params=["fast", "generic"])
def either(request: pytest.FixtureRequest, llama_dir: Path, tmp_path: Path) -> Client:
    """An open session on each of the two paths."""
    opened = Client(
        make_runner(load(llama_dir, path=request.param), tmp_path / "a"), FIRST, str(tmp_path / "s")
    )
    opened.open()
    return opened


def test_a9_8_a_sample_is_the_same_alone_and_beside_others(either: Client) -> None:
    """vllm#51226. Requests of several adapters join one after another, while others leave."""
    requests = mixed(trained_adapters(either))
    alone = [either.sample(**options) for options in requests]
    asked = []
    for options in requests:
        asked.append(ask(either, **options))
        either.runner.sampler.turn()
    together = finish(either, *asked)
    for one, other in zip(alone, together, strict=True):
        for left, right in zip(one.sequences, other.sequences, strict=True):
            assert ids(left) == ids(right)
            assert scores(left) == pytest.approx(scores(right), abs=1e-4)


def test_a_mixed_batch_scores_as_the_trainer_does(client: Client) -> None:
    """Each row with its own adapter: only the session's own last version is what forward() runs."""
    newest = trained_adapters(client)[-1]
    for asked, result in zip(
        mixed([newest] * 3),
        finish(client, *[ask(client, **options) for options in mixed([newest] * 3)]),
        strict=True,
    ):
        if asked["adapter"] is None:
            continue
        for sequence in result.sequences:
            whole = asked["prompt"] + ids(sequence)
            expected = client.score([datum(whole[:-1], whole[1:])])[0][len(asked["prompt"]) - 1 :]
            assert scores(sequence) == pytest.approx(expected, abs=1e-4)


def test_rows_that_outgrow_their_slots_score_as_the_trainer_does(client: Client) -> None:
    """Slots have room for 64, 128, 192, 256 positions; rows come to each end at different steps."""
    prompts = [list(range(20, 20 + length)) for length in (3, 60, 63, 64, 65, 120)]
    asked = [
        ask(client, prompt=prompt, max_tokens=80, top_k=50, seed=len(prompt)) for prompt in prompts
    ]
    results = finish(client, *asked)
    assert max(len(ids(result.sequences[0])) for result in results) == 80
    for prompt, result in zip(prompts, results, strict=True):
        whole = prompt + ids(result.sequences[0])
        expected = client.score([datum(whole[:-1], whole[1:])])[0][len(prompt) - 1 :]
        assert scores(result.sequences[0]) == pytest.approx(expected, abs=1e-4)


def test_a_sliding_window_is_exact_for_rows_of_different_lengths(tmp_path: Path) -> None:
    base = load(build_tiny_mistral(tmp_path / "m", window=8))
    client = Client(make_runner(base, tmp_path / "a"), FIRST, "")
    client.open()
    prompts = [list(range(20, 20 + length)) for length in (3, 7, 8, 9, 30)]
    asked = [ask(client, prompt=prompt, max_tokens=20, seed=len(prompt)) for prompt in prompts]
    for prompt, result in zip(prompts, finish(client, *asked), strict=True):
        whole = prompt + ids(result.sequences[0])
        expected = client.score([datum(whole[:-1], whole[1:])])[0][len(prompt) - 1 :]
        assert scores(result.sequences[0]) == pytest.approx(expected, abs=1e-4)


def test_samples_of_several_sessions_and_adapters_share_a_step(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    adapters = trained_adapters(client)
    other = second_client(client, tmp_path)
    widths: list[int] = []
    decode = llama.decode

    def watched(parts: Sequence[Part]) -> torch.Tensor:
        widths.append(sum(len(part.tokens) for part in parts))
        return decode(parts)

    monkeypatch.setattr(llama, "decode", watched)
    asked = [ask(client, max_tokens=8, top_k=50, adapter=adapters[0])]
    asked.append(ask(other, max_tokens=8, top_k=50, seed=2))
    asked.append(ask(client, max_tokens=8, top_k=50, adapter=adapters[1], num_samples=2))
    finish(client, *asked)
    assert max(widths) == 4
    assert len(widths) <= 9  # 7 each, had they run one after another, would be 21


@pytest.mark.parametrize("path", ["fast", "generic"])
def test_batch_invariant_a_sample_has_the_same_bits_in_any_batch(
    path: Any, llama_dir: Path, tmp_path: Path
) -> None:
    base = load(llama_dir, path=path)
    base.invariant = True
    client = Client(make_runner(base, tmp_path / "a"), FIRST, str(tmp_path / "s"))
    client.open()
    requests = mixed(trained_adapters(client))
    alone = [client.sample(**options) for options in requests]
    for order in (range(7), (6, 3, 5, 0, 2, 4, 1)):
        asked = {at: ask(client, **requests[at]) for at in order}
        finish(client)
        assert [asked[at].result for at in range(7)] == alone


def test_batch_invariant_a_sample_has_the_same_bits_in_bf16(
    llama_dir: Path, tmp_path: Path
) -> None:
    base = load(llama_dir, torch.bfloat16)
    base.invariant = True
    client = Client(make_runner(base, tmp_path / "a"), FIRST, "")
    client.open()
    options = {"prompt": LONG, "max_tokens": 20, "seed": 3}
    alone = client.sample(**options)
    asked = [ask(client, seed=seed, max_tokens=30) for seed in range(20)]
    asked.append(ask(client, **options))
    assert finish(client, *asked)[-1] == alone


def test_the_bound_of_positions_makes_groups_wait(client: Client) -> None:
    """5 + 9 positions each, 30 are there: two at a time, in the order in which they came."""
    client.runner.sampler.capacity = Capacity(positions_max=30)
    options = {"prompt": [5] * 5, "max_tokens": 9, "top_k": 50}
    asked = [ask(client, seed=seed, **options) for seed in range(5)]
    most = 0
    while client.runner.sampler.busy:
        client.runner.sampler.turn()
        most = max(most, len(client.runner.sampler.cohorts))
    assert most == 2
    for seed, one in enumerate(asked):
        assert ids(one.result.sequences[0]) == ids(client.sample(seed=seed, **options).sequences[0])


def test_the_bound_of_live_adapters_makes_a_version_wait(client: Client) -> None:
    adapters = trained_adapters(client)
    client.runner.sampler.capacity = Capacity(adapters_max=2)
    asked = [ask(client, adapter=one, max_tokens=5, top_k=50) for one in adapters]
    most = 0
    while client.runner.sampler.busy:
        client.runner.sampler.turn()
        live = {cohort.group.owner.adapter for cohort in client.runner.sampler.cohorts}
        most = max(most, len(live))
    assert most == 2
    assert all(one.answers[0].error is None for one in asked)


def test_a_large_group_does_not_pass_the_turn_of_another_session(
    client: Client, tmp_path: Path
) -> None:
    """Ten requests of one session wait; the other session's first one begins second."""
    other = second_client(client, tmp_path)
    client.runner.sampler.capacity = Capacity(rows_max=1)
    order: list[str] = []
    for number in range(4):
        client.samples += 1
        call = Execute(index=0, op_id=f"{FIRST}/log/{number}", operation=sample(max_tokens=2))
        client.runner.begin(FIRST, call, lambda _: order.append("first"))
    call = Execute(index=0, op_id=f"{SECOND}/log/1", operation=sample(max_tokens=2))
    other.runner.begin(SECOND, call, lambda _: order.append("second"))
    finish(client)
    assert order == ["first", "second", "first", "first", "first"]


def test_a_step_that_fails_ends_the_newest_group_alone(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = client.sample(max_tokens=12, top_k=50)
    older = ask(client, max_tokens=12, top_k=50)
    client.runner.sampler.turn()
    newer = ask(client, prompt=[9] * 30, max_tokens=12)
    client.runner.sampler.turn()
    decode = llama.decode

    def fails(_parts: Sequence[Part]) -> torch.Tensor:
        monkeypatch.setattr(llama, "decode", decode)
        raise RuntimeError("CUDA out of memory: not really")

    monkeypatch.setattr(llama, "decode", fails)
    (result,) = finish(client, older)
    assert ids(result.sequences[0]) == ids(expected.sequences[0])
    (answer,) = newer.answers
    assert answer.error is not None
    assert answer.error.code == "out_of_memory"


def test_a_prompt_that_fails_ends_its_own_group_alone(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = ask(client, max_tokens=6, top_k=50)
    client.runner.sampler.turn()
    prefill = llama.prefill

    def fails(_tokens: torch.Tensor, _cache: object) -> torch.Tensor:
        monkeypatch.setattr(llama, "prefill", prefill)
        raise MemoryError

    monkeypatch.setattr(llama, "prefill", fails)
    newer = ask(client)
    assert len(ids(finish(client, older)[0].sequences[0])) == 6
    assert newer.answers[0].error is not None


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"logprobs": "processed"}],
    ids=["drawn", "greedy", "top_k", "top_p", "processed"],
)
@pytest.mark.parametrize("value", [float("nan"), 1e30], ids=["nan", "overflow"])
def test_an_adapter_whose_numbers_have_run_away_fails_its_own_samples_alone(
    either: Client, tmp_path: Path, options: dict[str, Any], value: float
) -> None:
    """Those that share its steps get what they get alone."""
    wanted: dict[str, Any] = {"max_tokens": 12, "top_k": 50, "stop": []}
    expected = either.sample(**wanted)
    astray = second_client(either, tmp_path)
    astray.session.adapter.weights.fill_(value)
    adapter = ref(astray.save_weights())
    params = msgspec.structs.replace(sample(stop=[]).params, max_tokens=6, **options)
    broken = msgspec.structs.replace(sample(num_samples=3, adapter=adapter), params=params)
    older = ask(either, **wanted)
    either.runner.sampler.turn()
    answers: list[Executed] = []
    call = Execute(index=0, op_id=f"{SECOND}/log/9", operation=broken)
    either.runner.begin(SECOND, call, answers.append)
    newer = ask(either, **wanted)
    for found in finish(either, older, newer):
        assert ids(found.sequences[0]) == ids(expected.sequences[0])
    assert answers[0].result is None
    assert answers[0].error is not None
    assert answers[0].error.code == "operation_failed"
    assert f"checkpoint {adapter.name} gives log-probabilities that are not finite" in (
        answers[0].error.message
    )


def test_closing_a_session_ends_its_samples_and_no_others(client: Client, tmp_path: Path) -> None:
    other = second_client(client, tmp_path)
    kept = ask(client, max_tokens=8, top_k=50)
    running, waiting = ask(other, max_tokens=400, top_k=50), ask(other)
    client.runner.sampler.turn()
    client.runner.sampler.turn()
    client.runner.close(SECOND)
    for one in (running, waiting):
        assert one.answers[0].error is not None
        assert "was closed" in one.answers[0].error.message
    assert len(ids(finish(client, kept)[0].sequences[0])) == 8
    with pytest.raises(NotFoundError):
        ask(other)


def test_a_stream_that_nobody_reads_leaves_the_batch_and_what_ran_is_told(client: Client) -> None:
    beside = ask(client, max_tokens=40, top_k=50)
    chunks: list[StreamChunk] = []

    def emit(chunk: StreamChunk) -> bool:
        chunks.append(chunk)
        return len(chunks) < 2

    answers: list[Executed] = []
    call = Execute(
        index=0, op_id=f"{FIRST}/log/9", operation=sample(max_tokens=400, top_k=50, seed=8)
    )
    tokens = TokenStream(client.runner.base, call.operation, emit)
    client.runner.begin(FIRST, call, answers.append, tokens)
    (result,) = finish(client, beside)
    assert len(ids(result.sequences[0])) == 40
    (answer,) = answers
    assert isinstance(answer.result, SampleResult)
    assert answer.result.sequences[0].tokens.size == 16
    assert count_result(call.operation, answer.result).sample == 16


def processed(client: Client, **options: Any) -> SampleResult:
    op = sample(**options)
    params = msgspec.structs.replace(op.params, logprobs="processed")
    result = client.run(msgspec.structs.replace(op, params=params))
    assert isinstance(result, SampleResult)
    return result


def test_a4_processed_logprobs_are_those_of_what_was_drawn_from(
    client: Client, plain_llama: Any
) -> None:
    options = {"temperature": 0.5, "top_k": 7, "max_tokens": 4, "num_samples": 2}
    result, raw = processed(client, **options), client.sample(**options)
    for sequence, beside in zip(result.sequences, raw.sequences, strict=True):
        assert ids(sequence) == ids(beside)
        tokens = [5, 6, 7, 8]
        for token, logprob in zip(ids(sequence), scores(sequence), strict=True):
            with torch.no_grad():
                logits = plain_llama(input_ids=torch.tensor([tokens])).logits[:, -1]
            expected = distribution(logits, 0.5, 7, 1.0)[0, token].log()
            assert logprob == pytest.approx(float(expected), abs=1e-4)
            tokens.append(token)


def test_a4_raw_and_processed_agree_where_nothing_is_changed(client: Client) -> None:
    raw, drawn = client.sample(max_tokens=10), processed(client, max_tokens=10)
    assert scores(raw.sequences[0]) == pytest.approx(scores(drawn.sequences[0]), abs=1e-5)
