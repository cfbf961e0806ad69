"""The meter's routes: nothing but reading requests and writing answers."""

import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError, InvalidRequestError
from gristmill_contracts.http import (
    ATTEMPT_HEADER,
    CONTENT_TYPE,
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    Refuse,
    StreamChunk,
    Submit,
)
from gristmill_contracts.ids import Stream
from gristmill_contracts.protocol import check_protocol
from gristmill_meter.driver import Driver
from gristmill_meter.intake import refuse_number, submit_operation
from gristmill_meter.meter import Meter
from gristmill_meter.problems import problem_response
from gristmill_meter.release import poll_operation

LENGTH: Final = struct.Struct("<I")
"""Before each StreamChunk: its size in bytes, 32 bits, little-endian."""

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
_encoder: Final = msgspec.msgpack.Encoder()
_submits: Final = msgspec.msgpack.Decoder(Submit)
_refusals: Final = msgspec.msgpack.Decoder(Refuse)


def make_app(meter: Meter, *, own_lifespan: bool = True) -> Starlette:
    """The application. With `own_lifespan` it starts and closes the meter."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await meter.start()
        try:
            yield
        finally:
            await meter.close()

    app = Starlette(lifespan=lifespan if own_lifespan else None)
    doors = Doors(meter)
    base = "/v1/sessions/{uid}"
    app.add_route(f"{base}/operations", guarded(doors.submit), methods=["POST"])
    app.add_route(f"{base}/refusals", guarded(doors.refuse), methods=["POST"])
    app.add_route(f"{base}/streams", guarded(doors.stream), methods=["POST"])
    app.add_route(f"{base}/operations/{{stream}}/{{number}}", guarded(doors.poll), methods=["GET"])
    app.add_route(base, guarded(doors.view), methods=["GET"])
    app.add_route("/healthz", doors.healthz, methods=["GET"])
    app.add_route("/readyz", doors.readyz, methods=["GET"])
    app.add_route("/metrics", doors.metrics, methods=["GET"])
    return app


def guarded(handler: Handler) -> Handler:
    """Answer our own errors as problems, and tell our protocol. Other errors are bugs: a plain 500."""

    async def answer(request: Request) -> Response:
        try:
            check_protocol(request.headers.get(PROTOCOL_HEADER))
            response = await handler(request)
        except GristmillError as error:
            response = problem_response(error)
        response.headers[PROTOCOL_HEADER] = str(PROTOCOL_VERSION)
        return response

    return answer


class Doors:
    """One method for each route."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    async def submit(self, request: Request) -> Response:
        driver = self._admit(request)
        submit, encoded = await _read_submit(request)
        return _answer(await submit_operation(driver.session, submit, encoded))

    async def refuse(self, request: Request) -> Response:
        driver = self._admit(request)
        body = await _read_body(request)
        return _answer(await refuse_number(driver.session, _decode(_refusals, body)))

    async def stream(self, request: Request) -> Response:
        driver = self._admit(request)
        submit, encoded = await _read_submit(request)
        chunks = await driver.stream(submit, encoded)
        return StreamingResponse(_framed(chunks), media_type=CONTENT_TYPE)

    async def poll(self, request: Request) -> Response:
        driver = self._admit(request)
        stream = request.path_params["stream"]
        number = request.path_params["number"]
        if stream not in ("train", "log") or not number.isdecimal():
            raise InvalidRequestError(f"{stream}/{number} names no operation; use train/7 or log/7")
        key: tuple[Stream, int] = (stream, int(number))
        view = await poll_operation(driver.session, key, _wait_s(request), request.is_disconnected)
        return _answer(view)

    async def view(self, request: Request) -> Response:
        return _answer(self._admit(request).session.view())

    async def healthz(self, request: Request) -> Response:
        status = 503 if self.meter.volume_failed else 200
        return JSONResponse({"status": "ok" if status == 200 else "volume_failed"}, status)

    async def readyz(self, request: Request) -> Response:
        """Ready as the settings ask; neighbours that do not answer are named all the same."""
        ready = self.meter.ready
        body = {"ready": ready, "missing": self.meter.missing()}
        return JSONResponse(body, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self.meter.metrics.render(), media_type="text/plain; version=0.0.4")

    def _admit(self, request: Request) -> Driver:
        return self.meter.admit(
            request.path_params["uid"],
            request.headers.get("Authorization", ""),
            request.headers.get(ATTEMPT_HEADER, ""),
        )


async def _framed(chunks: AsyncGenerator[StreamChunk, None]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            content = _encoder.encode(chunk)
            yield LENGTH.pack(len(content)) + content
    finally:
        await chunks.aclose()


async def _read_submit(request: Request) -> tuple[Submit, bytes]:
    submit = _decode(_submits, await _read_body(request))
    return submit, _encoder.encode(submit.operation)


async def _read_body(request: Request) -> bytes:
    """The whole body. Internal encoding is denser than the public one, so its bound is enough."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limits.REQUEST_BODY_BYTES_MAX:
            raise InvalidRequestError(
                f"the body has more than {limits.REQUEST_BODY_BYTES_MAX} bytes; send smaller batches"
            )
        parts.append(part)
    return b"".join(parts)


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"the body is not what this route takes: {error}") from error


def _wait_s(request: Request) -> float:
    text = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(text)
    except ValueError as error:
        raise InvalidRequestError(f"wait_s {text!r} is no number of seconds") from error
    if not 0 <= wait_s < float("inf"):
        raise InvalidRequestError(f"wait_s {text!r} must be 0 or more")
    return min(wait_s, limits.RESULT_WAIT_S_MAX)


def _answer(body: object) -> Response:
    return Response(_encoder.encode(body), media_type=CONTENT_TYPE)
