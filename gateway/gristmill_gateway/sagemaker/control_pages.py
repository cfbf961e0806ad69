"""NextTokens: where the next page of one caller's one question begins, signed. Pure."""

import base64
import hashlib
import hmac
import json
from typing import Final

from gristmill_contracts.errors import InvalidRequestError

MAC_BYTES: Final = 16

Place = list[int | str]


def make_token(key: bytes, question: tuple[object, ...], place: Place) -> str:
    """A token for the page behind `place`. question: tenant, operation and every filter."""
    payload = json.dumps(place, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(_mac(key, question, payload) + payload).decode()


def read_token(
    key: bytes, question: tuple[object, ...], token: str, kinds: tuple[type, ...]
) -> Place:
    """The place in a token that we made for this same question.

    kinds: the types that the place holds, in order. Raises InvalidRequestError.
    """
    try:
        raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
    except (ValueError, UnicodeEncodeError):
        raw = b""
    payload = raw[MAC_BYTES:]
    if not payload or not hmac.compare_digest(raw[:MAC_BYTES], _mac(key, question, payload)):
        raise InvalidRequestError(
            "NextToken is not one that this question was answered with; pass the NextToken of the page "
            "before, unchanged and with the same filters, or leave it out to begin again"
        )
    place: Place = json.loads(payload)
    if tuple(map(type, place)) != kinds:
        raise InvalidRequestError("NextToken is from another version; leave it out to begin again")
    return place


def _mac(key: bytes, question: tuple[object, ...], payload: bytes) -> bytes:
    asked = hashlib.sha256(repr(question).encode("utf-8", "backslashreplace")).digest()
    return hmac.new(key, asked + payload, hashlib.sha256).digest()[:MAC_BYTES]
