"""A proxy between our processes and a real API server that answers wrongly when it is told to.

It passes credentials on as they come, so that whoever speaks through it has its own rights. Requests are
named by a line as `PATCH /apis/gristmill.dev/v1alpha1/...?fieldManager=...`, that of a create with ` #name`
behind it. A fault lets the first `skip` requests whose line its pattern finds pass, and hits the next `times`.
"""

import asyncio
import json
import re
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from aiohttp import web

Kind = Literal[
    "refuse", "hang", "lose", "delay", "stale",
    "watch-drop", "watch-reorder", "watch-repeat", "watch-lag", "watch-gone", "watch-silence", "watch-cut",
]  # fmt: skip
HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "content-encoding", "host"}
FOREVER = 10**9
CONNECT_S = 10


@dataclass(slots=True)
class Fault:
    """refuse: answer `status` without asking the server. hang: do not answer for `seconds`, ask nobody.
    lose: the server does it, the answer is dropped. delay: everything `seconds` later. stale: reads are
    answered as they were when the fault first met them.

    watch-drop: `count` events never come. watch-reorder: two events change places. watch-repeat: each
    event comes twice. watch-lag: all comes `seconds` later. watch-gone: an ERROR event with 410 ends the stream. watch-silence: the stream stays
    open and says nothing. watch-cut: the connection breaks.
    """

    kind: Kind
    pattern: str
    times: int = 1
    skip: int = 0
    status: int = 500
    reason: str = "InternalError"
    message: str = "the fault-injecting proxy says no"
    retry_after_s: int | None = None
    seconds: float = 5.0
    count: int = 1
    hits: int = 0
    kept: dict[str, tuple[int, bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """One request. `status` 0 = no answer reached the client."""

    line: str
    came: float
    at: float
    """When it was over."""
    fault: str
    status: int
    agent: str

    @property
    def writes(self) -> bool:
        return not self.line.startswith(("GET ", "HEAD "))


@dataclass(slots=True, kw_only=True)
class ApiProxy:
    """`faults` may be changed from any thread while it runs."""

    target: str
    tls: ssl.SSLContext | bool
    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    client: aiohttp.ClientSession | None = None

    def inject(self, kind: Kind, pattern: str, **options: Any) -> Fault:  # Any: fields of Fault
        fault = Fault(kind, pattern, **options)
        with self.lock:
            self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """No more faults; streams that are held silent stay so until their client gives up."""
        with self.lock:
            self.faults.clear()

    def requests(self, pattern: str = "", *, since: float = 0.0) -> list[Seen]:
        with self.lock:
            return [
                each for each in self.seen if each.at >= since and re.search(pattern, each.line)
            ]

    def _take(self, line: str, *, watch: bool) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                fits = fault.kind.startswith("watch-") == watch or fault.kind in {"refuse", "delay"}
                if not fits or fault.hits >= fault.times or not re.search(fault.pattern, line):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.hits += 1
                return fault
        return None

    def _note(self, line: str, came: float, fault: Fault | None, status: int, agent: str) -> None:
        with self.lock:
            name = "" if fault is None else fault.kind
            self.seen.append(Seen(line, came, time.monotonic(), name, status, agent))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        came = time.monotonic()
        line = f"{request.method} {request.path_qs}"
        if request.method == "POST":
            line += f" #{_name_in(await request.read())}"
        watch = request.query.get("watch", "") in {"true", "1"}
        fault = self._take(line, watch=watch)
        agent = request.headers.get("User-Agent", "")
        status = 0
        try:
            answer = await self._answer(request, fault, watch=watch)
            status = answer.status
        finally:
            self._note(line, came, fault, status, agent)
        return answer

    async def _answer(
        self, request: web.Request, fault: Fault | None, *, watch: bool
    ) -> web.StreamResponse:
        kind = None if fault is None else fault.kind
        if fault is not None and kind == "refuse":
            return _refusal(fault)
        if fault is not None and kind in {"hang", "delay"}:
            await asyncio.sleep(fault.seconds)
            if kind == "hang":
                raise _drop(request)
        body = await request.read()
        if fault is not None and kind == "stale" and request.path_qs in fault.kept:
            status, old = fault.kept[request.path_qs]
            return web.Response(status=status, body=old, content_type="application/json")
        assert self.client is not None
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        async with self.client.request(
            request.method,
            self.target + request.path_qs,
            headers=headers,
            data=body or None,
            ssl=self.tls,
        ) as upstream:
            if watch and upstream.status == 200:
                return await _relay_watch(request, upstream, fault)
            content = await upstream.read()
            if kind == "lose":
                raise _drop(request)
            if fault is not None and kind == "stale":
                fault.kept[request.path_qs] = (upstream.status, content)
            kept = {k: v for k, v in upstream.headers.items() if k.lower() not in HOP_HEADERS}
            return web.Response(status=upstream.status, body=content, headers=kept)


def _name_in(body: bytes) -> str:
    """Of the object that is to be made."""
    try:
        return str(json.loads(body)["metadata"].get("name", ""))
    except (ValueError, KeyError, TypeError):
        return ""


def _drop(request: web.Request) -> Exception:
    """Break the client's connection, whatever it waits for."""
    if request.transport is not None:
        request.transport.abort()
    return ConnectionResetError("dropped on purpose")


def _refusal(fault: Fault) -> web.Response:
    body = {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": fault.message, "reason": fault.reason, "code": fault.status,
    }  # fmt: skip
    headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    return web.json_response(body, status=fault.status, headers=headers)


async def _relay_watch(
    request: web.Request, upstream: aiohttp.ClientResponse, fault: Fault | None
) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "application/json"})
    await answer.prepare(request)
    with suppress(ConnectionResetError):
        lines = _lines(upstream)
        if fault is not None and fault.kind == "watch-lag":
            lines = _late(lines, fault.seconds)
        async for line in _distorted(lines, fault):
            await answer.write(line)
        if fault is not None and fault.kind == "watch-cut":
            raise _drop(request)
        await answer.write_eof()
    return answer


