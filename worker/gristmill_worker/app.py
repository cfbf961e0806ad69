"""The worker's routes. Bodies are msgpack; errors are `Problem`s with a 4xx or 5xx status."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from prometheus_client import generate_latest

from gristmill_contracts import http as messages
from gristmill_contracts.errors import GristmillError, InvalidRequestError
from gristmill_contracts.http import CONTENT_TYPE, Execute, OpenSession, StreamChunk
from gristmill_contracts.operations import Sample
from gristmill_worker.engine import Engine
from gristmill_worker.problems import problem_of, status_of
from gristmill_worker.runner import Runner
from gristmill_worker.stream import TokenStream

T = TypeVar("T")

CHUNK_LENGTH: Final = struct.Struct("<I")
"""Before each chunk of a stream: its length in bytes."""


def make_app(engine: Engine) -> FastAPI:
    app = FastAPI(openapi_url=None)
    app.state.engine = engine
    app.state.one_snapshot = asyncio.Lock()
    app.add_exception_handler(GristmillError, _problem)
    app.get("/healthz")(_healthz)
    app.get("/readyz")(_readyz)
    app.get("/metrics")(_metrics)
    app.get("/v1/status")(_status)
    app.put("/v1/sessions/{uid}")(_open)
    app.post("/v1/sessions/{uid}/execute")(_execute)
    app.post("/v1/sessions/{uid}/stream")(_stream)
    app.post("/v1/sessions/{uid}/snapshot")(_snapshot)
    app.delete("/v1/sessions/{uid}")(_close)
    return app


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


def _answer(body: object, status: int = 200) -> Response:
    return Response(msgspec.msgpack.encode(body), status, media_type=CONTENT_TYPE)


async def _problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GristmillError)
    return _answer(problem_of(error), status_of(error))


async def _body(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(await request.body(), type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequestError(f"the body is not a {kind.__name__}: {error}") from error


async def _submit(request: Request, work: Callable[[Runner], T]) -> T:
    # Shielded: work that was accepted is done, whoever still waits for it.
    return await asyncio.shield(asyncio.wrap_future(_engine(request).submit(work)))


async def _healthz() -> Response:
    return PlainTextResponse("ok")


async def _readyz(request: Request) -> Response:
    engine = _engine(request)
    if engine.ready:
        return PlainTextResponse("ready")
    return PlainTextResponse(engine.failure or "loading the model", 503)


async def _metrics(request: Request) -> Response:
    return PlainTextResponse(generate_latest(_engine(request).metrics.registry))


async def _status(request: Request) -> Response:
    return _answer(_engine(request).status())


async def _open(uid: str, request: Request) -> Response:
    body = await _body(request, OpenSession)
    return _answer(await _submit(request, lambda runner: runner.open(uid, body)))


async def _execute(uid: str, request: Request) -> Response:
    body = await _body(request, Execute)
    if isinstance(body.operation, Sample) and not body.skip:
        done = _engine(request).sample(uid, body)
        executed = await asyncio.shield(asyncio.wrap_future(done))  # as in _submit
        return _answer(executed)
    return _answer(await _submit(request, lambda runner: runner.execute(uid, body)))


async def _snapshot(uid: str, request: Request) -> Response:
    """Answered once it is durable. The engine works on meanwhile; the next snapshot waits for its turn."""
    # Not even copied before: memory holds one copy of one session.
    async with request.app.state.one_snapshot:
        written = await _submit(request, lambda runner: runner.snapshot(uid))
        snapshotted = await asyncio.shield(asyncio.wrap_future(written))
        return _answer(snapshotted)


async def _close(uid: str, request: Request) -> Response:
    await _submit(request, lambda runner: runner.close(uid))
    return _answer(messages.Empty())


async def _stream(uid: str, request: Request) -> Response:
    body = await _body(request, Execute)
    relay = _Relay(asyncio.get_running_loop())
    done = _engine(request).sample(
        uid, body, lambda runner: TokenStream(runner.base, body.operation, relay.emit)
    )
    done.add_done_callback(lambda _: relay.close())
    first = await relay.chunks.get()
    if first is None:  # it ended without a chunk: the request itself was refused
        await asyncio.wrap_future(done)
        raise InvalidRequestError("the stream ended before it began")
    return StreamingResponse(_frames(relay, first), media_type=CONTENT_TYPE)


class _Relay:
    """From the engine's thread to the event loop; `emit` tells the engine when nobody reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.chunks: asyncio.Queue[StreamChunk | None] = asyncio.Queue()
        self.gone = False

    def emit(self, chunk: StreamChunk) -> bool:
        self._hand_over(chunk)
        return not self.gone

    def close(self) -> None:
        self._hand_over(None)

    def _hand_over(self, chunk: StreamChunk | None) -> None:
        try:
            self.loop.call_soon_threadsafe(self.chunks.put_nowait, chunk)
        except RuntimeError:  # the loop has ended: a stop does not wait for ever for its streams
            self.gone = True


async def _frames(relay: _Relay, first: StreamChunk) -> AsyncIterator[bytes]:
    chunk: StreamChunk | None = first
    try:
        while chunk is not None:
            encoded = msgspec.msgpack.encode(chunk)
            yield CHUNK_LENGTH.pack(len(encoded)) + encoded
            chunk = await relay.chunks.get()
    finally:
        relay.gone = True
