"""The artifact store in a bucket of an S3-compatible service, by boto3.

An object's key is `<prefix><tenant>/<path>`; its SHA-256 is kept as metadata. A folder that holds
nothing is an empty object whose key ends with a slash. Files arrive in parts: an upload that breaks off
is aborted, and the service's lifecycle rule for incomplete uploads removes what a dead process left.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from gristmill_contracts import limits
from gristmill_contracts.cluster_http import ArtifactInfo, ArtifactPage
from gristmill_contracts.errors import ConflictError, GristmillError, UnavailableError
from gristmill_ledger import checks
from gristmill_ledger.artifacts import check_key, check_sha256, missing
from gristmill_ledger.problems import TooLargeError

S3 = Any  # boto3 makes its clients at run time
SHA256_METADATA: Final = "gristmill-sha256"
MISSING: Final = frozenset({"404", "NoSuchKey", "NotFound"})
HEADS_AT_ONCE: Final = 16
"""A list does not tell metadata: the checksums of a page are asked for with so many calls at once."""
LAST: Final = "\U0010ffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """endpoint "" = Amazon's own; access_key "" = what the SDK finds: roles, files, variables."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = "us-east-1"
    access_key: str = ""
    secret_key: str = ""


def s3_client(at: S3Location) -> S3:
    """A client that threads may share. Connects to nothing yet."""
    return boto3.client(
        "s3",
        endpoint_url=at.endpoint or None,
        region_name=at.region,
        aws_access_key_id=at.access_key or None,
        aws_secret_access_key=at.secret_key or None,
        config=Config(
            connect_timeout=5,
            read_timeout=60,
            max_pool_connections=64,
            retries={"mode": "standard", "max_attempts": 4},
            s3={"addressing_style": "path" if at.endpoint else "auto"},
            # Other services do not know the checksums that newer SDKs add on their own.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class S3ArtifactStore:
    """Implements `artifact_port.ArtifactStore`. `prefix` is empty or ends with a slash."""

    client: S3
    bucket: str
    prefix: str = ""

    def open(self) -> None:
        """See that the bucket is there and ours. Raises UnavailableError."""
        with _translated(f"bucket {self.bucket!r}"):
            self.client.head_bucket(Bucket=self.bucket)

    # --- writing ---------------------------------------------------------------------------------

    def begin(self, tenant: str, key: str, sha256: str) -> "S3Upload":
        where = self._key(tenant, key)
        if self._holds(where + "/"):
            raise ConflictError(f"artifact {key!r} is a folder; choose another name")
        self._check_above(tenant, key)
        return S3Upload(store=self, key=key, where=where, sha256=sha256)

    def sha256_of(self, tenant: str, key: str) -> str | None:
        info = self._info(self._key(tenant, key), key)
        return None if info is None else info.sha256

    def make_folder(self, tenant: str, key: str) -> None:
        name = key.removesuffix("/")
        where = self._key(tenant, name)
        self._check_above(tenant, name + "/")
        with _translated(key):
            self.client.put_object(Bucket=self.bucket, Key=where + "/", Body=b"")

    def delete(self, tenant: str, key: str) -> None:
        where = self._key(tenant, key.removesuffix("/"))
        if key.endswith("/"):
            where += "/"
            if self._holds(where, beside=where):
                raise ConflictError(f"folder {key!r} is not empty; delete what it holds first")
        with _translated(key):
            self.client.delete_object(Bucket=self.bucket, Key=where)

    def _check_above(self, tenant: str, key: str) -> None:
        """Raise ConflictError where a part of the path above is a file."""
        parts = key.split("/")[:-1]
        for end in range(1, len(parts) + 1):
            above = "/".join(parts[:end])
            if self._head(self._key(tenant, above)) is not None:
                raise ConflictError(
                    f"artifact {parts[end - 1]!r} is a file; nothing can lie below it"
                )

    def _holds(self, prefix: str, beside: str = "") -> bool:
        """Whether there is an object below `prefix`, besides one of that very key."""
        with _translated(prefix):
            found = self.client.list_objects_v2(
                Bucket=self.bucket, Prefix=prefix, StartAfter=beside, MaxKeys=1
            )
        return bool(found.get("Contents"))

    # --- reading ---------------------------------------------------------------------------------

    def read(self, tenant: str, key: str) -> tuple[ArtifactInfo, "S3File"]:
        where = self._key(tenant, key)
        info = self._info(where, key)
        if info is None:
            raise missing(tenant, key)
        return info, S3File(client=self.client, bucket=self.bucket, where=where, key=key)

    def list(
        self, tenant: str, *, prefix: str, after: str, limit: int, delimiter: bool
    ) -> ArtifactPage:
        base = f"{self.prefix}{checks.tenant_name(tenant)}/"
        found: list[str] = []
        for name in self._walk(base, prefix, after, delimiter=delimiter):
            found.append(name)
            if len(found) > limit:
                break
        shown = found[:limit]
        with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
            files = [name for name in shown if not name.endswith("/")]
            infos = pool.map(lambda name: self._info(base + name, name), files)
            artifacts = [info for info in infos if info is not None]  # Else deleted meanwhile.
        return ArtifactPage(
            artifacts=artifacts,
            next_after=shown[-1] if len(found) > limit else None,
            folders=[name for name in shown if name.endswith("/")],
        )

    def _walk(self, base: str, prefix: str, after: str, *, delimiter: bool) -> Iterator[str]:
        """Paths behind `after`, in order; those of folders, which end with a slash, with a delimiter."""
        start = base + after + (LAST if after.endswith("/") else "") if after else ""
        asked: dict[str, str] = {"StartAfter": start} if start else {}
        asked |= {"Delimiter": "/"} if delimiter else {}
        while True:
            with _translated(prefix):
                page = self.client.list_objects_v2(
                    Bucket=self.bucket, Prefix=base + prefix, **asked
                )
            keys = [each["Key"] for each in page.get("Contents", ()) if each["Key"][-1] != "/"]
            keys += [each["Prefix"] for each in page.get("CommonPrefixes", ())]
            names = sorted((key.removeprefix(base) for key in keys), key=str.encode)
            yield from (name for name in names if name.encode() > after.encode())
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def _info(self, where: str, key: str) -> ArtifactInfo | None:
        head = self._head(where)
        if head is None:
            return None
        sha256 = head["Metadata"].get(SHA256_METADATA)
        return ArtifactInfo(
            path=key,
            size_bytes=head["ContentLength"],
            sha256=sha256 or self._sum_of(where, key),
            modified_us=int(head["LastModified"].timestamp() * 1e6),
        )

    def _head(self, where: str) -> dict[str, Any] | None:  # Any: an answer of the service
        try:
            with _translated(where):
                head: dict[str, Any] = self.client.head_object(Bucket=self.bucket, Key=where)
                return head
        except _MissingObjectError:
            return None

    def _sum_of(self, where: str, key: str) -> str:
        """Of an object that somebody else put there."""
        total = hashlib.sha256()
        file = S3File(client=self.client, bucket=self.bucket, where=where, key=key)
        while part := file.read(limits.ARTIFACT_CHUNK_BYTES):
            total.update(part)
        file.close()
        return total.hexdigest()

    def _key(self, tenant: str, key: str) -> str:
        return f"{self.prefix}{checks.tenant_name(tenant)}/{check_key(key)}"


@dataclass(slots=True, kw_only=True)
class S3File:
    """Implements `artifact_port.ArtifactFile`: one request, made at the first read."""

    client: S3
    bucket: str
    where: str
    key: str
    _at: int = 0
    _body: Any = None  # botocore's StreamingBody

    def seek(self, offset: int, /) -> int:
        self.close()
        self._at = offset
        return offset

    def read(self, size: int, /) -> bytes:
        with _translated(self.key):
            if self._body is None:
                span = {"Range": f"bytes={self._at}-"} if self._at else {}
                found = self.client.get_object(Bucket=self.bucket, Key=self.where, **span)
                self._body = found["Body"]
            part: bytes = self._body.read(size)
        self._at += len(part)
        return part

    def close(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None


@dataclass(slots=True, kw_only=True)
class S3Upload:
    """Implements `artifact_port.ArtifactUpload`. A file below one part is put as a whole."""

    store: S3ArtifactStore
    key: str
    where: str
    sha256: str
    size: int = 0
    done: bool = False
    _waiting: bytearray = field(default_factory=bytearray)
    _upload_id: str = ""
    _parts: list[dict[str, Any]] = field(default_factory=list)  # Any: as the service wants them
    _hash: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def write(self, content: bytes, /) -> None:
        self.size += len(content)
        if self.size > limits.ARTIFACT_BYTES_MAX:
            raise TooLargeError(
                f"artifact {self.key!r} is over {limits.ARTIFACT_BYTES_MAX} bytes; split it"
            )
        self._hash.update(content)
        self._waiting += content
        while len(self._waiting) >= limits.ARTIFACT_PART_BYTES:
            self._send(bytes(self._waiting[: limits.ARTIFACT_PART_BYTES]))
            del self._waiting[: limits.ARTIFACT_PART_BYTES]

    def finish(self) -> None:
        check_sha256(self.key, self._hash.hexdigest(), self.sha256)
        metadata = {SHA256_METADATA: self.sha256}
        named = {"Bucket": self.store.bucket, "Key": self.where}
        if not self._upload_id:
            with _translated(self.key):
                self.store.client.put_object(**named, Body=bytes(self._waiting), Metadata=metadata)
        else:
            if self._waiting:
                self._send(bytes(self._waiting))
            with _translated(self.key):
                self.store.client.complete_multipart_upload(
                    **named, UploadId=self._upload_id, MultipartUpload={"Parts": self._parts}
                )
        self.done = True

    def abandon(self) -> None:
        self._waiting.clear()
        if self._upload_id and not self.done:
            with suppress(GristmillError), _translated(self.key):
                self.store.client.abort_multipart_upload(
                    Bucket=self.store.bucket, Key=self.where, UploadId=self._upload_id
                )

    def _send(self, content: bytes) -> None:
        named = {"Bucket": self.store.bucket, "Key": self.where}
        with _translated(self.key):
            if not self._upload_id:
                begun = self.store.client.create_multipart_upload(
                    **named, Metadata={SHA256_METADATA: self.sha256}
                )
                self._upload_id = begun["UploadId"]
            number = len(self._parts) + 1
            sent = self.store.client.upload_part(
                **named, UploadId=self._upload_id, PartNumber=number, Body=content
            )
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"]})


class _MissingObjectError(UnavailableError):
    """The service has no such object."""


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Errors of the service as ours: whatever it is, the same request may succeed later."""
    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        kind = _MissingObjectError if code in MISSING else UnavailableError
        raise kind(
            f"the artifact store refused {what[:200]!r} ({code}): {error}; see that its bucket and "
            "credentials are right, or try again"
        ) from error
    except (BotoCoreError, HTTPClientError, OSError) as error:
        raise UnavailableError(
            f"the artifact store did not answer about {what[:200]!r} ({type(error).__name__}); try again"
        ) from error