async def _lines(upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    held = b""
    async for chunk in upstream.content.iter_any():
        held += chunk
        *whole, held = held.split(b"\n")
        for line in whole:
            yield line + b"\n"


async def _late(lines: AsyncIterator[bytes], seconds: float) -> AsyncIterator[bytes]:
    came: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def read() -> None:
        async for line in lines:
            came.put_nowait((time.monotonic(), line))
        came.put_nowait((time.monotonic(), b""))

    reading = asyncio.create_task(read())
    try:
        while True:
            at, line = await came.get()
            if not line:
                return
            await asyncio.sleep(max(0.0, at + seconds - time.monotonic()))
            yield line
    finally:
        reading.cancel()


async def _distorted(lines: AsyncIterator[bytes], fault: Fault | None) -> AsyncIterator[bytes]:
    """The events as the fault lets them through. Bookmarks are no events."""
    kind = None if fault is None else fault.kind
    left = 0 if fault is None else fault.count
    held: bytes | None = None
    if kind == "watch-gone":
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "code": 410,
            "reason": "Expired",
            "message": "too old",
        }
        yield json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
        return
    async for line in lines:
        event = b'"type":"BOOKMARK"' not in line[:40]
        if kind == "watch-silence":
            continue
        if kind == "watch-cut" and event:
            return
        if kind == "watch-drop" and event and left:
            left -= 1
            continue
        if kind == "watch-reorder" and event and left:
            if held is None:
                held = line
                continue
            yield line
            yield held
            held, left = None, left - 1
            continue
        yield line
        if kind == "watch-repeat" and event:
            yield line
    if held is not None:
        yield held


async def _end_the_rest() -> None:
    """Requests that still hang: what a closed loop leaves pending, the end of pytest takes for a fault."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=10)


async def _cut_the_rest(loop: asyncio.AbstractEventLoop) -> None:
    """Connections that wait for a peer which hangs: TLS ends only when both sides say so."""
    await loop.shutdown_asyncgens()
    for transport in list(loop._transports.values()):  # type: ignore[attr-defined]
        transport.abort()
    for _ in range(3):  # What is aborted is closed in a turn after this one.
        await asyncio.sleep(0)


@contextmanager
def api_proxy(target: str, tls: ssl.SSLContext | bool = True) -> Iterator[ApiProxy]:
    """Serve on a free loopback port until the end of the block. `target`: https://host:port."""
    proxy = ApiProxy(target=target.rstrip("/"), tls=tls)
    loop = asyncio.new_event_loop()
    ready: Future[None] = Future()
    done = asyncio.Event()

    async def serve() -> None:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), auto_decompress=True,
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
        ) as proxy.client:  # fmt: skip
            app = web.Application(client_max_size=64 * 2**20)
            app.router.add_route("*", "/{path:.*}", proxy.handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            proxy.url = f"http://{host}:{port}"
            ready.set_result(None)
            await done.wait()
            await runner.cleanup()
            await _end_the_rest()

    def main() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise
        finally:
            loop.run_until_complete(_cut_the_rest(loop))
            loop.close()

    thread = threading.Thread(target=main, name="api-proxy", daemon=True)
    thread.start()
    ready.result(30)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(30)
