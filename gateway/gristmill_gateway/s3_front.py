"""The S3 wire behind the front door: makes its requests from HTTP, and HTTP from its responses."""

from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import parse_qsl, unquote

from starlette.responses import Response, StreamingResponse

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError
from gristmill_gateway import s3, wire_errors
from gristmill_gateway.access import Access, Verb
from gristmill_gateway.body import decode_aws_chunked
from gristmill_gateway.call import Call
from gristmill_gateway.caller import Caller
from gristmill_gateway.directory import Directory
from gristmill_gateway.s3_errors import s3_code_of
from gristmill_gateway.s3_request import S3Request
from gristmill_gateway.sigv4 import SignedRequest

STREAMED: Final = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"


class S3Front:
    """`call.Wire` over `s3.S3Wire`."""

    def __init__(self, wire: s3.S3Wire, directory: Directory, access: Access) -> None:
        self._wire = wire
        self._directory = directory
        self._access = access

    def operation(self, call: Call) -> str:
        method = call.request.method
        return f"S3 {method}" if method in ("GET", "HEAD", "PUT", "POST", "DELETE") else "S3 other"

    def body_bytes_max(self, call: Call) -> int:
        return limits.S3_BODY_BYTES_MAX

    async def answer(self, call: Call, caller: Caller, body: bytes) -> Response:
        await self._check_right(call, caller)
        if call.request.value("x-amz-content-sha256") == STREAMED:
            body = decode_aws_chunked(body)
        s3_caller = s3.S3Caller(
            tenant=caller.tenant, account_id=caller.account_id, region=caller.region
        )
        request = s3_request_of(call.request, body)
        return _http(await self._wire.answer(s3_caller, request, call.request_id), request.method)

    async def _check_right(self, call: Call, caller: Caller) -> None:
        """What sessions made is treated as they are. Raises AccessDeniedError."""
        namespace = await self._directory.namespace(caller.tenant, caller.as_of)
        verb: Verb = "list" if call.request.method in ("GET", "HEAD") else "update"
        await self._access.check(caller.service_account, verb, namespace, lasting=True)

    def refuse(self, call: Call, error: GristmillError | None) -> Response:
        if error is None:
            code, message = "InternalError", wire_errors.internal_error("InternalError").message
        else:
            code, message = wire_errors.s3_code(error) or s3_code_of(error), error.message
        request = s3_request_of(call.request, b"")
        response = s3.refuse(request, code, message, call.request_id)
        response.headers["x-amz-request-id"] = call.request_id
        return _http(response, request.method)


def s3_request_of(request: SignedRequest, body: bytes) -> S3Request:
    return S3Request(
        method=request.method,
        path=unquote(request.path, errors="replace"),
        query=dict(parse_qsl(request.query, keep_blank_values=True, errors="replace")),
        headers=dict(request.headers),
        body=body,
    )


def _http(response: s3.S3Response, method: str) -> Response:
    body = response.body
    if isinstance(body, bytes):
        http = Response(body, response.status)
        if method == "HEAD" and "Content-Length" in response.headers:
            # The length is the object's, though a HEAD has no body.
            del http.headers["content-length"]
        http.headers.update(response.headers)
        return http
    stream: AsyncIterator[bytes] = body
    return StreamingResponse(stream, response.status, response.headers)
