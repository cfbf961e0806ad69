"""Control plane and S3 behind one port, as official clients reach them, with nothing else around.

The access key id names the tenant and signatures are not looked at: authentication is tested apart.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gristmill_contracts.errors import GristmillError
from gristmill_gateway.s3 import S3Caller, S3Wire
from gristmill_gateway.s3_request import S3Request
from gristmill_gateway.s3_store import LocalArtifactStore
from gristmill_gateway.sagemaker.control_operations import OPERATIONS
from gristmill_testing.control_plane import FakeCaller, FakeContext, running_control_plane

ACCOUNTS = {"acme": "100000000001", "rival": "100000000002"}
ERROR_NAMES = {
    "invalid_request": "ValidationException",
    "not_found": "ResourceNotFound",
    "conflict": "ResourceInUse",
    "forbidden": "AccessDeniedException",
}


def control_app(folder: Path, contexts: list[FakeContext]) -> Starlette:
    """Its context is put into `contexts` once it runs."""
    wire = S3Wire(LocalArtifactStore(folder / "artifacts"), b"key")

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with running_control_plane(folder) as context:
            contexts.append(context)
            yield

    async def answer(request: Request) -> Response:
        credential = request.headers["authorization"].partition("Credential=")[2].split("/")
        tenant, service = credential[0], credential[3]
        if service == "s3":
            return await _answer_s3(wire, tenant, request)
        return await _answer_control(contexts[0], tenant, request)

    methods = ["GET", "HEAD", "PUT", "POST", "DELETE"]
    route = Route("/{path:path}", answer, methods=methods)
    return Starlette(routes=[route], lifespan=lifespan)


async def _answer_control(context: FakeContext, tenant: str, request: Request) -> Response:
    caller = FakeCaller(
        tenant=tenant,
        account_id=ACCOUNTS[tenant],
        invocation_id=request.headers.get("amz-sdk-invocation-id", ""),
    )
    handler: Any = OPERATIONS[request.headers["x-amz-target"].partition(".")[2]]
    try:
        body = await handler(context, caller, json.loads(await request.body()))
    except GristmillError as error:
        name = ERROR_NAMES.get(error.code, "ServiceUnavailable")
        status = 400 if error.code in ERROR_NAMES else 503
        return JSONResponse({"__type": name, "Message": error.message}, status)
    return JSONResponse(body, media_type="application/x-amz-json-1.1")


async def _answer_s3(wire: S3Wire, tenant: str, request: Request) -> Response:
    response = await wire.answer(
        S3Caller(tenant=tenant, account_id=ACCOUNTS[tenant], region="us-west-2"),
        S3Request(
            method=request.method,
            path=request.scope["path"],
            query=dict(request.query_params),
            headers=dict(request.headers),
            body=await request.body(),
        ),
        "request-1",
    )
    if isinstance(response.body, bytes):
        return Response(response.body, response.status, response.headers)
    return StreamingResponse(response.body, response.status, response.headers)
