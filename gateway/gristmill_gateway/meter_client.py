"""The meter of a session over HTTP. The one module that knows how a gateway proves itself to a meter."""

import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final, TypeVar

import aiohttp
import msgspec

from gristmill_contracts.errors import (
    FencedError,
    GristmillError,
    InvariantError,
    UnavailableError,
    error_from,
)
from gristmill_contracts.http import (
    ATTEMPT_HEADER,
    CONTENT_TYPE,
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    OperationView,
    Problem,
    Refuse,
    SessionView,
    StreamChunk,
    Submit,
    Submitted,
)
from gristmill_contracts.ids import OpId
from gristmill_gateway.directory import Endpoint

T = TypeVar("T")

ANSWER_TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 5.0
VIEW_TIMEOUT_S: Final = 2.0
SERVED_PROTOCOLS: Final = tuple(
    str(version) for version in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
)
"""Ours, the one before, and the one after: where a meter is newer, it is the meter that serves ours."""
CHUNK_BYTES_MAX: Final = 16 * 2**20
_LENGTH: Final = struct.Struct("<I")
_LOST: Final = (aiohttp.ClientError, TimeoutError, OSError)


class MeterAwayError(UnavailableError):
    """No meter answers for the session just now."""


class NotServedError(UnavailableError):
    """The meter answers, and does not serve the session (yet, or any more)."""


class MeterClient:
    """`http` belongs to the caller, who closes it.

    Every method raises MeterAwayError where no answer came, FencedError where the endpoint is of
    another attempt, and else what the meter reported.
    """

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def submit(self, endpoint: Endpoint, message: Submit) -> Submitted:
        return await self._call(endpoint, "POST", "/operations", Submitted, message=message)

    async def refuse(self, endpoint: Endpoint, message: Refuse) -> Submitted:
        return await self._call(endpoint, "POST", "/refusals", Submitted, message=message)

    async def poll(self, endpoint: Endpoint, operation: OpId, wait_s: float) -> OperationView:
        path = f"/operations/{operation.stream}/{operation.number}?wait_s={wait_s:.3f}"
        return await self._call(
            endpoint, "GET", path, OperationView, timeout_s=wait_s + ANSWER_TIMEOUT_S
        )

    async def view(self, endpoint: Endpoint) -> SessionView:
        return await self._call(endpoint, "GET", "", SessionView, timeout_s=VIEW_TIMEOUT_S)

    @asynccontextmanager
    async def stream(
        self, endpoint: Endpoint, message: Submit
    ) -> AsyncGenerator[AsyncGenerator[StreamChunk, None], None]:
        """The chunks of a token stream; leaving the block closes it, which ends the operation."""
        try:
            async with self._http.post(
                _url(endpoint, "/streams"),
                data=msgspec.msgpack.encode(message),
                headers=_headers(endpoint),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            ) as response:
                _check_protocol(response)
                if not response.ok:
                    raise reported(response.status, await response.read())
                yield _chunks(response.content)
        except _LOST as error:
            raise _away(endpoint, error) from error

    async def _call(
        self,
        endpoint: Endpoint,
        method: str,
        path: str,
        shape: type[T],
        *,
        message: msgspec.Struct | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> T:
        try:
            async with self._http.request(
                method,
                _url(endpoint, path),
                data=None if message is None else msgspec.msgpack.encode(message),
                headers=_headers(endpoint),
                timeout=aiohttp.ClientTimeout(
                    total=timeout_s, sock_connect=min(timeout_s, CONNECT_TIMEOUT_S)
                ),
            ) as response:
                _check_protocol(response)
                answer = await response.read()
                status = response.status
        except _LOST as error:
            raise _away(endpoint, error) from error
        if status >= HTTPStatus.BAD_REQUEST:
            raise reported(status, answer)
        try:
            return msgspec.msgpack.decode(answer, type=shape)
        except msgspec.MsgspecError as error:
            raise InvariantError(f"the meter's answer is no {shape.__name__}: {error}") from error


async def _chunks(content: aiohttp.StreamReader) -> AsyncGenerator[StreamChunk, None]:
    """Chunks up to the final one or an error. Raises MeterAwayError where the stream breaks off."""
    while True:
        try:
            (size,) = _LENGTH.unpack(await content.readexactly(_LENGTH.size))
            if size > CHUNK_BYTES_MAX:
                raise InvariantError(f"the meter announced a chunk of {size} bytes")
            encoded = await content.readexactly(size)
        except (EOFError, *_LOST) as error:
            raise MeterAwayError("the token stream broke off; send the request again") from error
        chunk = msgspec.msgpack.decode(encoded, type=StreamChunk)
        yield chunk
        if chunk.final is not None or chunk.error is not None:
            return


def reported(status: int, answer: bytes) -> GristmillError:
    """The error that a meter answered with."""
    try:
        problem = msgspec.msgpack.decode(answer, type=Problem)
    except msgspec.MsgspecError:
        return UnavailableError(f"the meter answered {status} without saying why; try again")
    if problem.code == "unauthenticated":
        # A secret lives as long as its attempt: another secret is another attempt.
        return FencedError(problem.message)
    return error_from(problem.code, problem.message)


def _check_protocol(response: aiohttp.ClientResponse) -> None:
    """Raises UnavailableError for a meter too old or too new. One that says nothing is the one before."""
    said = response.headers.get(PROTOCOL_HEADER, str(PROTOCOL_VERSION - 1))
    if said not in SERVED_PROTOCOLS:
        raise UnavailableError(
            f"the session's meter speaks version {said[:20]!r} of the protocol, and this gateway "
            f"{' and '.join(SERVED_PROTOCOLS)}: restart the session with the annotation "
            "gristmill.dev/restart, or upgrade the gateway"
        )


def _url(endpoint: Endpoint, path: str) -> str:
    return f"{endpoint.url.rstrip('/')}/v1/sessions/{endpoint.session}{path}"


def _headers(endpoint: Endpoint) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {endpoint.secret}",
        ATTEMPT_HEADER: str(endpoint.attempt),
        PROTOCOL_HEADER: str(PROTOCOL_VERSION),
        "Content-Type": CONTENT_TYPE,
    }


def _away(endpoint: Endpoint, error: Exception) -> MeterAwayError:
    return MeterAwayError(
        f"session {endpoint.session} cannot be reached just now ({type(error).__name__}); try again"
    )
