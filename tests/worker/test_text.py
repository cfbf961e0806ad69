"""Text from tokens, one at a time, and stop strings in it."""

from typing import Any

import pytest

from gristmill_testing.tiny_models import tiny_tokenizer
from gristmill_worker.text import Detokenizer, first_stop, held_back

WORDS = "hello the world, ABCDEF é 世界 🙂 end"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def test_token_by_token_equals_all_at_once(tokenizer: Any) -> None:
    ids = tokenizer.encode(WORDS)
    decoder = Detokenizer(tokenizer, skip_special=True)
    pieces = [decoder.push(token) for token in ids] + [decoder.finish()]
    assert "".join(pieces) == decoder.text == WORDS
    assert all("\ufffd" not in piece for piece in pieces)


def test_an_unfinished_character_is_shown_at_the_end_only(tokenizer: Any) -> None:
    ids = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    decoder = Detokenizer(tokenizer, skip_special=True)
    assert "".join(decoder.push(token) for token in ids) == "a"
    assert decoder.finish().startswith("\ufffd")


def test_bytes_that_never_become_a_character_do_not_pile_up(tokenizer: Any) -> None:
    (byte,) = tokenizer.encode("é", add_special_tokens=False)[:1]
    decoder = Detokenizer(tokenizer, skip_special=True)
    for _ in range(40):
        decoder.push(byte)
    assert len(decoder.tokens) - decoder.read <= 4


def test_special_tokens_are_shown_only_when_asked_for(tokenizer: Any) -> None:
    ids = tokenizer.encode("hello")
    plain, marked = (Detokenizer(tokenizer, skip_special=skip) for skip in (True, False))
    for token in ids:
        plain.push(token)
        marked.push(token)
    assert (plain.text, marked.text) == ("hello", "<s>hello")


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [("abcdef", ["DE", "de"], 3), ("abc", ["x"], None), ("xay", ["y", "a"], 1), ("ab", [], None)],
)
def test_the_earliest_stop_counts(text: str, stops: list[str], expected: int | None) -> None:
    assert first_stop(text, stops) == expected


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [("hello <", ["<end>"], 1), ("hello <en", ["<end>"], 3), ("hello", ["<end>"], 0),
     ("aab", ["abc", "b!"], 2), ("x", [], 0), ("\n", ["\n\n"], 1)],
)  # fmt: skip
def test_text_that_may_become_a_stop_is_held_back(
    text: str, stops: list[str], expected: int
) -> None:
    assert held_back(text, stops) == expected
