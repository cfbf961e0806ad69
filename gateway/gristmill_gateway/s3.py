"""The S3 calls that the SageMaker SDK and people downloading a checkpoint make, over the artifact store.

Knows nothing of signatures: the caller is authenticated before. Every bucket named is the caller's
own tenant's; those of others do not exist here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import BinaryIO, Final
from urllib.parse import quote

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError, InvalidRequestError, NotFoundError
from gristmill_gateway import s3_request, s3_xml
from gristmill_gateway.s3_errors import STATUSES, S3RefusalError, error_body, s3_code_of
from gristmill_gateway.s3_listing import Page, make_page
from gristmill_gateway.s3_request import S3Request
from gristmill_gateway.s3_store import ArtifactStore, ObjectInfo
from gristmill_gateway.sagemaker import control_pages

logger = logging.getLogger(__name__)

HTTP_OK: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Caller:
    """Who asks: the tenant, its 12-digit account and the region the request was signed for."""

    tenant: str
    account_id: str
    region: str


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Response:
    """`body` is bytes, or a stream of `Content-Length` bytes that closes its file at its end."""

    status: int = HTTP_OK
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | AsyncIterator[bytes] = b""


class S3Wire:
    """Answers requests. token_key signs continuation tokens."""

    def __init__(self, store: ArtifactStore, token_key: bytes) -> None:
        self._store = store
        self._token_key = token_key

    async def answer(self, caller: S3Caller, request: S3Request, request_id: str) -> S3Response:
        """The answer, errors included: what we raise on purpose never leaves."""
        try:
            s3_request.check_limits(request.body)
            operation = s3_request.operation_of(request)
            s3_request.check_owner(request.headers, caller.account_id)
            if request.bucket and operation != "CreateBucket":
                await self._require_bucket(caller, request.bucket)
            response = await _HANDLERS[operation](self, caller, request)
        except GristmillError as error:
            response = refuse(request, s3_code_of(error), error.message, request_id)
        response.headers["x-amz-request-id"] = request_id
        return response

    async def _require_bucket(self, caller: S3Caller, bucket: str) -> None:
        if not await asyncio.to_thread(self._store.has_bucket, caller.tenant, bucket):
            raise S3RefusalError("NoSuchBucket", f"The specified bucket does not exist: {bucket!r}")

    async def _list_buckets(self, caller: S3Caller, request: S3Request) -> S3Response:
        most = s3_request.number(request.query, "max-buckets", limits.BUCKETS_MAX)
        prefix = request.query.get("prefix", "")
        question = (caller.tenant, "ListBuckets", prefix)
        after = self._place(request, question, 1)[0]
        buckets = await asyncio.to_thread(self._store.buckets, caller.tenant)
        found = [info for info in buckets if info.name.startswith(prefix) and info.name > after]
        shown = found[:most]
        content: list[tuple[str, object]] = [
            ("Owner", [("ID", caller.account_id)]),
            (
                "Buckets",
                [
                    ("Bucket", [("Name", i.name), ("CreationDate", s3_xml.timestamp(i.created_us))])
                    for i in shown
                ],
            ),
        ]
        if shown and len(found) > len(shown):
            token = control_pages.make_token(self._token_key, question, [shown[-1].name])
            content.append(("ContinuationToken", token))
        return _xml("ListAllMyBucketsResult", content)

    async def _head_bucket(self, caller: S3Caller, _request: S3Request) -> S3Response:
        return S3Response(headers={"x-amz-bucket-region": caller.region})

    async def _create_bucket(self, caller: S3Caller, request: S3Request) -> S3Response:
        """Making one's own bucket again succeeds: two SDK processes start with the same default."""
        if request.body:
            _check_bucket_configuration(request.body)
        owned = await asyncio.to_thread(self._store.buckets, caller.tenant)
        if len(owned) >= limits.BUCKETS_MAX and request.bucket not in {info.name for info in owned}:
            raise S3RefusalError(
                "TooManyBuckets", f"the account has {len(owned)} buckets, and may have no more"
            )
        try:
            await asyncio.to_thread(self._store.create_bucket, caller.tenant, request.bucket)
        except InvalidRequestError as error:
            raise S3RefusalError("InvalidBucketName", error.message) from error
        return S3Response(headers={"Location": f"/{request.bucket}"})

    async def _list_objects(self, caller: S3Caller, request: S3Request) -> S3Response:
        query = request.query
        encoding = query.get("encoding-type", "")
        if encoding not in ("", "url"):
            raise S3RefusalError(
                "InvalidArgument", f"encoding-type is {encoding[:40]!r}; it must be url"
            )
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        most = s3_request.number(query, "max-keys", limits.OBJECTS_PAGE_MAX)
        question = (caller.tenant, "ListObjectsV2", request.bucket, prefix, delimiter)
        after, done = query.get("start-after", ""), ""
        if "continuation-token" in query:
            after, done = self._place(request, question, 2)
        page = await asyncio.to_thread(
            lambda: make_page(
                self._store.objects(caller.tenant, request.bucket, prefix, after),
                prefix=prefix,
                delimiter=delimiter,
                most=most,
                done=done,
            )
        )
        content = _listing(request, page, most, quote if encoding else str)
        if page.resume is not None:
            folder = page.resume if page.resume in page.common_prefixes else ""
            token = control_pages.make_token(self._token_key, question, [page.resume, folder])
            content.append(("NextContinuationToken", token))
        return _xml("ListBucketResult", content)

    async def _delete_objects(self, caller: S3Caller, request: S3Request) -> S3Response:
        s3_request.check_digest(request.headers, request.body)
        keys, quiet = _read_delete(request.body)
        await asyncio.to_thread(self._delete_all, caller.tenant, request.bucket, keys)
        extra = {"tenant": caller.tenant, "bucket": request.bucket, "count": len(keys)}
        logger.info("objects_deleted", extra=extra)
        deleted: list[tuple[str, object]] = [("Deleted", [("Key", key)]) for key in keys]
        return _xml("DeleteResult", [] if quiet else deleted)

    def _delete_all(self, tenant: str, bucket: str, keys: list[str]) -> None:
        for key in keys:
            self._store.delete(tenant, bucket, key)

    async def _head_object(self, caller: S3Caller, request: S3Request) -> S3Response:
        info, content = await self._open(caller, request)
        content.close()
        return _object_response(request, info, None)

    async def _get_object(self, caller: S3Caller, request: S3Request) -> S3Response:
        info, content = await self._open(caller, request)
        try:
            return _object_response(request, info, content)
        except BaseException:
            content.close()
            raise

    async def _open(self, caller: S3Caller, request: S3Request) -> tuple[ObjectInfo, BinaryIO]:
        try:
            return await asyncio.to_thread(
                self._store.open, caller.tenant, request.bucket, request.key
            )
        except NotFoundError as error:
            raise S3RefusalError("NoSuchKey", error.message) from error

    def _place(self, request: S3Request, question: tuple[object, ...], parts: int) -> list[str]:
        token = request.query.get("continuation-token")
        if token is None:
            return [""] * parts
        return [
            str(part)
            for part in control_pages.read_token(self._token_key, question, token, (str,) * parts)
        ]


