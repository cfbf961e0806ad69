"""The artifact store of a cluster: what the ledger keeps, over its HTTP routes, as buckets of objects.

Object `key` of bucket `bucket` is the artifact `<bucket>/<key>` of the tenant.
"""

import asyncio
import hashlib
import io
from collections.abc import Coroutine, Iterator
from typing import Any, BinaryIO, Final, TypeVar, cast
from urllib.parse import quote

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.cluster_http import ArtifactInfo, ArtifactPage
from gristmill_contracts.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from gristmill_contracts.http import SHA256_HEADER
from gristmill_gateway import locations
from gristmill_gateway.ledger_client import LedgerClient
from gristmill_gateway.s3_store import BucketInfo, ObjectInfo, is_object_name

T = TypeVar("T")

CALL_TIMEOUT_S: Final = 60.0
READ_BYTES: Final = 16 * limits.ARTIFACT_CHUNK_BYTES
"""How much of an object is asked for at a time."""


class LedgerArtifactStore:
    """`s3_store.ArtifactStore`. Made on the event loop of `ledger`; its calls come from threads of it."""

    def __init__(self, ledger: LedgerClient) -> None:
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()

    def buckets(self, tenant: str) -> list[BucketInfo]:
        """The ledger keeps no time of a bucket's making: it is told as 0."""
        return [BucketInfo(folder.rstrip("/"), 0) for folder in self._folders(tenant, "")]

    def has_bucket(self, tenant: str, bucket: str) -> bool:
        if not locations.BUCKET_PATTERN.fullmatch(bucket):
            return False
        return f"{bucket}/" in self._folders(tenant, bucket)

    def create_bucket(self, tenant: str, bucket: str) -> bool:
        if self.has_bucket(tenant, locations.check_bucket(bucket)):
            return False
        empty = {SHA256_HEADER: hashlib.sha256(b"").hexdigest()}
        path = _path(tenant, f"{bucket}/")
        self._run(self._ledger.exchange("PUT", path, data=b"", headers=empty))
        return True

    def objects(self, tenant: str, bucket: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        query = {"prefix": f"{bucket}/{prefix}", "after": f"{bucket}/{after}" if after else ""}
        while True:
            page = self._page(tenant, **query)
            for artifact in page.artifacts:
                key = artifact.path.removeprefix(f"{bucket}/")
                if key and not key.endswith("/"):
                    yield _info(key, artifact)
            if page.next_after is None:
                return
            query["after"] = page.next_after

    def open(self, tenant: str, bucket: str, key: str) -> tuple[ObjectInfo, BinaryIO]:
        path = f"{bucket}/{_checked(bucket, key)}"
        # The first of all that begin so is the thing itself, if it is there.
        found = self._page(tenant, prefix=path, limit="1").artifacts
        if not found or found[0].path != path:
            raise NotFoundError(f"there is no object {key!r} in bucket {bucket!r}")
        file = LedgerFile(self, tenant, found[0])
        return _info(key, found[0]), cast(BinaryIO, io.BufferedReader(file, READ_BYTES))

    def delete(self, tenant: str, bucket: str, key: str) -> None:
        try:
            path = _path(tenant, f"{bucket}/{_checked(bucket, key)}")
            self._run(self._ledger.exchange("DELETE", path))
        except (NotFoundError, InvalidRequestError, ConflictError):
            return  # What cannot be an object is no object any more.

    def read(self, tenant: str, path: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of an artifact."""
        span = {"Range": f"bytes={start}-{end - 1}"}
        content = self._run(self._ledger.exchange("GET", _path(tenant, path), headers=span))
        if len(content) != end - start:
            raise UnavailableError(
                f"the ledger sent {len(content)} bytes of {path}, not {end - start}; try again"
            )
        return content

    def _folders(self, tenant: str, prefix: str) -> list[str]:
        """Of no tenant are there more than one page: its buckets are bounded."""
        return self._page(tenant, prefix=prefix, delimiter="/").folders

    def _page(self, tenant: str, **query: str) -> ArtifactPage:
        said = {name: value for name, value in query.items() if value}
        answer = self._run(
            self._ledger.exchange("GET", f"/v1/artifacts/{quote(tenant, safe='')}", query=said)
        )
        return msgspec.msgpack.decode(answer, type=ArtifactPage)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run on the event loop, from a thread of it."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(CALL_TIMEOUT_S)
        except TimeoutError as error:
            future.cancel()
            raise UnavailableError("the ledger did not answer in time; try again") from error


class LedgerFile(io.RawIOBase):
    """An artifact as a file that is read where it lies."""

    def __init__(self, store: LedgerArtifactStore, tenant: str, artifact: ArtifactInfo) -> None:
        super().__init__()
        self._store = store
        self._tenant = tenant
        self._artifact = artifact
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._artifact.size_bytes}
        self._at = max(0, base[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:  # Any: a writable buffer has no type of its own in 3.11
        end = min(self._at + len(buffer), self._artifact.size_bytes)
        if end <= self._at:
            return 0
        content = self._store.read(self._tenant, self._artifact.path, self._at, end)
        buffer[: len(content)] = content
        self._at = end
        return len(content)


def _checked(bucket: str, key: str) -> str:
    """The key, if it may name an object. Raises NotFoundError."""
    try:
        locations.check_bucket(bucket)
        locations.check_key(key)
    except InvalidRequestError as error:
        raise NotFoundError(f"there is no object {key!r} in bucket {bucket!r}") from error
    if not all(map(is_object_name, key.split("/"))):
        raise NotFoundError(f"{key!r} in bucket {bucket!r} is no object yet")
    return key


def _path(tenant: str, path: str) -> str:
    return f"/v1/artifacts/{quote(tenant, safe='')}/{quote(path, safe='/')}"


def _info(key: str, artifact: ArtifactInfo) -> ObjectInfo:
    return ObjectInfo(key, artifact.size_bytes, artifact.modified_us, artifact.sha256)
