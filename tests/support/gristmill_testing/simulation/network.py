"""HTTP without sockets: the real clients speak to the real applications, over links that fail.

`SimHttp` stands in for `aiohttp.ClientSession`, and an application is any ASGI callable. A link delays every
message by chance, so that messages overtake one another; it loses and doubles requests, loses answers, cuts
streams, and is partitioned. What is lost shows to its sender as a reset, or as silence until its timeout.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp

from gristmill_testing.simulation.loop import NOBODY, Process, SimLoop

Asgi = Callable[[Any, Any, Any], Awaitable[None]]
RETRANSMIT_S = 0.7
SILENCE_S_MAX = 120.0
"""Of who has no patience of its own. Shorter than `QUIET_S_MAX`: whoever waits at the end still goes on."""


@dataclass(slots=True, kw_only=True)
class Weather:
    """Probabilities for one request on a bad link, and the longest delay of a message."""

    lose_request: float = 0.0
    lose_answer: float = 0.0
    double: float = 0.0
    cut: float = 0.0
    delay_s: float = 0.004
    slow: float = 0.0
    """Share of messages that take up to a second."""


class SimNetwork:
    """Who answers at which host, and which hosts do not hear one another."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.rng = loop.rng
        self.weather = Weather()
        self.servers: dict[str, tuple[Process, Asgi]] = {}
        self.parted: set[frozenset[str]] = set()
        self.open: dict[Connection, None] = {}
        self.on_request: Callable[[str, str, str], None] = lambda src, dst, what: None

    def serve(self, host: str, process: Process, app: Asgi) -> None:
        self.servers[host] = (process, app)
        process.on_death.append(lambda: self._gone(process))

    def part(self, one: str, other: str) -> None:
        self.parted.add(frozenset((one, other)))

    def heal(self) -> None:
        self.parted.clear()

    def blocked(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.parted

    def node_of(self, host: str) -> str:
        """Where the process runs that serves a host."""
        known = self.servers.get(host)
        return host if known is None else known[0].host

    def delay_s(self, one: str, other: str) -> float:
        if one == other:
            return self.rng.random() * 0.0005
        if self.weather.slow and self.rng.random() < self.weather.slow:
            return self.rng.random()
        return self.rng.random() * self.weather.delay_s

    def _gone(self, process: Process) -> None:
        """Peers of a dead process hear a reset, unless they cannot hear it."""
        for connection in list(self.open):
            if connection.server is process:
                connection.break_off(self.delay_s("a", "b"))
            elif connection.client is process:
                connection.hang_up()


class Connection:
    """One request and its answer."""

    def __init__(self, net: SimNetwork, client: Process, host: str) -> None:
        self.net = net
        self.client = client
        self.host = host
        self.server: Process | None = None
        self.sent: deque[tuple[str, Any]] = deque()
        self.arrived: deque[tuple[str, Any]] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.last_at = 0.0
        self.over = False
        """Nothing more is brought to the client."""
        self.mute = False
        """The answer is lost on the way."""
        self.gone = False
        """The client has left."""
        self.left: asyncio.Future[None] | None = None
        net.open[self] = None

    # --- towards the client ----------------------------------------------------------------------

    def send(self, kind: str, what: Any) -> None:
        """By the server: in order, after a delay."""
        if self.over or self.mute:
            return
        assert self.server is not None
        weather = self.net.weather
        far = self.server.host != self.client.host
        if far and kind == "body" and weather.cut and self.net.rng.random() < weather.cut:
            self.break_off(0.0)
            return
        at = self.net.loop.now + self.net.delay_s(self.server.host, self.client.host)
        self.last_at = max(self.last_at, at)
        self.sent.append((kind, what))
        self.client.run_later(self.last_at - self.net.loop.now, self._bring)

    def _bring(self) -> None:
        """The next message, whichever was meant: a connection keeps its order."""
        if self.over:
            return
        if self.server is not None and self.net.blocked(self.server.host, self.client.host):
            self.client.run_later(RETRANSMIT_S, self._bring)
            return
        self.arrived.append(self.sent.popleft())
        self._wake()

    def reset(self, delay_s: float) -> None:
        """The client will see that the connection is gone."""
        self.sent.append(("reset", None))
        self.client.run_later(delay_s, self._bring)

    def break_off(self, delay_s: float) -> None:
        """The client sees a reset, after what is under way."""
        if self.over:
            return
        at = max(self.last_at, self.net.loop.now + delay_s)
        self.mute = True
        self.reset(at - self.net.loop.now)

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def next(self) -> tuple[str, Any]:
        while not self.arrived:
            self.waiter = self.net.loop.create_future()
            await self.waiter
        return self.arrived.popleft()

    # --- towards the server ----------------------------------------------------------------------

    def close(self) -> None:
        """By the client, when it has what it wants or wants no more."""
        self.over = True
        self.net.open.pop(self, None)
        self.hang_up()

    def hang_up(self) -> None:
        if self.server is not None and not self.gone:
            self.server.run_later(self.net.delay_s("a", "b"), self._tell_left)
        self.gone = True

    def _tell_left(self) -> None:
        if self.left is not None and not self.left.done():
            self.left.set_result(None)

    async def serve(self, app: Asgi, scope: dict[str, Any], body: bytes) -> None:
        """In the server's process."""
        given = False
        self.left = self.net.loop.create_future()

        async def receive() -> dict[str, Any]:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            assert self.left is not None
            await asyncio.wait([self.left])
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.send("start", (message["status"], message.get("headers", [])))
                return
            if message.get("body"):
                self.send("body", bytes(message["body"]))
            if not message.get("more_body", False):
                self.send("end", None)
                self._tell_left()

        try:
            await app(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - the server's own 500
            if not isinstance(error, ConnectionAbortedError):
                self.net.loop.errors.append(f"{scope['method']} {scope['path']}: {error!r}")
        if self.mute:
            self.net.open.pop(self, None)
        self.break_off(0.0)  # Does nothing where the answer has ended.


@dataclass(frozen=True, slots=True)
class Headers:
    """Found whatever the case of their names."""

    values: dict[str, str]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key.lower(), default)


class Content:
    """The body of an answer, as `aiohttp.StreamReader` gives it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._ended = False

    async def _more(self) -> bool:
        if self._ended:
            return False
        kind, what = await self._connection.next()
        if kind == "reset":
            raise aiohttp.ClientPayloadError("the connection was cut")
        if kind == "end":
            self._ended = True
            return False
        self._buffer += what
        return True

    async def readexactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not await self._more():
                raise asyncio.IncompleteReadError(bytes(self._buffer), size)
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def read(self) -> bytes:
        while await self._more():
            pass
        taken = bytes(self._buffer)
        self._buffer.clear()
        return taken

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        whole = await self.read()
        for at in range(0, len(whole), size):
            yield whole[at : at + size]


@dataclass(slots=True)
class Answer:
    status: int
    headers: Headers
    content: Content
    deadline: float | None

    @property
    def ok(self) -> bool:
        return self.status < 400

    async def read(self) -> bytes:
        async with asyncio.timeout_at(self.deadline):
            return await self.content.read()


@dataclass(slots=True)
class Exchange:
    """`async with` it, as one does with what `aiohttp.ClientSession.request` gives."""

    http: "SimHttp"
    method: str
    url: str
    data: bytes
    headers: Mapping[str, str]
    timeout_s: float | None
    _connection: Connection | None = None

    async def __aenter__(self) -> Answer:
        loop = self.http.net.loop
        deadline = None if self.timeout_s is None else loop.now + self.timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                return await self._begin(deadline)
        except BaseException:
            self._close()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _begin(self, deadline: float | None) -> Answer:
        connection = self._connection = self.http.send(
            self.method, self.url, self.data, self.headers
        )
        kind, what = await connection.next()
        if kind != "start":
            raise aiohttp.ServerDisconnectedError
        status, pairs = what
        headers = Headers({k.decode().lower(): v.decode() for k, v in pairs})
        return Answer(status, headers, Content(connection), deadline)


@dataclass(slots=True)
class SimHttp:
    """Stands in for an `aiohttp.ClientSession` of one process. `aliases`: host in a URL -> real host."""

    net: SimNetwork
    process: Process
    timeout_s: float | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    reliable: bool = False
    """A unix socket: nothing is lost on the way."""

    def request(
        self,
        method: str,
        url: Any,
        *,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
        **_: object,
    ) -> Exchange:
        limit = self.timeout_s if timeout is None else timeout.total
        body = data.read() if hasattr(data, "read") else data or b""
        return Exchange(self, method, str(url), bytes(body), headers or {}, limit)

    def post(self, url: Any, **more: Any) -> Exchange:
        return self.request("POST", url, **more)

    def get(self, url: Any, **more: Any) -> Exchange:
        return self.request("GET", url, **more)

    async def close(self) -> None:
        pass

    # --- the way there ---------------------------------------------------------------------------

    def send(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> Connection:
        parts = urlsplit(url)
        host = self.aliases.get(parts.netloc, parts.netloc)
        connection = Connection(self.net, self.process, host)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": unquote(parts.path),
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "scheme": "http",
            "server": (host, 80),
            "client": (self.process.host, 1),
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
        }
        self._dispatch(connection, scope, body)
        return connection

    def _dispatch(self, connection: Connection, scope: dict[str, Any], body: bytes) -> None:
        net, weather, rng = self.net, self.net.weather, self.net.rng
        host = connection.host
        delay_s = net.delay_s(self.process.host, net.node_of(host))
        arrive = self.process.loop.call_later
        if not self.reliable:
            if weather.lose_request and rng.random() < weather.lose_request:
                self._lost(connection)
                return
            if weather.lose_answer and rng.random() < weather.lose_answer:
                connection.mute = True
                arrive(delay_s, _arrive, net, connection, scope, body, context=NOBODY)
                self._lost(connection, after_s=0.02 + rng.random() * 0.2)
                return
            if weather.double and rng.random() < weather.double and not _is_stream(scope):
                twin = Connection(net, self.process, host)
                twin.mute = True
                again_s = delay_s + rng.random() * 0.3
                arrive(again_s, _arrive, net, twin, dict(scope), body, context=NOBODY)
        arrive(delay_s, _arrive, net, connection, scope, body, context=NOBODY)

    def _lost(self, connection: Connection, after_s: float = 0.0) -> None:
        """A reset soon, or nothing until the client's patience ends."""
        if self.net.rng.random() < 0.7:
            connection.reset(after_s + self.net.rng.random() * 0.2)
        else:
            connection.reset(SILENCE_S_MAX)


def _is_stream(scope: dict[str, Any]) -> bool:
    path: str = scope["path"]
    return path.endswith(("/streams", "/stream")) or "/stream/" in path


def _arrive(net: SimNetwork, connection: Connection, scope: dict[str, Any], body: bytes) -> None:
    host = connection.host
    if net.blocked(connection.client.host, net.node_of(host)):
        if connection.over:
            return
        net.loop.call_later(RETRANSMIT_S, _arrive, net, connection, scope, body, context=NOBODY)
        return
    if connection.gone and net.rng.random() < 0.5:
        return  # The client gave up while the request was under way: it may arrive or not.
    process, app = net.servers.get(host, (None, None))
    if process is None or process.dead or app is None:
        connection.server = process
        connection.mute = False
        connection.reset(net.delay_s("a", "b"))
        return
    net.loop.note("request", connection.client.name, process.name, scope["method"], scope["path"])
    connection.server = process
    if connection.gone:
        connection.gone = False
        connection.hang_up()
    process.spawn(connection.serve(app, scope, body), f"{scope['method']} {scope['path']}")