_Handler = Callable[[S3Wire, S3Caller, S3Request], Awaitable[S3Response]]
_HANDLERS: Final[dict[str, _Handler]] = {
    "ListBuckets": S3Wire._list_buckets,
    "HeadBucket": S3Wire._head_bucket,
    "CreateBucket": S3Wire._create_bucket,
    "ListObjectsV2": S3Wire._list_objects,
    "DeleteObjects": S3Wire._delete_objects,
    "HeadObject": S3Wire._head_object,
    "GetObject": S3Wire._get_object,
}


def refuse(request: S3Request, code: str, message: str, request_id: str) -> S3Response:
    """An error of this wire, also for what was refused before (a signature). HEAD has no body."""
    body = b"" if request.method == "HEAD" else error_body(code, message, request.path, request_id)
    return S3Response(
        status=STATUSES.get(code, 400), headers={"Content-Type": "application/xml"}, body=body
    )


def _xml(root: str, content: list[tuple[str, object]]) -> S3Response:
    return S3Response(
        headers={"Content-Type": "application/xml"}, body=s3_xml.render(root, content)
    )


def _listing(
    request: S3Request, page: Page, most: int, encode: Callable[[str], str]
) -> list[tuple[str, object]]:
    query = request.query
    content: list[tuple[str, object]] = [
        ("Name", request.bucket),
        ("Prefix", encode(query.get("prefix", ""))),
        ("MaxKeys", most),
        ("KeyCount", page.count),
        ("IsTruncated", page.resume is not None),
    ]
    content += [(name, encode(query[key])) for key, name in _ECHOED.items() if key in query]
    content += [(name, query[key]) for key, name in _REPEATED.items() if key in query]
    for info in page.objects:
        content.append(
            (
                "Contents",
                [
                    ("Key", encode(info.key)),
                    ("LastModified", s3_xml.timestamp(info.modified_us)),
                    ("ETag", f'"{info.etag}"'),
                    ("Size", info.size),
                    ("StorageClass", "STANDARD"),
                ],
            )
        )
    content += [("CommonPrefixes", [("Prefix", encode(folder))]) for folder in page.common_prefixes]
    return content


