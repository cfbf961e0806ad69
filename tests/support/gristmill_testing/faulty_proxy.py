"""A TCP relay that loses answers and cuts streams, between a client and a server on the loopback.

The server always sees and serves the request; only its answer is touched. That is the fault that
makes a client resubmit work which was accepted.
"""

import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

CHUNK_BYTES = 65_536
EXPECT = re.compile(rb"(?i)\r\nexpect:\s*100-continue(?=\r\n|$)")


@dataclass(slots=True)
class Fault:
    """What to do to the answer of the next `times` requests whose first line matches `pattern`.

    pass_bytes: how much of the answer reaches the client before its connection ends.
    """

    pattern: str
    pass_bytes: int = 0
    times: int = 1
    hits: int = 0


@dataclass(slots=True)
class FaultyProxy:
    """The relay of one server. `faults` may be changed while it runs."""

    url: str
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lose_answer(self, pattern: str, times: int = 1, pass_bytes: int = 0) -> Fault:
        fault = Fault(pattern=pattern, times=times, pass_bytes=pass_bytes)
        with self.lock:
            self.faults.append(fault)
        return fault

    def take(self, head: bytes) -> Fault | None:
        """The fault that this request meets, if any; counts it."""
        line = head.split(b"\r\n", 1)[0].decode("latin-1")
        with self.lock:
            for fault in self.faults:
                if fault.hits < fault.times and re.search(fault.pattern, line):
                    fault.hits += 1
                    return fault
        return None


@contextmanager
def faulty_proxy(target_url: str) -> Iterator[FaultyProxy]:
    """Run a relay to `target_url` (http://host:port) on a free loopback port."""
    parts = urlsplit(target_url)
    assert parts.hostname is not None
    assert parts.port is not None
    target = (parts.hostname, parts.port)
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = FaultyProxy(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    accepting = threading.Thread(target=_accept, args=(proxy, listener, target), daemon=True)
    accepting.start()
    try:
        yield proxy
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(timeout=5)


def _accept(proxy: FaultyProxy, listener: socket.socket, target: tuple[str, int]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(proxy, client, target), daemon=True).start()


def _serve(proxy: FaultyProxy, client: socket.socket, target: tuple[str, int]) -> None:
    """One connection: requests in turn, each answer relayed, shortened or dropped."""
    with client, suppress(OSError), socket.create_connection(target) as server:
        while request := _read_request(client):
            fault = proxy.take(request)
            server.sendall(request)
            if not _relay_answer(server, client, fault.pass_bytes if fault else None):
                # A reset would take back what was passed on and not read yet.
                if fault and not fault.pass_bytes:
                    _reset(client)
                return


def _read_request(client: socket.socket) -> bytes:
    """Head and body of one HTTP/1.1 request; empty when the client is gone."""
    buffer = b""
    while b"\r\n\r\n" not in buffer:
        part = client.recv(CHUNK_BYTES)
        if not part:
            return b""
        buffer += part
    head, _, body = buffer.partition(b"\r\n\r\n")
    if EXPECT.search(head):
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        buffer = EXPECT.sub(b"", head) + b"\r\n\r\n" + body
    missing = _length(head) - len(body)
    while missing > 0:
        part = client.recv(min(CHUNK_BYTES, missing))
        if not part:
            return b""
        buffer += part
        missing -= len(part)
    return buffer


def _relay_answer(server: socket.socket, client: socket.socket, allowed: int | None) -> bool:
    """Pass one answer on, `allowed` bytes of it at most. False: this connection is over."""
    seen = b""
    passed = 0
    while True:
        part = server.recv(CHUNK_BYTES)
        if not part:
            return False
        seen += part
        sendable = part if allowed is None else part[: max(0, allowed - passed)]
        client.sendall(sendable)
        passed += len(sendable)
        if allowed is not None and passed >= allowed:
            return False
        if _is_complete(seen):
            return True


def _is_complete(answer: bytes) -> bool:
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        return False
    if re.search(rb"(?im)^transfer-encoding:\s*chunked", head):
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= _length(head)


def _length(head: bytes) -> int:
    match = re.search(rb"(?im)^content-length:\s*(\d+)", head)
    return int(match.group(1)) if match else 0


def _reset(client: socket.socket) -> None:
    """Close with a TCP reset, as a machine that died would."""
    with suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
