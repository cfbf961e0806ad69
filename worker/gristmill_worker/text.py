"""Text of a growing token sequence, and where a stop string ends it."""

from collections.abc import Sequence
from typing import Any, Final

REPLACEMENT: Final = "\ufffd"
CHARACTER_TOKENS_MAX: Final = 4
"""UTF-8 needs at most four bytes, and so four tokens, for a character."""


class Detokenizer:
    """Decodes token by token; bytes of an unfinished character wait for the rest.

    A token's text depends on its neighbours, so that a window of earlier tokens is decoded with it.
    """

    def __init__(self, tokenizer: Any, *, skip_special: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_special = skip_special
        self.tokens: list[int] = []
        self.text = ""
        self.window = 0
        self.read = 0

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=self.skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def push(self, token: int) -> str:
        """Add a token; returns the new text, "" while a character is unfinished."""
        self.tokens.append(token)
        before = self._decode(self.tokens[self.window : self.read])
        now = self._decode(self.tokens[self.window :])
        waiting = len(self.tokens) - self.read < CHARACTER_TOKENS_MAX
        if (now.endswith(REPLACEMENT) and waiting) or len(now) <= len(before):
            return ""
        self.window, self.read = self.read, len(self.tokens)
        new = now[len(before) :]
        self.text += new
        return new

    def finish(self) -> str:
        """The rest, unfinished characters as U+FFFD. Returns what it added."""
        before = self._decode(self.tokens[self.window : self.read])
        new = self._decode(self.tokens[self.window :])[len(before) :]
        self.window = self.read = len(self.tokens)
        self.text += new
        return new


def first_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Where the earliest stop string begins at or after `start`."""
    found = [at for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(found) if found else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that may become a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
