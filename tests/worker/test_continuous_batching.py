"""One batch for the samples of all sessions and adapters: who joins, who leaves, and what stays the same."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.http import Execute, Executed, OpenSession, StreamChunk
from gristmill_contracts.ids import TenantName
from gristmill_contracts.operations import (
    CheckpointRef,
    Sample,
    SampledSequence,
    SampleResult,
    count_result,
)
from gristmill_testing.local_runner import Client, datum, load, make_runner, ref, sample
from gristmill_testing.tiny_models import build_tiny_mistral
from gristmill_worker.base_model import BaseModel, Part
from gristmill_worker.choose import distribution
from gristmill_worker.engine import Engine
from gristmill_worker.prefixes import Prefixes
from gristmill_worker.runner import Runner
from gristmill_worker.scheduler import Capacity
from gristmill_worker.settings import WorkerSettings
from gristmill_worker.stream import TokenStream

FIRST, SECOND = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"
LONG = [5 + at % 500 for at in range(600)]
"""Two whole blocks and a part."""


def ids(sequence: SampledSequence) -> list[int]:
    return [int(token) for token in sequence.tokens.tolist()]


def scores(sequence: SampledSequence) -> list[float]:
    return [float(value) for value in sequence.logprobs.tolist()]


@dataclass(slots=True)
class Asked:
    """A sample that was handed in, and its answer once there is one."""

    op: Sample
    answers: list[Executed] = field(default_factory=list)

    @property
    def result(self) -> SampleResult:
        (answer,) = self.answers
        assert isinstance(answer.result, SampleResult), answer.error
        return answer.result


def ask(client: Client, **options: Any) -> Asked:
    client.samples += 1
    asked = Asked(sample(**options))
    call = Execute(index=0, op_id=f"{client.uid}/log/{client.samples}", operation=asked.op)
    client.runner.begin(client.uid, call, asked.answers.append)
    return asked


def finish(client: Client, *all_asked: Asked) -> list[SampleResult]:
    while client.runner.sampler.busy:
        client.runner.sampler.turn()
    return [asked.result for asked in all_asked]


def trained_adapters(client: Client) -> list[CheckpointRef]:
    """Three saved versions that differ visibly."""
    saved = []
    for number in range(3):
        client.train([datum(list(range(5 + number, 25 + number))), datum([9, 8, 7])])
        client.step()
        saved.append(ref(client.save_weights()))
    return saved


def second_client(client: Client, tmp_path: Path, tenant: str = "acme") -> Client:
    opened = Client(client.runner, SECOND, str(tmp_path / "state2"))
    request = OpenSession(
        tenant=TenantName(tenant), rank=8, alpha=16, seed=0, state_dir=opened.state_dir
    )
    opened.runner.open(SECOND, request)
    return opened


def mixed(adapters: Sequence[CheckpointRef | None]) -> list[dict[str, Any]]:
    """Requests that differ in everything that may differ in a batch."""
    return [
        {"prompt": [5, 6, 7], "seed": 1, "max_tokens": 9, "adapter": adapters[0]},
        {"prompt": [8] * 20, "seed": 2, "max_tokens": 14, "num_samples": 3, "adapter": adapters[1]},
        {"prompt": [9, 10], "seed": 3, "max_tokens": 3, "temperature": 0.0, "adapter": adapters[2]},
        {"prompt": [11, 12], "seed": 4, "max_tokens": 12, "top_k": 20, "adapter": None},
        {"prompt": [5, 6, 7, 9], "seed": 5, "max_tokens": 6, "top_p": 0.9, "adapter": adapters[0]},
        {"prompt": [14] * 70, "seed": 6, "max_tokens": 10, "temperature": 1.5, "adapter": None},
        {"prompt": [15, 16], "seed": 7, "max_tokens": 2, "num_samples": 2, "adapter": adapters[2]},
    ]


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
    """Slots have room for 64, 128, 256 positions; rows come to each end at different steps."""
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


# --- the prefix cache ----------------------------------------------------------------------------


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


# --- log-probabilities ---------------------------------------------------------------------------


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


# --- the engine's thread -------------------------------------------------------------------------


@pytest.fixture
def engine(llama_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    started = Engine(
        WorkerSettings(
            socket=tmp_path / "s", model_dir=llama_dir, artifacts_dir=tmp_path / "a",
            dtype="float32", device="cpu", threads=1,
        )
    )  # fmt: skip
    started.start()
    yield started
    started.stop(60)
    assert not started.thread.is_alive()


def eventually(true: Callable[[], bool]) -> bool:
    """Whether it becomes true within two minutes."""
    deadline = time.monotonic() + 120
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def opened(tmp_path: Path) -> Callable[[Runner], Any]:
    request = OpenSession(
        tenant=TenantName("acme"), rank=4, alpha=8, seed=0, state_dir=str(tmp_path / "state")
    )
    return lambda runner: runner.open(FIRST, request)


def test_training_does_not_wait_for_a_sample_to_end(engine: Engine, tmp_path: Path) -> None:
    """The piece of work is handed in by the sample's own first chunk, and runs before its last one."""
    assert eventually(lambda: engine.ready)
    engine.submit(opened(tmp_path)).result(60)
    sampled_first: list[bool] = []
    pieces: list[Future[None]] = []
    done: Future[Executed] | None = None

    def emit(chunk: StreamChunk) -> bool:
        if not pieces:
            pieces.append(engine.submit(lambda _: sampled_first.append(ended(done))))
        return True

    def ended(future: "Future[Executed] | None") -> bool:
        return future is not None and future.done()

    call = Execute(
        index=0, op_id=f"{FIRST}/log/1", operation=sample(max_tokens=200, top_k=50, seed=4)
    )
    done = engine.sample(FIRST, call, lambda r: TokenStream(r.base, call.operation, emit))
    answer = done.result(60)
    assert answer.error is None
    pieces[0].result(60)
    assert sampled_first == [False]


def test_a_sample_of_a_session_that_is_not_open_is_refused(engine: Engine) -> None:
    assert eventually(lambda: engine.ready)
    call = Execute(index=0, op_id=f"{FIRST}/log/1", operation=sample())
    with pytest.raises(NotFoundError):
        engine.sample(FIRST, call).result(60)
