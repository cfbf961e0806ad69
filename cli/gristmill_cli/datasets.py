"""How many tokens a data set trains on: counted where the tokens are there, tokenized where they are not."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gristmill_cli.errors import CommandError

Encode = Callable[[str], int]
TOKEN_FIELDS: Final = ("tokens", "input_ids", "model_input")
TEXT_FIELDS: Final = ("text", "prompt", "completion", "question", "answer")
LINE_BYTES_MAX: Final = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetCount:
    """`tokens`: of all rows, each once. `from_text`: rows that were tokenized here."""

    rows: int
    tokens: int
    longest: int
    from_text: int
    has_messages: bool


def count_dataset(path: Path, tokenizer: Path | None) -> DatasetCount:
    """Read a file of JSON lines. Raises CommandError naming the line that cannot be counted."""
    encode = None if tokenizer is None else load_tokenizer(tokenizer)
    rows = tokens = longest = from_text = 0
    has_messages = False
    for number, row in _rows(path):
        at = f"{path}, line {number}"
        count, text, messages = _count_row(at, row, encode)
        rows, tokens, longest = rows + 1, tokens + count, max(longest, count)
        from_text += text
        has_messages |= messages
    if not rows:
        raise CommandError(f"{path} holds no row; write one JSON object a line")
    return DatasetCount(
        rows=rows, tokens=tokens, longest=longest, from_text=from_text, has_messages=has_messages
    )


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), 1):
                if line.strip():
                    yield number, _read(path, number, line)
    except OSError as error:
        raise CommandError(f"the data set {path} cannot be read: {error.strerror}") from error


def _read(path: Path, number: int, line: bytes) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path}, line {number} is no JSON; write one object a line") from error
    if not isinstance(row, dict):
        raise CommandError(f"{path}, line {number} is no JSON object; write one a line")
    return row


def _count_row(at: str, row: dict[str, Any], encode: Encode | None) -> tuple[int, int, bool]:
    """Tokens of the model's input, 1 if they were made from text, and whether from chat messages."""
    for name in TOKEN_FIELDS:
        if name in row:
            return _token_count(at, name, row[name]), 0, False
    messages = row.get("messages")
    texts = [row[name] for name in TEXT_FIELDS if name in row]
    if isinstance(messages, list):
        texts = [each.get("content") for each in messages if isinstance(each, dict)]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise CommandError(
            f"{at} has neither tokens ({', '.join(TOKEN_FIELDS)}) nor texts (messages, "
            f"{', '.join(TEXT_FIELDS)}); name one of them"
        )
    if encode is None:
        raise CommandError(
            f"{at} holds text; name the model's tokenizer with --tokenizer (its folder, or tokenizer.json)"
        )
    # The last token is a target alone: nothing is predicted from it.
    return max(0, sum(encode(text) for text in texts) - 1), 1, isinstance(messages, list)


def _token_count(at: str, name: str, value: Any) -> int:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise CommandError(f"{at}: {name} is no list of token numbers; write whole numbers")
    return len(value)


def load_tokenizer(path: Path) -> Encode:
    """Counts the tokens of a text. Raises CommandError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CommandError(
            "counting text needs the package tokenizers; install it, or write token numbers into the data set"
        ) from error
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise CommandError(f"there is no tokenizer at {file}; name a folder with a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise CommandError(f"{file} is no tokenizer: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
