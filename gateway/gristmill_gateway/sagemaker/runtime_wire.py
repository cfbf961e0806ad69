"""The runtime plane over REST-JSON: routes, answers and errors."""

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from starlette.responses import Response

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError
from gristmill_gateway import wire_errors
from gristmill_gateway.call import Call
from gristmill_gateway.caller import Caller
from gristmill_gateway.sagemaker import chat, runtime
from gristmill_gateway.sagemaker.context import RuntimeContext
from gristmill_gateway.wire_errors import UnknownOperationError

CONTENT_TYPE: Final = "application/json"
_NAME: Final = r"(?P<name>[^/]+)"
_ID: Final = r"(?P<operation_id>[^/]+)"
_SESSIONS: Final = "/v1/training-sessions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A routed request: the session's name and, of a Get, the operation's id."""

    context: RuntimeContext
    call: Call
    caller: Caller
    name: str
    operation_id: str
    body: bytes


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    operation: str
    method: str
    path: re.Pattern[str]
    handler: Handler
    body_bytes_max: int


def _json(call: Call, answer: bytes) -> Response:
    return Response(answer, 200, {"x-amzn-requestid": call.request_id}, CONTENT_TYPE)


async def _execute_training(r: Request) -> Response:
    return _json(
        r.call, await runtime.execute_training_operation(r.context, r.caller, r.name, r.body)
    )


async def _execute_sampling(r: Request) -> Response:
    return _json(
        r.call, await runtime.execute_sampling_operation(r.context, r.caller, r.name, r.body)
    )


async def _get_training(r: Request) -> Response:
    get = runtime.get_training_operation_result
    return _json(r.call, await get(r.context, r.caller, r.name, r.operation_id, r.call))


async def _get_sampling(r: Request) -> Response:
    get = runtime.get_sampling_operation_result
    return _json(r.call, await get(r.context, r.caller, r.name, r.operation_id, r.call))


async def _sample(r: Request) -> Response:
    return await chat.sample_training_session(r.context, r.caller, r.name, r.body, r.call)


async def _sample_streamed(r: Request) -> Response:
    stream = chat.sample_training_session_with_response_stream
    return await stream(r.context, r.caller, r.name, r.body, r.call)


def _route(operation: str, method: str, path: str, handler: Handler, body_bytes_max: int) -> Route:
    return Route(
        operation=operation,
        method=method,
        path=re.compile(path),
        handler=handler,
        body_bytes_max=body_bytes_max,
    )


ROUTES: Final = (
    _route("ExecuteTrainingOperation", "POST", f"{_SESSIONS}/{_NAME}/operations",
           _execute_training, limits.REQUEST_BODY_BYTES_MAX),
    _route("GetTrainingOperationResult", "GET", f"{_SESSIONS}/{_NAME}/operations/{_ID}",
           _get_training, limits.CONTROL_BODY_BYTES_MAX),
    _route("ExecuteSamplingOperation", "POST", f"{_SESSIONS}/{_NAME}/sampling-operations",
           _execute_sampling, limits.REQUEST_BODY_BYTES_MAX),
    _route("GetSamplingOperationResult", "GET", f"{_SESSIONS}/{_NAME}/sampling-operations/{_ID}",
           _get_sampling, limits.CONTROL_BODY_BYTES_MAX),
    _route("SampleTrainingSession", "POST", f"/training-sessions/{_NAME}/sample",
           _sample, limits.CHAT_BODY_BYTES_MAX),
    _route("SampleTrainingSessionWithResponseStream", "POST",
           f"/training-sessions/{_NAME}/sample-with-response-stream",
           _sample_streamed, limits.CHAT_BODY_BYTES_MAX),
)  # fmt: skip


class RuntimeWire:
    """`call.Wire` over the table of routes."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context

    def operation(self, call: Call) -> str:
        found = _find(call)
        return found[0].operation if found else "UnknownRuntimeOperation"

    def body_bytes_max(self, call: Call) -> int:
        found = _find(call)
        return found[0].body_bytes_max if found else limits.CONTROL_BODY_BYTES_MAX

    async def answer(self, call: Call, caller: Caller, body: bytes) -> Response:
        found = _find(call)
        if found is None:
            raise UnknownOperationError(
                f"{call.request.method} {call.request.path[:200]} is not supported; this endpoint answers "
                f"{', '.join(route.operation for route in ROUTES)}"
            )
        route, parts = found
        request = Request(
            context=self._context,
            call=call,
            caller=caller,
            name=unquote(parts["name"], errors="replace"),
            operation_id=unquote(parts.get("operation_id", ""), errors="replace"),
            body=body,
        )
        return await route.handler(request)

    def refuse(self, call: Call, error: GristmillError | None) -> Response:
        told = (
            wire_errors.internal_error("InternalServerException")
            if error is None
            else wire_errors.runtime_error(error)
        )
        headers = {"x-amzn-requestid": call.request_id, "x-amzn-errortype": told.name}
        if told.retryable:
            headers["retry-after"] = str(wire_errors.RETRY_AFTER_S)
        return Response(json.dumps({"message": told.message}), told.status, headers, CONTENT_TYPE)


def _find(call: Call) -> tuple[Route, dict[str, str]] | None:
    for route in ROUTES:
        match = route.path.fullmatch(call.request.path)
        if match and route.method == call.request.method:
            return route, match.groupdict()
    return None
