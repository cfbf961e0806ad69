"""The tools of this folder can fail: the recorder sees what is not called, the relay loses answers."""

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from gristmill_testing.faulty_proxy import faulty_proxy
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
