"""What the recipes are made of: the official SDK alone, real text, and rewards that can be checked."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill_testing.recipe import FOLDER, load_recipe

RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))


def imported(name: str) -> set[str]:
    """Top-level names of everything the recipe imports."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    plain = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    return {
        text.partition(".")[0]
        for text in plain
        | {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    }


def test_the_recipes_are_these() -> None:
    assert RECIPES == ["evaluate", "resume", "rl", "sft"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_uses_the_official_sdk_and_nothing_of_ours(name: str) -> None:
    found = imported(name)
    assert "sagemaker" in found
    assert {module for module in found if module.startswith("gristmill")} == set()
    assert found.isdisjoint(RECIPES)


@pytest.mark.parametrize("name", ["rl", "evaluate"])
@pytest.mark.parametrize(
    ("text", "reward"),
    [
        pytest.param("fox", 1.0, id="one lowercase word"),
        pytest.param(" fox.", 1.0, id="a full stop is forgiven"),
        pytest.param("fox, or maybe", 1.0, id="what stopped it is no part of it"),
        pytest.param("Fox", 0.5, id="uppercase"),
        pytest.param("red fox", 0.25, id="two words"),
        pytest.param("The animal is a Fox", 0.1, id="a sentence"),
        pytest.param("f0x", 0.5, id="a digit"),
        pytest.param(" . ", 0.0, id="nothing"),
        pytest.param("", 0.0, id="empty"),
    ],
)
def test_the_reward_is(name: str, text: str, reward: float) -> None:
    assert load_recipe(name).reward_of(text) == pytest.approx(reward)


def answer(reward: float, tokens: list[int] | None = None) -> Any:
    tokens = [5, 6] if tokens is None else tokens
    return load_recipe("rl").Answer([1, 2, 3], tokens, [-0.5] * len(tokens), "", reward)


def test_an_advantage_stands_on_the_answer_alone_and_is_relative_to_its_group() -> None:
    datums = load_recipe("rl").datums_of([[answer(1.0), answer(0.5)]])
    assert [datum.model_input.to_ints() for datum in datums] == [[1, 2, 3, 5]] * 2
    inputs = datums[0].loss_fn_inputs
    assert inputs["target_tokens"].data == [2, 3, 5, 6]
    assert inputs["weights"].data == [0.0, 0.0, 1.0, 1.0]
    assert inputs["advantages"].data == [0.0, 0.0, 0.25, 0.25]
    assert inputs["logprobs"].data == [0.0, 0.0, -0.5, -0.5]
    assert datums[1].loss_fn_inputs["advantages"].data == [0.0, 0.0, -0.25, -0.25]


def test_a_group_that_agrees_teaches_nothing() -> None:
    recipe = load_recipe("rl")
    assert recipe.datums_of([[answer(0.5), answer(0.5)]]) == []
    assert len(recipe.datums_of([[answer(0.5), answer(0.5)], [answer(0.0), answer(1.0)]])) == 2


class Letters:
    """A tokenizer with a token for each letter."""

    eos_token_id = 0

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> list[int]:
        return self.encode(f"<{messages[0]['content']}>")


def test_sft_learns_the_answer_and_its_end_token_only() -> None:
    datum = load_recipe("sft").encode(Letters(), "q", "ab")
    tokens = [*map(ord, "<q>ab")]
    assert datum.model_input.to_ints() == tokens
    assert datum.loss_fn_inputs["target_tokens"].data == [*tokens[1:], 0]
    assert datum.loss_fn_inputs["weights"].data == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_sft_reports_the_loss_per_weighted_token() -> None:
    recipe = load_recipe("sft")
    datums = [recipe.encode(Letters(), "q", "a"), recipe.encode(Letters(), "q", "abc")]
    # Weighted tokens: 2 and 4. The wire's loss is the mean over datums of each one's sum.
    assert recipe.loss_per_token({"actor/pg_loss": 9.0}, datums) == pytest.approx(9.0 * 2 / 6)


def test_sft_text_is_real_and_short() -> None:
    pairs = load_recipe("sft").questions_and_answers()
    assert len(pairs) >= 150
    assert ("What does math.sqrt do?", "Return the square root of x.") in pairs
    assert len({answer for _, answer in pairs}) == len(pairs)
    assert all(len(answer) <= 121 and answer.endswith(".") for _, answer in pairs)


def test_resume_trains_on_lines_of_the_zen() -> None:
    datums = load_recipe("resume").zen(Letters())
    assert len(datums) >= 19
    assert "".join(map(chr, datums[0].model_input.to_ints())) == "The Zen of Python, by Tim Peter"
    assert datums[0].loss_fn_inputs["target_tokens"].data[-1] == ord("s")


def test_the_bill_is_read_from_the_row_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("sft")
    out = '{"rows": [{"session_name": "a", "train": 1}, {"session_name": "b", "train": 2}]}'
    monkeypatch.setattr(recipe.shutil, "which", lambda _: "gristmill")
    monkeypatch.setattr(
        recipe.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=out, returncode=0)
    )
    assert recipe.billed("b")["train"] == 2
    assert recipe.billed("c") == {}
