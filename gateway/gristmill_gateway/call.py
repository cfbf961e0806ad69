"""One request on its way through the front door, and what a wire must be able to do with it."""

from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from gristmill_contracts.errors import GristmillError
from gristmill_gateway.caller import Caller
from gristmill_gateway.sigv4 import SignedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """request_id: ours, in every answer and log line. connection: tells when the client goes away."""

    request: SignedRequest
    request_id: str
    connection: Request


class Wire(Protocol):
    """A protocol family of the public port."""

    def operation(self, call: Call) -> str:
        """The operation's name for metrics and logs, from a fixed set."""
        ...

    def body_bytes_max(self, call: Call) -> int: ...

    async def answer(self, call: Call, caller: Caller, body: bytes) -> Response:
        """Raises GristmillError; the front door then asks `refuse`."""
        ...

    def refuse(self, call: Call, error: GristmillError | None) -> Response:
        """An error in this wire's shape. None = an exception that nobody foresaw."""
        ...
