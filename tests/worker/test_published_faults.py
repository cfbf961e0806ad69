"""Faults that other engines published, each as a test of ours: docs/reference/published-faults.md lists them.

Those of the list that other files test as well are only named there.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch

from gristmill_contracts.operations import ChatMessage, SampledSequence
from gristmill_testing.local_runner import Client, datum, load, logprobs, make_runner, ref
from gristmill_testing.tiny_models import build_tiny_mistral
from gristmill_worker.adapter import gradient_views
from gristmill_worker.base_model import BaseModel

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs/reference/published-faults.md"
NAMED: Final = re.compile(r"`(tests/[a-z_/]+\.py)::(test_[a-z0-9_]+)`")
REPORTED: Final = (
    "SkyRL#2008", "tinker-cloud#66", "tinker-cookbook#206", "vllm#51226", "trl#7269", "vllm#42259",
    "transformers#29029", "transformers#29419", "transformers#46634", "torchtune#875",
    "transformers#37574", "mlx-lm#390", "peft#2018", "tinker-cookbook#593", "transformers#45127",
    "mlx-vlm#841", "mlx-examples#1095", "OpenRLHF#393", "open-r1#462", "TensorRT-LLM#18190",
    "vllm#47616", "vllm#42125", "vllm#29341", "verl#3461", "vllm#53888", "peft#1142", "trl#3089",
    "open-unlearning#178", "SkyRL#1751", "verl#4708", "peft#2438", "keys_values#43",
    "NeMo Automodel#3704",
)  # fmt: skip
PROMPT: Final = [5, 6, 7, 8]


def ids(sequence: SampledSequence) -> list[int]:
    return [int(token) for token in sequence.tokens.tolist()]


def scores(sequence: SampledSequence) -> list[float]:
    return [float(value) for value in sequence.logprobs.tolist()]


def trained(client: Client, turns: int = 3) -> Client:
    for _ in range(turns):
        client.train([datum(list(range(5, 25))), datum([9, 8, 7])])
        client.step()
    return client


def trainer_scores(client: Client, prompt: list[int], sequence: SampledSequence) -> list[float]:
    whole = prompt + ids(sequence)
    return client.score([datum(whole[:-1], whole[1:])])[0][len(prompt) - 1 :]


def listed() -> list[tuple[str, str, str]]:
    """(report, fault, tests) of each row of the page's table."""
    rows = [
        line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")
    ]
    return [(row[0].strip(), row[1].strip(), row[2].strip()) for row in rows[2:]]


def test_every_listed_fault_has_tests_that_exist() -> None:
    """A test that is renamed or removed is missed here."""
    rows = listed()
    assert len(rows) == 18
    for report, fault, tests in rows:
        named = NAMED.findall(tests)
        assert named, f"no test is named for {report}: {fault}"
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text())
            assert name in {
                node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
            }, f"{file} has no {name}, which is named for {report}"


def test_every_known_report_is_listed() -> None:
    text = " ".join(report for report, _, _ in listed())
    assert [report for report in REPORTED if report not in text] == []


# --- sampling ------------------------------------------------------------------------------------


def test_a_seed_is_honoured(client: Client) -> None:
    once, again = (client.sample(seed=11, num_samples=2, max_tokens=24) for _ in range(2))
    assert once == again
    other = client.sample(seed=12, num_samples=2, max_tokens=24)
    assert [ids(each) for each in other.sequences] != [ids(each) for each in once.sequences]
    assert ids(once.sequences[0]) != ids(once.sequences[1])


def test_a_neighbour_does_not_change_a_seeded_row(client: Client) -> None:
    """Alone, and with others beside it that draw from streams of their own."""
    alone = client.sample(seed=7, num_samples=1, max_tokens=24)
    crowd = client.sample(seed=7, num_samples=6, max_tokens=24)
    assert ids(crowd.sequences[0]) == ids(alone.sequences[0])


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.5}])
def test_a_truncated_distribution_leaves_the_ratio_at_one(
    client: Client, cut: dict[str, float]
) -> None:
    """exp(p - q) = 1 where nothing was renormalised: log-probabilities are the model's own."""
    adapter = ref(trained(client).save_weights())
    result = client.sample(prompt=PROMPT, num_samples=3, max_tokens=20, adapter=adapter, **cut)
    for sequence in result.sequences:
        expected = trainer_scores(client, PROMPT, sequence)
        assert scores(sequence) == pytest.approx(expected, abs=1e-3)


