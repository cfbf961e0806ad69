"""msgpack over HTTP: bounded bodies in, answers and problems out."""

import json
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gristmill_contracts import limits
from gristmill_contracts.body_crc import CRC_HEADER, crc_of
from gristmill_contracts.errors import GristmillError, InvalidRequestError
from gristmill_contracts.http import CONTENT_TYPE
from gristmill_ledger.problems import TooLargeError, TornError, problem_of, status_of

Message = TypeVar("Message")
JSON_TYPE: Final = "application/json"
JSON_PATHS: Final = frozenset(
    {
        "/v1/usage",
        "/v1/explain",
        "/v1/estimate",
        "/v1/rerate",
        "/v1/reconcile",
        "/v1/reconcile/decisions",
        "/v1/corrections",
        "/v1/cloudevents",
    }
)
"""Routes whose answers and problems are JSON."""


async def read_message(
    request: Request, kind: type[Message], *, bytes_max: int = limits.CONTROL_BODY_BYTES_MAX
) -> Message:
    """Decode the body. Raises TooLargeError, TornError or InvalidRequestError."""
    body = await read_body(request, bytes_max=bytes_max)
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise InvalidRequestError(
            f"the body is no {name} in msgpack: {error}; see gristmill_contracts.http"
        ) from error


async def read_body(request: Request, *, bytes_max: int) -> bytearray:
    """The whole body. Raises TooLargeError, or TornError where it is not what its sender summed up."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise TooLargeError(f"the body is over {bytes_max} bytes; send less at once")
    told = request.headers.get(CRC_HEADER)
    if told is not None and told.lower() != (found := crc_of(body)):
        raise TornError(
            f"{CRC_HEADER} is {told[:20]!r}, but the body that came has {found!r}; send it again"
        )
    return body


def answer(message: object) -> Response:
    """A 200 with a msgpack body."""
    return Response(msgspec.msgpack.encode(message), media_type=CONTENT_TYPE)


def answer_json(message: dict[str, Any]) -> Response:  # Any: a JSON object
    """A 200 with a JSON body. The standard encoder, for sums may pass 64 bits."""
    return Response(json.dumps(message), media_type=JSON_TYPE)


def problem(error: GristmillError, *, as_json: bool = False) -> Response:
    """The error's status and a `Problem` in the format of the route."""
    message = problem_of(error)
    headers = {"Retry-After": "1"} if error.retryable else {}
    if as_json:
        body, media_type = msgspec.json.encode(message), JSON_TYPE
    else:
        body, media_type = msgspec.msgpack.encode(message), CONTENT_TYPE
    return Response(body, status_of(error), headers, media_type)
