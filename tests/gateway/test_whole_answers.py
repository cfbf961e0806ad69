"""What a gateway that dies has sent of an answer: all of it, or nothing that an SDK takes for one."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse, StreamingResponse
from uvicorn.server import ServerState

from gristmill_gateway.whole_answers import WholeAnswers

BODY = {"operationId": "x" * 40_000}


class Wire(asyncio.Transport):
    """Keeps each write apart."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        """The second request is here already."""

    def resume_reading(self) -> None:
        """Nothing more comes."""


def application(two: asyncio.Event) -> FastAPI:
    app = FastAPI()

    @app.get("/whole")
    async def whole() -> JSONResponse:
        return JSONResponse(BODY)

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def chunks() -> AsyncIterator[str]:
            yield "one"
            await two.wait()
            yield "two"

        return StreamingResponse(chunks())

    return app


async def until_written(wire: Wire, last: bytes) -> None:
    async with asyncio.timeout(30):
        while not (wire.writes and wire.writes[-1].endswith(last)):
            await asyncio.sleep(0)


def connected(app: FastAPI) -> tuple[Wire, WholeAnswers]:
    config = uvicorn.Config(app, http=WholeAnswers, access_log=False, log_config=None)
    config.load()
    protocol = WholeAnswers(config, ServerState(), {}, asyncio.get_running_loop())
    wire = Wire()
    protocol.connection_made(wire)
    return wire, protocol


@pytest.mark.parametrize("closes", [False, True], ids=["kept alive", "closed"])
async def test_head_and_body_leave_in_one_write(closes: bool) -> None:
    wire, protocol = connected(application(asyncio.Event()))
    connection = b"Connection: close\r\n" if closes else b""
    protocol.data_received(b"GET /whole HTTP/1.1\r\nHost: gateway\r\n" + connection + b"\r\n")
    await until_written(wire, b'"}')
    (answer,) = wire.writes
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b'x"}')
    assert wire.closed == closes
    protocol.connection_lost(None)


async def test_answers_to_two_requests_at_once_keep_their_order() -> None:
    wire, protocol = connected(application(asyncio.Event()))
    ask = b"GET /%s HTTP/1.1\r\nHost: gateway\r\n\r\n"
    protocol.data_received(ask % b"absent" + ask % b"whole")
    await until_written(wire, b'x"}')
    text = b"".join(wire.writes)
    assert text.index(b"404") < text.index(b"200 OK")
    protocol.connection_lost(None)


async def test_a_stream_is_written_as_it_comes() -> None:
    two = asyncio.Event()
    wire, protocol = connected(application(two))
    protocol.data_received(b"GET /stream HTTP/1.1\r\nHost: gateway\r\n\r\n")
    await until_written(wire, b"one\r\n")
    two.set()
    await until_written(wire, b"0\r\n\r\n")
    assert b"two" in wire.writes[-1] or b"two" in wire.writes[-2]
    protocol.connection_lost(None)
