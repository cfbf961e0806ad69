"""What a part's /readyz says, as one line for people."""

from http import HTTPStatus
from typing import Final

import msgspec

from gristmill_contracts.http import Problem

CHARS_MAX: Final = 200


def health_of(status: int, body: bytes) -> str:
    """`ready`, or why not: the message of a problem, or the text that came."""
    if status == HTTPStatus.OK:
        return "ready"
    try:
        decode = msgspec.json.decode if body.startswith(b"{") else msgspec.msgpack.decode
        text = decode(body, type=Problem).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:CHARS_MAX] or f"status {status}"
