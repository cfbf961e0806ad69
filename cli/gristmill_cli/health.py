"""What a part's /readyz says, as one line for people."""

from http import HTTPStatus
from typing import Final

import msgspec

from gristmill_cli.local.ledger_client import problem_of

CHARS_MAX: Final = 200


def health_of(status: int, body: bytes) -> str:
    """`ready`, or why not: the message of a problem, or the text that came."""
    if status == HTTPStatus.OK:
        return "ready"
    try:
        text = problem_of(body).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:CHARS_MAX] or f"status {status}"
