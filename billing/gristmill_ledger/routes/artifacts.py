"""Files of checkpoints over HTTP: streamed in and out, by the tenant's own meters and our services."""

import asyncio
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from gristmill_contracts import limits
from gristmill_contracts.cluster_http import ArtifactInfo
from gristmill_contracts.errors import (
    ConflictError,
    FencedError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from gristmill_contracts.http import SHA256_HEADER, Empty
from gristmill_ledger import checks
from gristmill_ledger.artifact_port import ArtifactFile, ArtifactStore
from gristmill_ledger.artifacts import check_key
from gristmill_ledger.auth import Caller, caller_of
from gristmill_ledger.checkpoints import holds_path
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.producers import owning_attempt
from gristmill_ledger.routes.registries import read_parameters
from gristmill_ledger.usage_query import page_limit
from gristmill_ledger.wire import answer

router = APIRouter()

SHA256: Final = re.compile("[0-9a-f]{64}")
RANGE: Final = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
BYTES_TYPE: Final = "application/octet-stream"


@router.put("/v1/artifacts/{tenant}/{path:path}")
async def put(request: Request, tenant: str, path: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    store = await _store(request, tenant)
    if path.endswith("/"):
        await asyncio.to_thread(store.make_folder, tenant, path)
        return answer(Empty())
    check_key(path)
    sha256 = request.headers.get(SHA256_HEADER, "")
    if not SHA256.fullmatch(sha256):
        raise InvalidRequestError(
            f"{SHA256_HEADER} is {sha256[:80]!r}; send the SHA-256 of the bytes, 64 lower-case digits"
        )
    await _check_writer(ledger, store, caller_of(request), tenant, path, sha256)
    if ledger.uploads >= limits.ARTIFACT_UPLOADS_MAX:
        raise OverloadedError(f"{ledger.uploads} uploads run, the most there may be; try again")
    ledger.uploads += 1
    try:
        await _receive(request, store, tenant, path, sha256)
    finally:
        ledger.uploads -= 1
    return answer(Empty())


async def _receive(
    request: Request, store: ArtifactStore, tenant: str, path: str, sha256: str
) -> None:
    upload = await asyncio.to_thread(store.begin, tenant, path, sha256)
    try:
        waiting = bytearray()
        async for part in request.stream():
            waiting += part
            if len(waiting) >= limits.ARTIFACT_CHUNK_BYTES:
                await asyncio.to_thread(upload.write, bytes(waiting))
                waiting.clear()
        await asyncio.to_thread(upload.write, bytes(waiting))
        await asyncio.to_thread(upload.finish)
    except ClientDisconnect as error:
        raise UnavailableError(f"the upload of {path!r} broke off; send it again") from error
    finally:
        await asyncio.shield(asyncio.to_thread(upload.abandon))


@router.get("/v1/artifacts/{tenant}")
async def list_artifacts(request: Request, tenant: str) -> Response:
    store = await _store(request, tenant)
    given = read_parameters(
        request, ("prefix", "after", "limit", "delimiter"), empty=("prefix", "after", "delimiter")
    )
    limit = page_limit(given.get("limit"), default=1000, most=limits.OBJECTS_PAGE_MAX)
    delimiter = given.get("delimiter", "")
    if delimiter not in ("", "/"):
        raise InvalidRequestError(f"delimiter is {delimiter!r}; it must be / or left out")
    page = await asyncio.to_thread(
        store.list,
        tenant,
        prefix=given.get("prefix", ""),
        after=given.get("after", ""),
        limit=limit,
        delimiter=bool(delimiter),
    )
    return answer(page)


@router.api_route("/v1/artifacts/{tenant}/{path:path}", methods=["GET", "HEAD"])
async def get(request: Request, tenant: str, path: str) -> Response:
    store = await _store(request, tenant)
    info, file = await asyncio.to_thread(store.read, tenant, path)
    headers = {
        SHA256_HEADER: info.sha256,
        "ETag": f'"{info.sha256}"',
        "Accept-Ranges": "bytes",
        "Content-Length": str(info.size_bytes),
    }
    if request.method == "HEAD":
        file.close()
        return Response(headers=headers, media_type=BYTES_TYPE)
    asked = _range(request.headers.get("range"), info)
    if asked is None:
        content = _content(file, 0, info.size_bytes)
        return StreamingResponse(content, headers=headers, media_type=BYTES_TYPE)
    first, last = asked
    if first > last:
        file.close()
        headers = {"Content-Range": f"bytes */{info.size_bytes}"}
        return Response(status_code=HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers=headers)
    headers["Content-Length"] = str(last - first + 1)
    headers["Content-Range"] = f"bytes {first}-{last}/{info.size_bytes}"
    return StreamingResponse(
        _content(file, first, last - first + 1),
        status_code=HTTPStatus.PARTIAL_CONTENT,
        headers=headers,
        media_type=BYTES_TYPE,
    )


@router.delete("/v1/artifacts/{tenant}/{path:path}")
async def delete(request: Request, tenant: str, path: str) -> Response:
    store = await _store(request, tenant)
    if caller_of(request).session:
        raise ForbiddenError("a meter deletes no artifacts; its tenant does")
    await asyncio.to_thread(store.delete, tenant, path)
    return answer(Empty())


async def _store(request: Request, tenant: str) -> ArtifactStore:
    """The store, for a caller that may use the tenant's part of it."""
    ledger: Ledger = request.app.state.ledger
    checks.tenant_name(tenant)
    caller = caller_of(request)
    if caller.session:
        own = await ledger.tenant_of(caller.session)
        if own != tenant:
            raise ForbiddenError(
                f"session {caller.session} is of tenant {own or 'nobody'}, not {tenant}; register the "
                "session first, or use its own tenant"
            )
    if ledger.artifacts is None:
        raise NotFoundError(
            "this ledger keeps no artifacts; set GRISTMILL_LEDGER_ARTIFACTS_DIR or GRISTMILL_LEDGER_ARTIFACTS_URL"
        )
    return ledger.artifacts


async def _check_writer(  # noqa: PLR0917
    ledger: Ledger, store: ArtifactStore, caller: Caller, tenant: str, path: str, sha256: str
) -> None:
    """A fenced meter writes nothing, and nobody changes a registered checkpoint."""

    def look(connection: Connection) -> tuple[int | None, bool]:
        owner = owning_attempt(connection, caller.session) if caller.session else None
        return owner, holds_path(connection, f"{tenant}/{path}")

    owner, registered = await ledger.database.read(look)
    if owner is not None and caller.attempt is not None and caller.attempt < owner:
        raise FencedError(
            f"attempt {caller.attempt} of session {caller.session} writes an artifact, but attempt "
            f"{owner} owns the session; stop"
        )
    if registered:
        known = await asyncio.to_thread(store.sha256_of, tenant, path)
        if known is not None and known != sha256:
            raise ConflictError(
                f"artifact {path!r} belongs to a registered checkpoint and has SHA-256 {known}, not "
                f"{sha256}; a checkpoint never changes: save another one"
            )


def _range(text: str | None, info: ArtifactInfo) -> tuple[int, int] | None:
    """First and last byte; None = all. first > last where there are none."""
    match = RANGE.fullmatch(text.strip()) if text is not None else None
    if match is None or match.group(1) == match.group(2) == "":
        return None
    first, last = match.groups()
    if not first:
        return max(0, info.size_bytes - int(last)), info.size_bytes - 1 if int(last) else -1
    end = min(int(last), info.size_bytes - 1) if last else info.size_bytes - 1
    return (int(first), end) if int(first) < info.size_bytes else (1, 0)


async def _content(file: ArtifactFile, first: int, size: int) -> AsyncIterator[bytes]:
    try:
        await asyncio.to_thread(file.seek, first)
        while size > 0:
            part = await asyncio.to_thread(file.read, min(size, limits.ARTIFACT_CHUNK_BYTES))
            if not part:
                return
            size -= len(part)
            yield part
    finally:
        file.close()
