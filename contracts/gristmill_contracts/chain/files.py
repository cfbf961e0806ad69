"""What an auditor brings along: verifier keys, and heads that were kept in a second place."""

from collections.abc import Sequence
from pathlib import Path

from gristmill_contracts.chain.notes import SignedHead, VerifierKey, open_note, parse_keys
from gristmill_contracts.errors import InvalidRequestError


def read_keys(text: str) -> list[VerifierKey]:
    """A verifier key, or the path of a file that holds one on each line. Raises InvalidRequestError."""
    path = Path(text)
    try:
        found = path.read_text() if "+" not in text or path.exists() else text
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"key {text!r} can be read neither as key nor as file: {error}"
        ) from error
    if not found.split():
        raise InvalidRequestError(f"key file {text!r} is empty; without a key heads prove nothing")
    return parse_keys(found)


def read_heads(path: Path, keys: Sequence[VerifierKey]) -> list[SignedHead]:
    """The signed heads in a file, or in all files `*.note` below a folder.

    Raises InvalidRequestError where there is none, ForgedHeadError for one that no key signed.
    """
    files = sorted(path.rglob("*.note")) if path.is_dir() else [path]
    files = [
        file
        for file in files
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    try:
        notes = [file.read_text() for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"heads at {path} cannot be read: {error}") from error
    if not notes:
        raise InvalidRequestError(f"there is no signed head (*.note) below {path}")
    return [open_note(note, keys) for note in notes]
