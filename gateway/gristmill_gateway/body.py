"""Reads request bodies within bounds: each one's own, and one for all that are in memory at once."""

import re
from dataclasses import dataclass
from typing import Final

from starlette.requests import ClientDisconnect, Request

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError, OverloadedError
from gristmill_gateway.wire_errors import TooLargeError

_CHUNK_HEAD: Final = re.compile(rb"([0-9a-fA-F]{1,8})(?:;[^\r\n]*)?\r\n")


class ClientGoneError(Exception):
    """The client closed the connection; nobody is there to be answered."""


@dataclass(slots=True)
class BodyReader:
    """`held_bytes` counts bodies from their announcement until `release`."""

    held_bytes: int = 0

    async def read(self, request: Request, bytes_max: int) -> bytes:
        """Raises TooLargeError, OverloadedError, ClientGoneError. Afterwards the caller must `release`."""
        announced = _announced(request)
        if announced > bytes_max:
            raise _too_large(announced, bytes_max)
        self._take(announced)
        parts: list[bytes] = []
        size = 0
        try:
            async for part in request.stream():
                size += len(part)
                _check_size(size, bytes_max)
                if size > announced:
                    # A body without an announced length is counted as it comes.
                    self._take(size - announced)
                    announced = size
                parts.append(part)
        except ClientDisconnect as error:
            self.held_bytes -= announced
            raise ClientGoneError from error
        except BaseException:
            self.held_bytes -= announced
            raise
        self.held_bytes -= announced - size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self, body: bytes) -> None:
        self.held_bytes -= len(body)

    def _take(self, size: int) -> None:
        if self.held_bytes + size > limits.HELD_BODY_BYTES_MAX:
            raise OverloadedError(
                f"request bodies of {self.held_bytes} bytes are being worked on, and at most "
                f"{limits.HELD_BODY_BYTES_MAX} may be; try again shortly"
            )
        self.held_bytes += size


def _announced(request: Request) -> int:
    text = request.headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def _check_size(size: int, bytes_max: int) -> None:
    if size > bytes_max:
        raise _too_large(size, bytes_max)


def _too_large(size: int, bytes_max: int) -> TooLargeError:
    return TooLargeError(
        f"the request body has {size} bytes or more, and at most {bytes_max} are taken; send smaller "
        "batches"
    )


def decode_aws_chunked(body: bytes) -> bytes:
    """The content of an `aws-chunked` body; chunk signatures and trailers are dropped.

    Raises InvalidRequestError.
    """
    content: list[bytes] = []
    at = 0
    while True:
        head = _CHUNK_HEAD.match(body, at)
        if head is None:
            raise InvalidRequestError(
                "the aws-chunked body breaks off or has a malformed chunk head"
            )
        size = int(head.group(1), 16)
        end = head.end() + size
        if size == 0:
            return b"".join(content)
        if body[end : end + 2] != b"\r\n":
            raise InvalidRequestError(f"a chunk of {size} bytes in the aws-chunked body breaks off")
        content.append(body[head.end() : end])
        at = end + 2
