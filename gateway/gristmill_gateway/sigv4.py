"""AWS Signature Version 4, the server's side: what a request claims, and whether its signature is right.

Pure: no clock, no store of keys. Header form only; presigned URLs are not served. Source: the AWS
General Reference, "Create a signed AWS API request"; tested against botocore's own signers.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, Literal
from urllib.parse import quote, unquote_to_bytes

from gristmill_contracts import limits
from gristmill_contracts.errors import UnauthenticatedError

ALGORITHM: Final = "AWS4-HMAC-SHA256"
UNSIGNED_PAYLOADS: Final = frozenset({"UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"})
"""What stands for the body's hash where the client does not sign the body."""

_TIMESTAMP: Final = "%Y%m%dT%H%M%SZ"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SCOPE: Final = re.compile(
    r"([^/\s,]{1,128})/([0-9]{8})/([a-z0-9-]{1,64})/([a-z0-9-]{1,64})/aws4_request"
)

Headers = Sequence[tuple[str, str]]
"""Names in lower case, in the order received; a name may come more than once."""
Fault = Literal[
    "missing", "malformed", "unknown_key", "skew", "scope", "signature", "body_hash"
]  # fmt: skip


class SignatureError(UnauthenticatedError):
    """A request that is not signed as it must be; `fault` says why, for each wire's own error name."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRequest:
    """What is signed. path and query: as received, still percent-encoded, without the `?`."""

    method: str
    path: str
    query: str
    headers: Headers

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def value(self, name: str) -> str | None:
        """All values of a header as one, as HTTP joins them; None if there is none."""
        found = self.values(name)
        return ",".join(found) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The parsed Authorization header, and the time at which the client says it signed."""

    access_key_id: str
    date: str
    region: str
    service: str
    signed_headers: tuple[str, ...]
    signature: str
    timestamp: str

    @property
    def scope(self) -> str:
        return f"{self.date}/{self.region}/{self.service}/aws4_request"


def scope_service(headers: Headers) -> str | None:
    """The service a request says it is signed for, before any of it is believed; None if unreadable."""
    for name, value in headers:
        if name == "authorization":
            match = _SCOPE.search(value)
            return match.group(4) if match else None
    return None


def read_claim(request: SignedRequest) -> Claim:
    """Parse the Authorization header and the date. Raises SignatureError, `missing` or `malformed`."""
    header = request.value("authorization")
    if header is None:
        raise SignatureError(
            "missing",
            "the request has no Authorization header; sign it with AWS Signature Version 4 and an access "
            "key made by `gristmill keys create`",
        )
    algorithm, _, rest = header.strip().partition(" ")
    if algorithm != ALGORITHM:
        raise SignatureError(
            "missing", f"the Authorization header begins with {algorithm[:40]!r}, not {ALGORITHM}"
        )
    parts = dict(_pairs(rest))
    scope = _SCOPE.fullmatch(parts.get("Credential", ""))
    if scope is None or not _DIGEST.fullmatch(parts.get("Signature", "")):
        raise SignatureError(
            "malformed",
            "the Authorization header must be 'AWS4-HMAC-SHA256 Credential=<key>/<yyyymmdd>/<region>/"
            "<service>/aws4_request, SignedHeaders=<names>, Signature=<64 hex digits>'",
        )
    claim = Claim(
        access_key_id=scope.group(1),
        date=scope.group(2),
        region=scope.group(3),
        service=scope.group(4),
        signed_headers=tuple(parts.get("SignedHeaders", "").split(";")),
        signature=parts["Signature"],
        timestamp=_timestamp(request),
    )
    _check_signed_headers(request, claim)
    if claim.timestamp[:8] != claim.date:
        raise SignatureError(
            "malformed",
            f"Date in Credential scope does not match X-Amz-Date: {claim.date} and {claim.timestamp}",
        )
    return claim


def _pairs(text: str) -> Iterable[tuple[str, str]]:
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        yield name, value


def _timestamp(request: SignedRequest) -> str:
    """X-Amz-Date, else Date, as `yyyymmddThhmmssZ`."""
    text = request.value("x-amz-date")
    try:
        if text is not None:
            return datetime.strptime(text, _TIMESTAMP).replace(tzinfo=UTC).strftime(_TIMESTAMP)
        date = parsedate_to_datetime(request.value("date") or "")
        return date.astimezone(UTC).strftime(_TIMESTAMP)
    except (ValueError, TypeError, OverflowError) as error:
        raise SignatureError(
            "malformed",
            "the request has no readable date; send X-Amz-Date as yyyymmddThhmmssZ, in UTC",
        ) from error


