"""An S3 request as an operation on a bucket and a key, and the checks that need no store. Pure."""

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gristmill_contracts import limits
from gristmill_gateway.s3_errors import S3RefusalError

SUPPORTED: Final = (
    "ListBuckets, HeadBucket, CreateBucket, ListObjectsV2, DeleteObjects, HeadObject and GetObject"
)
_OPERATIONS: Final[dict[tuple[str, str, str], str]] = {
    ("GET", "service", ""): "ListBuckets",
    ("HEAD", "bucket", ""): "HeadBucket",
    ("PUT", "bucket", ""): "CreateBucket",
    ("GET", "bucket", "list-type"): "ListObjectsV2",
    ("POST", "bucket", "delete"): "DeleteObjects",
    ("HEAD", "object", ""): "HeadObject",
    ("GET", "object", ""): "GetObject",
}
"""(method, what the path names, the parameter that chooses) -> operation."""
_PARAMETERS: Final[dict[str, frozenset[str]]] = {
    "ListBuckets": frozenset({"max-buckets", "continuation-token", "prefix"}),
    "ListObjectsV2": frozenset(
        {
            "list-type", "prefix", "delimiter", "max-keys", "continuation-token", "start-after",
            "encoding-type", "fetch-owner",
        }
    ),
    "DeleteObjects": frozenset({"delete"}),
}  # fmt: skip
_RANGE: Final = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Request:
    """path: percent-decoded. headers: names in lower case. query: decoded, in order, blanks kept."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def bucket(self) -> str:
        return self.path.lstrip("/").partition("/")[0]

    @property
    def key(self) -> str:
        return self.path.lstrip("/").partition("/")[2]


def operation_of(request: S3Request) -> str:
    """The operation's name. Raises S3RefusalError, MethodNotAllowed, for one we do not have."""
    target = "object" if request.key else "bucket" if request.bucket else "service"
    choice = next((name for name in ("list-type", "delete") if name in request.query), "")
    operation = _OPERATIONS.get((request.method, target, choice))
    if operation is None:
        raise S3RefusalError(
            "MethodNotAllowed",
            f"{request.method} of a {target}{f' with ?{choice}' if choice else ''} is not supported; "
            f"this store answers {SUPPORTED}",
        )
    _check_parameters(operation, request.query)
    return operation


def _check_parameters(operation: str, query: Mapping[str, str]) -> None:
    known = _PARAMETERS.get(operation, frozenset())
    for name in query:
        # x-id only repeats the operation's name.
        if name not in known and name != "x-id":
            raise S3RefusalError(
                "InvalidArgument",
                f"parameter {name!r} is not supported by {operation}; leave it out",
            )
    if operation == "ListObjectsV2" and query["list-type"] != "2":
        raise S3RefusalError(
            "InvalidArgument", f"list-type is {query['list-type']!r}; the only one here is 2"
        )


def number(query: Mapping[str, str], name: str, most: int) -> int:
    """A parameter of 0 to `most`; a larger one is `most`, as S3 has it. Absent: `most`."""
    text = query.get(name)
    if text is None:
        return most
    if not (text.isascii() and text.isdecimal()) or len(text) > 10:
        raise S3RefusalError("InvalidArgument", f"{name} is {text[:40]!r}; it must be 0 to {most}")
    return min(int(text), most)


def check_owner(headers: Mapping[str, str], account_id: str) -> None:
    """The caller may name the account it thinks it talks to. Raises S3RefusalError, AccessDenied."""
    expected = headers.get("x-amz-expected-bucket-owner")
    if expected is not None and expected != account_id:
        raise S3RefusalError(
            "AccessDenied",
            f"x-amz-expected-bucket-owner is {expected[:40]!r}, and the bucket's is {account_id}",
        )


def check_digest(headers: Mapping[str, str], body: bytes) -> None:
    """Every checksum that came with the body fits it, and there is one. Raises S3RefusalError."""
    given = {name: headers[name] for name in headers if name.startswith("x-amz-checksum-")}
    if "content-md5" in headers:
        given["content-md5"] = headers["content-md5"]
    if not given:
        raise S3RefusalError(
            "InvalidRequest", "a checksum is missing: send x-amz-checksum-crc32 or Content-MD5"
        )
    for name, text in given.items():
        digest = _DIGESTS.get(name)
        if digest is None:
            raise S3RefusalError(
                "InvalidRequest",
                f"{name} is not supported; send one of {', '.join(sorted(_DIGESTS))}",
            )
        try:
            wanted = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise S3RefusalError("InvalidDigest", f"{name} {text[:80]!r} is not base64") from error
        if wanted != digest(body):
            raise S3RefusalError(
                "BadDigest", f"{name} {text[:80]!r} is not that of the body received"
            )


_DIGESTS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "content-md5": lambda body: hashlib.md5(body, usedforsecurity=False).digest(),
    "x-amz-checksum-crc32": lambda body: zlib.crc32(body).to_bytes(4, "big"),
    "x-amz-checksum-sha1": lambda body: hashlib.sha1(body, usedforsecurity=False).digest(),
    "x-amz-checksum-sha256": lambda body: hashlib.sha256(body).digest(),
}


def byte_range(headers: Mapping[str, str], size: int) -> tuple[int, int] | None:
    """[start, end) of the one range asked for; None = all. Raises S3RefusalError, InvalidRange.

    A header that is no single byte range means the whole object, as RFC 9110 has it.
    """
    match = _RANGE.fullmatch(headers.get("range", ""))
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, end = max(size - int(last), 0), size
    else:
        start, end = int(first), min(int(last) + 1, size) if last else size
    if first and last and int(last) < int(first):
        return None
    if start >= end:
        raise S3RefusalError(
            "InvalidRange", f"range {match.group()!r} lies outside the object's {size} bytes"
        )
    return start, end


def check_limits(body: bytes) -> None:
    """Raises S3RefusalError for a body larger than any request here needs."""
    if len(body) > limits.S3_BODY_BYTES_MAX:
        raise S3RefusalError(
            "InvalidRequest",
            f"the body has {len(body)} bytes; the most is {limits.S3_BODY_BYTES_MAX}",
        )
