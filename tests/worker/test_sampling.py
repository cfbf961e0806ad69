"""Sampling: agreement with training, seeds, ends, texts and scores."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import (
    ChatMessage,
    SampledSequence,
    SampleResult,
)
from gristmill_testing.local_runner import Client, datum, load, make_runner, ref
from gristmill_testing.tiny_models import build_tiny_mistral
from gristmill_worker import sampler
from gristmill_worker.base_model import BaseModel, Part
from gristmill_worker.groups import Group, Row
from gristmill_worker.scheduler import Capacity
from gristmill_worker.text import Detokenizer

PROMPT = [5, 6, 7, 8]
Asked = Sequence[tuple[Group, Row]]
FAMILIES = (
    "llama", "qwen2", "mistral", "gpt2", "falcon", "falcon_alibi", "bloom", "mpt", "gemma2",
)  # fmt: skip


def ids(sequence: SampledSequence) -> list[int]:
    return [int(token) for token in sequence.tokens.tolist()]


def scores(sequence: SampledSequence) -> list[float]:
    return [float(value) for value in sequence.logprobs.tolist()]


def trainer_scores(client: Client, prompt: list[int], sequence: SampledSequence) -> list[float]:
    """The same tokens through forward()."""
    whole = prompt + ids(sequence)
    return client.score([datum(whole[:-1], whole[1:])])[0][len(prompt) - 1 :]


def trained(client: Client) -> Client:
    for _ in range(3):
        client.train([datum(list(range(5, 25))), datum([9, 8, 7])])
        client.step()
    return client


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sampler_agrees_with_the_trainer(
    family: str, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """fp32: mean difference below 1e-5, none above 1e-3; the sliding window of 16 is passed thrice."""
    base = load(family_dir(family))
    client = Client(make_runner(base, tmp_path / "a"), "11111111-1111-1111-1111-111111111111", "")
    client.open()
    adapter = ref(trained(client).save_weights())
    result = client.sample(prompt=PROMPT, num_samples=3, max_tokens=60, adapter=adapter)
    differences = [
        abs(p - q)
        for sequence in result.sequences
        for p, q in zip(trainer_scores(client, PROMPT, sequence), scores(sequence), strict=True)
    ]
    assert sum(differences) / len(differences) < 1e-5
    assert max(differences) < 1e-3


def test_the_sampler_agrees_with_the_trainer_in_bf16(llama_dir: Path, tmp_path: Path) -> None:
    base = load(llama_dir, torch.bfloat16)
    client = Client(make_runner(base, tmp_path / "a"), "11111111-1111-1111-1111-111111111111", "")
    client.open()
    result = client.sample(prompt=PROMPT, num_samples=4, max_tokens=40)
    differences = [
        abs(p - q)
        for sequence in result.sequences
        for p, q in zip(trainer_scores(client, PROMPT, sequence), scores(sequence), strict=True)
    ]
    assert sum(differences) / len(differences) < 0.06


def test_an_on_policy_batch_has_ratio_one(client: Client) -> None:
    """With top_p below 1 as well, for the logprobs are raw; then loss_sum is minus the advantages."""
    adapter = ref(trained(client).save_weights())
    result = client.sample(prompt=PROMPT, num_samples=4, max_tokens=20, top_p=0.8, adapter=adapter)
    batch, total = [], 0.0
    for number, sequence in enumerate(result.sequences):
        whole = PROMPT + ids(sequence)
        pad = [0.0] * (len(PROMPT) - 1)
        count = len(ids(sequence))
        batch.append(
            datum(
                whole[:-1], whole[1:], pad + [1.0] * count,
                logprobs=pad + scores(sequence), advantages=pad + [number + 0.5] * count,
            )
        )  # fmt: skip
        total += (number + 0.5) * count
    metrics = client.train(batch, "importance_sampling").metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert metrics["loss_sum"] == pytest.approx(-total, rel=1e-3)


def test_the_same_seed_gives_the_same_samples(client: Client) -> None:
    first, second = client.sample(num_samples=3, seed=7), client.sample(num_samples=3, seed=7)
    assert first == second
    assert client.sample(num_samples=3, seed=8) != first
    assert len({tuple(ids(s)) for s in first.sequences}) == 3


def test_a_sample_depends_on_its_own_index_alone(client: Client) -> None:
    """Sample i of n is sample i of m, whatever else is in the batch or was sampled in between."""
    many = client.sample(num_samples=6, seed=7, max_tokens=12)
    client.sample(num_samples=2, seed=99)
    few = client.sample(num_samples=2, seed=7, max_tokens=12)
    assert [ids(s) for s in many.sequences[:2]] == [ids(s) for s in few.sequences]


def test_large_groups_take_turns(client: Client) -> None:
    whole = client.sample(num_samples=7, max_tokens=5)
    client.runner.sampler.capacity = Capacity(rows_max=3)
    parts = client.sample(num_samples=7, max_tokens=5)
    assert [ids(s) for s in whole.sequences] == [ids(s) for s in parts.sequences]


def test_one_prefill_serves_all_samples(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[tuple[str, int]] = []
    prefill, decode = llama.prefill, llama.decode

    def watched_prefill(tokens: torch.Tensor, cache: object) -> torch.Tensor:
        widths.append(("prompt", len(tokens)))
        return prefill(tokens, cache)

    def watched_decode(parts: Sequence[Part]) -> torch.Tensor:
        widths.append(("step", sum(len(part.tokens) for part in parts)))
        return decode(parts)

    monkeypatch.setattr(llama, "prefill", watched_prefill)
    monkeypatch.setattr(llama, "decode", watched_decode)
    client.sample(num_samples=4, max_tokens=3)
    assert widths == [("prompt", 4), ("step", 4), ("step", 4)]


def test_temperature_zero_is_the_argmax_with_its_own_logprob(
    client: Client, plain_llama: Any
) -> None:
    (sequence,) = client.sample(temperature=0.0, max_tokens=10).sequences
    tokens = list(PROMPT)
    for token, logprob in zip(ids(sequence), scores(sequence), strict=True):
        with torch.no_grad():
            logits = plain_llama(input_ids=torch.tensor([tokens])).logits[0, -1]
        assert token == int(logits.argmax())
        assert logprob == pytest.approx(float(torch.log_softmax(logits, -1)[token]), abs=1e-5)
        assert logprob < -0.01
        tokens.append(token)
    assert client.sample(temperature=0.0, max_tokens=10, seed=5).sequences == [sequence]


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}])
def test_cut_to_one_token_a_sample_is_greedy(client: Client, options: dict[str, float]) -> None:
    greedy = client.sample(temperature=0.0)
    assert ids(client.sample(**options).sequences[0]) == ids(greedy.sequences[0])


def test_logprobs_are_raw_whatever_the_temperature(client: Client) -> None:
    result = client.sample(temperature=1.7, top_k=20, max_tokens=12)
    expected = trainer_scores(client, PROMPT, result.sequences[0])
    assert scores(result.sequences[0]) == pytest.approx(expected, abs=1e-4)


def forced(base: BaseModel, monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Make every row produce these tokens, one after another."""

    def choose(_logits: torch.Tensor, asked: Asked) -> torch.Tensor:
        return torch.tensor([tokens[len(row.tokens)] for _, row in asked])

    monkeypatch.setattr(sampler, "choose", choose)


