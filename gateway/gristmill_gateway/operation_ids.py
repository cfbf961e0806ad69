"""Public operation ids: which operation of which session, and a MAC that only a gateway makes. Pure.

The gateway keeps nothing, so the id says by itself where its operation is. With no meter to ask, a
valid id still names an operation that was accepted, for nothing else is given an id.
"""

import base64
import binascii
import hashlib
import hmac
import re
import struct
import uuid
from typing import Final

from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.ids import OpId, SessionUid, Stream

MAC_BYTES: Final = 12
_NAME: Final = struct.Struct(">16sBQ")
_CODES: Final[dict[Stream, int]] = {"train": 1, "log": 2}
_TEXT: Final = re.compile(r"[a-z2-7]{60}")


def make_operation_id(key: bytes, operation: OpId) -> str:
    """60 lower-case letters and digits."""
    name = _name(operation)
    return _spell(name + _mac(key, name))


def read_operation_id(key: bytes, text: str, session: SessionUid, stream: Stream) -> OpId:
    """The operation, if the id is genuine and of this session and stream. Raises NotFoundError."""
    operation = OpId(session, stream, _number(text))
    # Made again and compared, so that there is one spelling of one operation.
    genuine = make_operation_id(key, operation)
    if not hmac.compare_digest(genuine.encode(), text.encode("utf-8", "replace")):
        what = "training" if stream == "train" else "sampling"
        raise NotFoundError(
            f"{text[:64]!r} is no {what} operation of this session; use the operationId that its submit "
            "was answered with"
        )
    return operation


def _number(text: str) -> int:
    if not _TEXT.fullmatch(text):
        return 0
    try:
        packed = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    except binascii.Error:
        return 0
    number: int = _NAME.unpack(packed[: _NAME.size])[2]
    return number


def _name(operation: OpId) -> bytes:
    return _NAME.pack(_session_bytes(operation.session), _CODES[operation.stream], operation.number)


def _session_bytes(session: SessionUid) -> bytes:
    """A uid is a UUID; an applied manifest may carry any text, which is hashed to fit."""
    try:
        return uuid.UUID(session).bytes
    except ValueError:
        return hashlib.sha256(session.encode()).digest()[:16]


def _mac(key: bytes, name: bytes) -> bytes:
    return hmac.new(key, b"operation-id" + name, hashlib.sha256).digest()[:MAC_BYTES]


def _spell(packed: bytes) -> str:
    return base64.b32encode(packed).decode().rstrip("=").lower()
