"""Where checkpoints lie: s3:// names outside, folders of the artifact store inside. Pure.

A session writes to `s3://<bucket>/<prefix>`, which is the folder `<tenant>/<bucket>/<prefix>` of the
artifact store, and each checkpoint is the folder `<checkpoint id>` in it. Buckets are a tenant's own:
two tenants may both have a `data` and never see each other's.
"""

import re
from typing import Final, NamedTuple

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError

BUCKET_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_S3_URI: Final = re.compile(r"s3://([^/]+)(?:/(.*))?", re.DOTALL)


class S3Location(NamedTuple):
    """A bucket and a prefix without slashes at its ends; an empty prefix is the bucket itself."""

    bucket: str
    prefix: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"


def default_bucket(account_id: str) -> str:
    """The bucket of a tenant that names none."""
    return f"gristmill-{account_id}"


def check_bucket(bucket: str) -> str:
    """The bucket's name, if it is one. Raises InvalidRequestError."""
    if not BUCKET_PATTERN.fullmatch(bucket) or ".." in bucket:
        raise InvalidRequestError(
            f"bucket name {bucket!r} is not valid: write 3 to 63 lower-case letters, digits, dots and "
            "hyphens, beginning and ending with a letter or digit"
        )
    return bucket


def check_key(key: str) -> str:
    """An object key that is also a path below its bucket. Raises InvalidRequestError.

    Refused: empty segments, `.` and `..`, control characters, a segment a file system cannot hold.
    """
    segments = key.split("/")
    if len(key.encode("utf-8", "surrogatepass")) > limits.OBJECT_KEY_BYTES_MAX:
        raise InvalidRequestError(
            f"an object key is longer than {limits.OBJECT_KEY_BYTES_MAX} bytes; shorten it"
        )
    if not all(_is_segment(segment) for segment in segments):
        raise InvalidRequestError(
            f"object key {key!r} cannot be stored: every part between slashes must be 1 to "
            f"{limits.KEY_SEGMENT_BYTES_MAX} bytes, not '.' or '..', without control characters"
        )
    return key


def _is_segment(segment: str) -> bool:
    return (
        segment not in ("", ".", "..")
        and segment.isprintable()
        and len(segment.encode()) <= limits.KEY_SEGMENT_BYTES_MAX
    )


def parse_s3_uri(text: str) -> S3Location:
    """Read `s3://bucket/prefix`; slashes at the prefix's end do not matter. Raises InvalidRequestError.

    A part that begins with a dot is refused: what lies there is no object, and could not be fetched.
    """
    match = _S3_URI.fullmatch(text)
    if match is None:
        raise InvalidRequestError(f"output path {text!r} is not of the form s3://bucket/prefix")
    prefix = (match.group(2) or "").strip("/")
    if prefix:
        check_key(prefix)
    if any(part.startswith(".") for part in prefix.split("/")):
        raise InvalidRequestError(
            f"output path {text!r} has a part that begins with a dot; choose another name for it"
        )
    return S3Location(check_bucket(match.group(1)), prefix)


def session_output(path: str, session_name: str, account_id: str, bucket: str = "") -> S3Location:
    """Where a session writes: its own `output.path`, else `<default bucket>/<session name>/output`.

    bucket: the tenant's `spec.defaultBucket`, empty where it names none.
    """
    if path:
        return parse_s3_uri(path)
    return S3Location(bucket or default_bucket(account_id), f"{session_name}/output")


def artifact_folder(tenant: str, location: S3Location) -> str:
    """A location as a folder relative to the artifact store's root: `<tenant>/<bucket>/<prefix>`."""
    return "/".join(part for part in (tenant, location.bucket, location.prefix) if part)


def checkpoint_uri(tenant: str, path: str) -> str:
    """The s3:// folder of a checkpoint from its path `<tenant>/<bucket>/<prefix>/<checkpoint id>`.

    Raises InvalidRequestError if the path is not the tenant's.
    """
    owner, _, rest = path.partition("/")
    if owner != tenant or not rest:
        raise InvalidRequestError(f"checkpoint path {path!r} is not inside tenant {tenant!r}")
    return f"s3://{rest.strip('/')}/"