def encode(base: BaseModel, text: str) -> list[int]:
    found: list[int] = base.tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


@pytest.mark.parametrize("end", [2, 4])
def test_an_end_token_is_returned_last_with_its_logprob(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    """</s> is of the config, <|im_end|> of the generation config."""
    forced(llama, monkeypatch, [9, 10, end, 11])
    (sequence,) = client.sample(include_text=True).sequences
    assert (ids(sequence), sequence.stop_reason) == ([9, 10, end], "stop")
    assert len(scores(sequence)) == 3
    assert "<" not in (sequence.text or "")


def test_an_empty_list_of_stops_lets_a_sample_run_past_end_tokens(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [9, 2, 10, 4, 11]
    forced(llama, monkeypatch, tokens)
    (sequence,) = client.sample(stop=[], max_tokens=5).sequences
    assert (ids(sequence), sequence.stop_reason) == (tokens, "length")
    assert len(scores(sequence)) == 5
    (stopped,) = client.sample(stop=["zz"], max_tokens=5).sequences
    assert (ids(stopped), stopped.stop_reason) == ([9, 2], "stop")


@pytest.mark.parametrize(
    ("spelt", "stops", "kept", "text"),
    [
        pytest.param([" hello", " the", " world"], ["the w"], 3, " hello ", id="across tokens"),
        pytest.param(["x", "ABCDEF", "y"], ["DE"], 2, "xABC", id="inside a token"),
        pytest.param([" hello", " the", "."], ["."], 3, " hello the", id="the last one"),
        pytest.param(["a", "b", "c"], ["zz", "b", "c"], 2, "a", id="the earliest of several"),
        pytest.param(["a", "b", "c"], ["zz"], None, "abc", id="none"),
        pytest.param(["a", "é", "b"], ["é"], 3, "a", id="a character of two tokens"),
    ],
)  # fmt: skip
def test_stop_strings_cut_tokens_logprobs_and_text_together(  # noqa: PLR0917
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch,
    spelt: list[str], stops: list[str], kept: int | None, text: str,
) -> None:  # fmt: skip
    tokens = [token for part in spelt for token in encode(llama, part)]
    forced(llama, monkeypatch, tokens)
    (sequence,) = client.sample(stop=stops, max_tokens=len(tokens), include_text=True).sequences
    assert ids(sequence) == tokens[: kept or len(tokens)]
    assert len(scores(sequence)) == len(ids(sequence))
    assert sequence.text == text
    assert sequence.stop_reason == ("length" if kept is None else "stop")


def test_a_special_token_may_be_a_stop_string(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(llama, monkeypatch, [9, 3, 10, 11, 12, 13, 14, 15])
    (sequence,) = client.sample(stop=["<|im_start|>"], include_text=True).sequences
    assert (ids(sequence), sequence.text) == ([9, 3], llama.tokenizer.decode([9]))


def test_rows_end_on_their_own(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row i ends after i + 1 tokens; the others go on with their own cache and score as in training."""

    def choose(_logits: torch.Tensor, asked: Asked) -> torch.Tensor:
        return torch.tensor(
            [2 if len(row.tokens) == row.sample else 20 + 7 * row.sample for _, row in asked]
        )

    monkeypatch.setattr(sampler, "choose", choose)
    result = client.sample(num_samples=5)
    assert [len(ids(s)) for s in result.sequences] == [1, 2, 3, 4, 5]
    for sequence in result.sequences:
        expected = trainer_scores(client, PROMPT, sequence)
        assert scores(sequence) == pytest.approx(expected, abs=1e-4)


def test_a_prompt_that_fits_ends_at_the_end_of_the_context(
    family_dir: Callable[[str], Path], client: Client
) -> None:
    result = client.sample(prompt=[7] * 1020, max_tokens=512, seed=3, top_k=50)
    (sequence,) = result.sequences
    assert (len(ids(sequence)), sequence.stop_reason) == (4, "length")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [7] * 1024}, "1024 tokens .* context of 1024 leaves 1023"),
        ({"prompt": [5, 512]}, "token id 512 is outside the vocabulary of 512"),
        ({"prompt": []}, "send one row of tokens"),
        ({"prompt": None}, "either a prompt or messages"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop string is empty"),
        ({"num_samples": 0}, "num_samples"),
    ],
)
def test_samples_that_cannot_run_are_refused(
    client: Client, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        client.sample(**options)


def test_a_chat_has_one_bos_and_asks_for_an_answer(client: Client, llama: BaseModel) -> None:
    messages = [ChatMessage("user", "hello")]
    result = client.sample(prompt=None, messages=messages, include_prompt_logprobs=True)
    text = "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert result.prompt_tokens == len(encode(llama, text))
    assert encode(llama, text).count(1) == 1
    direct = client.sample(prompt=encode(llama, text), include_prompt_logprobs=True)
    # Entry 0 is NaN, which equals nothing.
    assert result.sequences == direct.sequences


def test_a_model_without_a_template_refuses_messages(
    client: Client, llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.tokenizer, "chat_template", None)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        client.sample(prompt=None, messages=[ChatMessage("user", "hello")])
    monkeypatch.setattr(llama.tokenizer, "chat_template", "{{ raise_exception('no system') }}")
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        client.sample(prompt=None, messages=[ChatMessage("system", "x")])


def test_a_long_chat_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="leaves 1023"):
        client.sample(prompt=None, messages=[ChatMessage("user", "z" * 1100)])


def test_samples_follow_training(client: Client) -> None:
    """sample, train, sample: another checkpoint, other numbers; the first one still as it was."""
    first = ref(client.save_weights())
    before = client.sample(adapter=first)
    second = ref(trained(client).save_weights())
    assert client.sample(adapter=second) != before
    assert client.sample(adapter=first) == before
    assert client.sample(adapter=None) == before  # a fresh adapter is the base model


def test_many_adapters_are_sampled_beyond_the_cache(client: Client) -> None:
    saved, answers = [], []
    for _ in range(6):  # the cache holds 4
        client.train([datum(PROMPT)])
        client.step()
        saved.append(ref(client.save_weights()))
        answers.append(client.sample(adapter=saved[-1], temperature=0.0))
    assert len(client.runner.checkpoints.cached) == 4
    assert [client.sample(adapter=one, temperature=0.0) for one in saved] == answers


def test_sampling_neither_counts_nor_changes_the_session(client: Client) -> None:
    client.train([datum(PROMPT)])
    before = {name: value.clone() for name, value in client.session.buffers().items()}
    client.sample(num_samples=3)
    assert client.session.counters.applied == 1
    assert all(torch.equal(v, before[n]) for n, v in client.session.buffers().items())
    client.step()


def test_the_window_of_a_sliding_cache_is_exact_at_its_edge(tmp_path: Path) -> None:
    base = load(build_tiny_mistral(tmp_path / "m", window=8))
    client = Client(make_runner(base, tmp_path / "a"), "u", "")
    client.open()
    for length in (6, 7, 8, 9):
        prompt = list(range(20, 20 + length))
        (sequence,) = client.sample(prompt=prompt, max_tokens=24).sequences
        expected = trainer_scores(client, prompt, sequence)
        assert scores(sequence) == pytest.approx(expected, abs=1e-4)


def test_text_is_what_the_tokens_decode_to(client: Client, llama: BaseModel) -> None:
    result: SampleResult = client.sample(num_samples=2, max_tokens=30, include_text=True)
    for sequence in result.sequences:
        whole = llama.tokenizer.decode(ids(sequence), skip_special_tokens=True)
        assert sequence.text == whole
        decoder = Detokenizer(llama.tokenizer, skip_special=True)
        for token in ids(sequence):
            decoder.push(token)
        decoder.finish()
    assert client.sample().sequences[0].text is None