def test_a_sliding_cache_is_exact_to_three_windows(tmp_path: Path) -> None:
    base = load(build_tiny_mistral(tmp_path / "m", window=8))
    client = Client(make_runner(base, tmp_path / "a"), "u", "")
    client.open()
    for length in (7, 8, 9):
        prompt = list(range(20, 20 + length))
        (sequence,) = client.sample(prompt=prompt, max_tokens=24, temperature=0.0).sequences
        expected = trainer_scores(client, prompt, sequence)
        assert scores(sequence) == pytest.approx(expected, abs=1e-4)


def test_a_chat_prompt_has_one_bos(client: Client, llama: BaseModel) -> None:
    result = client.sample(prompt=None, messages=[ChatMessage("user", "hello")])
    text = "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    encoded = llama.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encoded.count(llama.tokenizer.bos_token_id) == 1
    assert result.prompt_tokens == len(encoded)


@pytest.mark.parametrize("stop", [None, [], ["e"], [" the", "o"], ["zzzz"]])
def test_tokens_and_logprobs_are_cut_together(client: Client, stop: list[str] | None) -> None:
    result = client.sample(num_samples=4, max_tokens=16, stop=stop, include_text=True)
    for sequence in result.sequences:
        assert len(ids(sequence)) == len(scores(sequence)) >= 1
        assert all(each not in (sequence.text or "") for each in stop or [])


def test_a_sample_after_training_is_of_the_new_version(client: Client) -> None:
    """sample, train, sample, both of one prompt: what was kept of the first serves the first alone."""
    first = ref(client.save_weights())
    before = client.sample(adapter=first, include_prompt_logprobs=True)
    second = ref(trained(client).save_weights())
    after = client.sample(adapter=second, include_prompt_logprobs=True)
    assert after.prompt_logprobs is not None
    assert before.prompt_logprobs is not None
    own = client.score([datum(PROMPT)])[0][:-1]
    assert after.prompt_logprobs.tolist()[1:] == pytest.approx(own, abs=1e-4)
    assert before.prompt_logprobs.tolist()[1:] != pytest.approx(own, abs=1e-2)
    assert client.sample(adapter=first).sequences == before.sequences


def test_a_worker_that_comes_back_samples_the_same(
    client: Client, llama_dir: Path, tmp_path: Path
) -> None:
    """Another process would load base and checkpoint anew, and have nothing in its caches."""
    saved = ref(trained(client).save_weights())
    before = client.sample(adapter=saved, temperature=0.0, max_tokens=24)
    root = client.runner.checkpoints.root
    again = Client(make_runner(load(llama_dir), root), "again", str(tmp_path / "again"))
    again.open()
    assert again.sample(adapter=saved, temperature=0.0, max_tokens=24) == before
    plain = again.sample(adapter=None, temperature=0.0, max_tokens=24)
    assert plain.sequences != before.sequences


# --- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["fast", "generic"])
def test_what_lies_behind_a_datum_does_not_change_it(
    llama_dir: Path, tmp_path: Path, path: str
) -> None:
    """32 more tokens on the right, as padding would be."""
    base = load(llama_dir, path=path)  # type: ignore[arg-type]
    client = Client(make_runner(base, tmp_path / "a"), "u", "")
    client.open()
    trained(client)
    tokens = list(range(20, 60))
    alone = client.score([datum(tokens)])[0][:-1]
    padded = client.score([datum([*tokens, *[0] * 32])])[0]
    assert padded[: len(alone)] == pytest.approx(alone, abs=1e-5)


class KeepNothing:
    """Every layer runs again for the backward pass."""

    def layers(self, table: object, rank: int) -> int:
        return 0


@pytest.mark.parametrize(
    ("family", "recomputed"),
    [
        ("llama", False), ("qwen2", False), ("mistral", False), ("gpt2", False), ("falcon", False),
        ("llama", True), ("qwen2", True), ("mistral", True),
    ],
)  # fmt: skip
def test_every_b_matrix_moves_in_one_step(
    family: str, recomputed: bool, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also where layers are run again over a frozen base for the backward pass."""
    base = load(family_dir(family))
    base.keeper = KeepNothing() if recomputed else None
    client = Client(make_runner(base, tmp_path / "a"), "u", "")
    client.open()
    assert logprobs(client.train([datum(list(range(5, 25)))]))
    client.step()
    views = gradient_views(client.session.adapter.layout, client.session.adapter.weights)
    for name, view in zip(base.names, views, strict=True):
        assert bool(torch.count_nonzero(view.b)), f"B of {name} did not move"
