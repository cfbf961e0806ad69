"""The control plane over AWS JSON 1.1: `POST /` with `X-Amz-Target: SageMaker.<operation>`."""

import json
from typing import Final

import msgspec
from starlette.responses import Response

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError, InvalidRequestError
from gristmill_gateway import wire_errors
from gristmill_gateway.call import Call
from gristmill_gateway.caller import Caller
from gristmill_gateway.sagemaker.context import RuntimeContext
from gristmill_gateway.sagemaker.control_operations import OPERATIONS
from gristmill_gateway.sagemaker.documents import read_object
from gristmill_gateway.wire_errors import UnknownOperationError

CONTENT_TYPE: Final = "application/x-amz-json-1.1"
TARGET_PREFIX: Final = "SageMaker."


class JsonWire:
    """`call.Wire` over `control_operations.OPERATIONS`."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context

    def operation(self, call: Call) -> str:
        name = _target(call)
        return name if name in OPERATIONS else "UnknownControlOperation"

    def body_bytes_max(self, call: Call) -> int:
        return limits.CONTROL_BODY_BYTES_MAX

    async def answer(self, call: Call, caller: Caller, body: bytes) -> Response:
        name = _target(call)
        handler = OPERATIONS.get(name)
        if handler is None or call.request.method != "POST":
            raise UnknownOperationError(
                f"operation {name[:80]!r} is not supported; this endpoint answers "
                f"{', '.join(OPERATIONS)}, the training session runtime and S3"
            )
        document = read_object(body or b"{}")
        _refuse_broken_text(body, document)
        answer = await handler(self._context, caller, document)
        return Response(
            msgspec.json.encode(answer),
            headers={"x-amzn-requestid": call.request_id},
            media_type=CONTENT_TYPE,
        )

    def refuse(self, call: Call, error: GristmillError | None) -> Response:
        told = (
            wire_errors.internal_error("InternalFailure")
            if error is None
            else wire_errors.control_error(error)
        )
        headers = {"x-amzn-requestid": call.request_id}
        if told.retryable:
            headers["retry-after"] = str(wire_errors.RETRY_AFTER_S)
        content = json.dumps({"__type": told.name, "message": told.message})
        return Response(content, told.status, headers, CONTENT_TYPE)


def _target(call: Call) -> str:
    return (call.request.value("x-amz-target") or "").removeprefix(TARGET_PREFIX)


def _refuse_broken_text(body: bytes, document: object) -> None:
    """Text that is no Unicode (a lone surrogate) could be stored and never be answered again."""
    if b"\\u" not in body:
        return
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "a text in the body holds half of a surrogate pair; send valid Unicode"
        ) from error