_ECHOED: Final = {"delimiter": "Delimiter", "start-after": "StartAfter"}
_REPEATED: Final = {"encoding-type": "EncodingType", "continuation-token": "ContinuationToken"}


def _check_bucket_configuration(body: bytes) -> None:
    """A CreateBucketConfiguration with a LocationConstraint or nothing: all regions are this place."""
    root = _parse(body, "CreateBucketConfiguration")
    for child in root.children:
        if child.name != "LocationConstraint" or not child.text.strip():
            raise S3RefusalError(
                "MalformedXML",
                f"{child.name[:40]!r} is not supported; give a LocationConstraint alone",
            )


def _read_delete(body: bytes) -> tuple[list[str], bool]:
    """The keys to delete and whether to be quiet. Raises S3RefusalError, MalformedXML."""
    root = _parse(body, "Delete")
    keys = [_key_of(child) for child in root.children if child.name == "Object"]
    quiet = root.find("Quiet")
    if not 1 <= len(keys) <= limits.OBJECTS_PAGE_MAX:
        raise S3RefusalError(
            "MalformedXML", f"{len(keys)} objects to delete; send 1 to {limits.OBJECTS_PAGE_MAX}"
        )
    unknown = {child.name for child in root.children} - {"Object", "Quiet"}
    if unknown:
        raise S3RefusalError("MalformedXML", f"{min(unknown)[:40]!r} is not a member of Delete")
    return keys, quiet is not None and quiet.text.strip() == "true"


def _key_of(element: s3_xml.Element) -> str:
    key = element.find("Key")
    version = element.find("VersionId")
    if key is None or not key.text:
        raise S3RefusalError("MalformedXML", "an Object has no Key; every one must name its key")
    if version is not None and version.text not in ("", "null"):
        raise S3RefusalError(
            "InvalidArgument",
            f"VersionId {version.text[:40]!r}: objects here have no versions; leave it out",
        )
    return key.text


def _parse(body: bytes, root_name: str) -> s3_xml.Element:
    try:
        root = s3_xml.parse(body)
    except InvalidRequestError as error:
        raise S3RefusalError("MalformedXML", error.message) from error
    if root.name != root_name:
        raise S3RefusalError("MalformedXML", f"the body is a {root.name[:40]!r}, not a {root_name}")
    return root


def _object_response(request: S3Request, info: ObjectInfo, content: BinaryIO | None) -> S3Response:
    """Head and Get alike; with `content`, its bytes as a stream."""
    etag = f'"{info.etag}"'
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
        "ETag": etag,
        "Last-Modified": formatdate(info.modified_us / 1e6, usegmt=True),
    }
    if request.headers.get("if-match", etag) not in (etag, info.etag, "*"):
        raise S3RefusalError(
            "PreconditionFailed", f"the object's ETag is {etag}, another than If-Match"
        )
    if request.headers.get("if-none-match") in (etag, info.etag, "*"):
        if content is not None:
            content.close()
        return S3Response(status=304, headers=headers)
    span = s3_request.byte_range(request.headers, info.size)
    start, end = span or (0, info.size)
    headers["Content-Length"] = str(end - start)
    if span is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{info.size}"
    body = b"" if content is None else _stream(content, start, end)
    return S3Response(status=206 if span else HTTP_OK, headers=headers, body=body)


async def _stream(content: BinaryIO, start: int, end: int) -> AsyncIterator[bytes]:
    """Bytes [start, end) of a file, read off the event loop. Shorter only if the file shrank."""
    with content:
        await asyncio.to_thread(content.seek, start)
        while start < end:
            chunk = await asyncio.to_thread(
                content.read, min(limits.ARTIFACT_CHUNK_BYTES, end - start)
            )
            if not chunk:
                return
            start += len(chunk)
            yield chunk
