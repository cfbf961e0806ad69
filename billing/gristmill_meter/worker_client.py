"""The worker over HTTP on its unix socket."""

import struct
from collections.abc import AsyncGenerator
from typing import Final, TypeVar

import aiohttp
import msgspec

from gristmill_contracts.errors import GristmillError, error_from
from gristmill_contracts.http import (
    CONTENT_TYPE,
    Executed,
    OpenedSession,
    OpenSession,
    Problem,
    Snapshotted,
    StreamChunk,
    WorkerStatus,
)
from gristmill_contracts.ids import SessionUid
from gristmill_meter.ports import ExecuteCall, WorkerLostError

T = TypeVar("T")

BASE: Final = "http://worker"
CONNECT_TIMEOUT_S: Final = 5.0
KEEPALIVE_S: Final = 4.0
"""Below uvicorn's default of 5 s, so that no request meets a connection that is just being closed."""
CHUNK_BYTES_MAX: Final = 16 * 2**20
_LENGTH: Final = struct.Struct("<I")

_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, OSError)


class WorkerClient:
    """Implements `ports.Worker`. Call `open` in the event loop, and `close` at the end."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self.http: aiohttp.ClientSession | None = None

    def open(self) -> None:
        # limit 0: a train operation must never wait behind held sampling connections.
        connector = aiohttp.UnixConnector(
            path=self.socket_path, limit=0, keepalive_timeout=KEEPALIVE_S
        )
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S)
        self.http = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def close(self) -> None:
        if self.http is not None:
            await self.http.close()

    async def status(self) -> WorkerStatus:
        return await self._call("GET", "/v1/status", None, WorkerStatus)

    async def open_session(self, uid: SessionUid, request: OpenSession) -> OpenedSession:
        return await self._call("PUT", f"/v1/sessions/{uid}", request, OpenedSession)

    async def execute(self, uid: SessionUid, call: ExecuteCall) -> Executed:
        return await self._call("POST", f"/v1/sessions/{uid}/execute", call, Executed)

    async def snapshot(self, uid: SessionUid) -> Snapshotted:
        return await self._call("POST", f"/v1/sessions/{uid}/snapshot", None, Snapshotted)

    async def close_session(self, uid: SessionUid) -> None:
        await self._call("DELETE", f"/v1/sessions/{uid}", None, dict[str, object])

    async def stream(self, uid: SessionUid, call: ExecuteCall) -> AsyncGenerator[StreamChunk, None]:
        try:
            async with self._http().post(
                f"{BASE}/v1/sessions/{uid}/stream", data=_encode(call), headers=_HEADERS
            ) as response:
                if response.status >= 400:
                    raise _problem(await response.read(), response.status)
                while True:
                    chunk = await _read_chunk(response.content)
                    yield chunk
                    if chunk.final is not None or chunk.error is not None:
                        return
        except _LOST as error:
            raise _lost(self.socket_path, error) from error

    async def _call(self, method: str, path: str, body: object, answer: type[T]) -> T:
        content = None if body is None else _encode(body)
        try:
            async with self._http().request(
                method, BASE + path, data=content, headers=_HEADERS
            ) as response:
                read = await response.read()
                status = response.status
        except _LOST as error:
            raise _lost(self.socket_path, error) from error
        if status >= 400:
            raise _problem(read, status)
        return msgspec.msgpack.decode(read, type=answer)

    def _http(self) -> aiohttp.ClientSession:
        if self.http is None:
            raise RuntimeError("the worker client was used before open()")
        return self.http


_HEADERS: Final = {"Content-Type": CONTENT_TYPE}


def _encode(body: object) -> bytes:
    return msgspec.msgpack.encode(body)


async def _read_chunk(content: aiohttp.StreamReader) -> StreamChunk:
    try:
        (size,) = _LENGTH.unpack(await content.readexactly(_LENGTH.size))
        if size > CHUNK_BYTES_MAX:
            raise aiohttp.ClientPayloadError(f"a chunk of {size} bytes was announced")
        return msgspec.msgpack.decode(await content.readexactly(size), type=StreamChunk)
    except EOFError as error:
        raise aiohttp.ClientPayloadError("the stream ended before its final chunk") from error


def _lost(socket_path: str, error: Exception) -> WorkerLostError:
    return WorkerLostError(f"the worker at {socket_path} is lost: {type(error).__name__}: {error}")


def _problem(body: bytes, status: int) -> GristmillError:
    try:
        problem = msgspec.msgpack.decode(body, type=Problem)
    except msgspec.MsgspecError:
        return error_from("internal", f"the worker answered {status} without a problem body")
    return error_from(problem.code, problem.message)
