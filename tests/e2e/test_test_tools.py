"""The tools of this folder can fail: the recorder sees what is not called, the relay loses answers,
a server that shall end answers first."""

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvicorn

from gristmill_testing.faulty_proxy import faulty_proxy
from gristmill_testing.prompt_server import PromptServer
from gristmill_testing.public_surface import Surface

BODY = b"x" * 5000


class Base:
    def inherited(self) -> str:
        return "inherited"


class Client(Base):
    def called(self) -> int:
        return self._private()

    def forgotten(self) -> None: ...

    @property
    def size(self) -> int:
        return 1

    @classmethod
    def make(cls) -> "Client":
        return cls()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None: ...

    def _private(self) -> int:
        return 2


class Special(Client):
    def called(self) -> int:
        return 3


def test_the_recorder_names_what_nobody_called_and_restores_the_class() -> None:
    surface = Surface([Client], package=__name__)
    original = vars(Client)["called"]
    with surface.recording():
        assert (Special.make().called(), Client().size) == (3, 1)
    assert vars(Client)["called"] is original
    assert surface.uncalled == [
        "Client.__enter__", "Client.__exit__", "Client.forgotten", "Client.inherited",
    ]  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.server.seen.append(self.rfile.read(int(self.headers["Content-Length"])))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _post(url: str, path: str) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    try:
        connection.request("POST", path, body=b"hello")
        return connection.getresponse().read()
    finally:
        connection.close()


def test_the_relay_loses_the_answer_but_the_server_served_the_request(
    server: ThreadingHTTPServer,
) -> None:
    with faulty_proxy(f"http://127.0.0.1:{server.server_port}") as proxy:
        fault = proxy.lose_answer("^POST /lost ")
        assert _post(proxy.url, "/kept") == BODY
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            _post(proxy.url, "/lost")
        assert _post(proxy.url, "/lost") == BODY
    assert fault.hits == 1
    assert server.seen == [b"hello"] * 3  # type: ignore[attr-defined]


def test_the_relay_cuts_an_answer_in_the_middle(server: ThreadingHTTPServer) -> None:
    with faulty_proxy(f"http://127.0.0.1:{server.server_port}") as proxy:
        proxy.lose_answer("^POST /cut ", pass_bytes=1000)
        with pytest.raises((ConnectionError, http.client.IncompleteRead)):
            _post(proxy.url, "/cut")


async def test_a_server_that_shall_end_answers_what_it_has_taken_before() -> None:
    taken, go = asyncio.Event(), asyncio.Event()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        taken.set()
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": BODY})

    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = PromptServer(uvicorn.Config(app, lifespan="off", log_config=None))
    serving = asyncio.create_task(server._serve([listener]))

    async def ask() -> bytes:
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return await response.read()

    asking = asyncio.create_task(ask())
    await taken.wait()
    server.stop()
    while listener.fileno() != -1:  # Until it takes nobody any more.
        await asyncio.sleep(0)
    for _ in range(100):  # Turns in which it could end, if it did not wait for the answer.
        await asyncio.sleep(0)
    assert not serving.done()
    go.set()
    assert await asking == BODY
    await serving