def _check_signed_headers(request: SignedRequest, claim: Claim) -> None:
    """Host and everything that changes a request's meaning must be under the signature."""
    signed = set(claim.signed_headers)
    needed = {"host"} | {name for name, _ in request.headers if name.startswith("x-amz-")}
    missing = sorted(needed - signed)
    if missing:
        raise SignatureError(
            "malformed", f"headers must be signed and are not: {', '.join(missing)[:200]}"
        )
    absent = sorted(signed - {name for name, _ in request.headers})
    if absent:
        raise SignatureError(
            "malformed", f"SignedHeaders names what was not sent: {', '.join(absent)[:200]!r}"
        )


def check_clock(claim: Claim, now: datetime, skew_s_max: float = limits.CLOCK_SKEW_S_MAX) -> None:
    """Raises SignatureError, `skew`, for a request from too far in the past or future."""
    signed_at = datetime.strptime(claim.timestamp, _TIMESTAMP).replace(tzinfo=UTC)
    skew_s = (now - signed_at).total_seconds()
    if abs(skew_s) > skew_s_max:
        raise SignatureError(
            "skew",
            f"Signature expired: {claim.timestamp} is {abs(skew_s):.0f} s "
            f"{'before' if skew_s > 0 else 'after'} the server's time {now.strftime(_TIMESTAMP)}, and "
            f"at most {skew_s_max:.0f} s are allowed; set the client's clock",
        )


def check_signature(request: SignedRequest, claim: Claim, key: bytes, body_sha256: str) -> None:
    """Raises SignatureError, `signature` or `body_hash`.

    key: of the day, region and service (`signing_key`). body_sha256: hex digest of the body received.
    """
    declared = request.value("x-amz-content-sha256")
    payload = body_sha256 if declared is None else declared
    expected = sign(key, string_to_sign(claim, canonical_request(request, claim, payload)))
    if not hmac.compare_digest(expected.encode(), claim.signature.encode()):
        raise SignatureError(
            "signature",
            "The request signature we calculated does not match the signature you provided. Check the "
            "secret access key, and that nothing between client and server rewrites the request",
        )
    signed_body = payload not in UNSIGNED_PAYLOADS
    if signed_body and not hmac.compare_digest(payload.encode(), body_sha256.encode()):
        raise SignatureError(
            "body_hash",
            f"X-Amz-Content-SHA256 is {payload[:80]!r}, and the body received has {body_sha256}; it was "
            "changed on its way, or is encoded in a form that is not supported here",
        )


def signing_key(secret: str, date: str, region: str, service: str) -> bytes:
    """The key of one day, region and service."""
    key = f"AWS4{secret}".encode()
    for part in (date, region, service, "aws4_request"):
        key = _hmac(key, part)
    return key


def sign(key: bytes, text: str) -> str:
    return _hmac(key, text).hex()


def string_to_sign(claim: Claim, canonical: str) -> str:
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return "\n".join((ALGORITHM, claim.timestamp, claim.scope, digest))


def canonical_request(request: SignedRequest, claim: Claim, payload: str) -> str:
    """The text whose hash is signed."""
    names = sorted(set(claim.signed_headers))
    lines = [f"{name}:{','.join(_trimmed(v) for v in request.values(name))}" for name in names]
    return "\n".join(
        (
            request.method,
            canonical_path(request.path, claim.service),
            canonical_query(request.query),
            *lines,
            "",
            ";".join(names),
            payload,
        )
    )


def canonical_path(path: str, service: str) -> str:
    """S3 signs the path as it is sent; every other service normalizes it and encodes it once more."""
    if service == "s3":
        return path or "/"
    return quote(_without_dots(path), safe="/~")


def _without_dots(path: str) -> str:
    kept: list[str] = []
    for part in path.split("/"):
        if part == "..":
            kept = kept[:-1]
        elif part not in ("", "."):
            kept.append(part)
    joined = "/" + "/".join(kept)
    return joined + "/" if kept and path.endswith("/") else joined


def canonical_query(query: str) -> str:
    """Parameters by encoded name, then value; each encoded in the one form that the standard has."""
    if not query:
        return ""
    pairs = [part.partition("=") for part in query.split("&")]
    encoded = sorted((_encoded(name), _encoded(value)) for name, _, value in pairs)
    return "&".join(f"{name}={value}" for name, value in encoded)


def _encoded(text: str) -> str:
    return quote(unquote_to_bytes(text), safe="-_.~")


def _trimmed(value: str) -> str:
    return " ".join(value.split())


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
