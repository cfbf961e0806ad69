"""AWS Signature Version 4 of one kind of request: a POST of JSON to `/`. Pure."""

import hashlib
import hmac
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import urlsplit

ALGORITHM: Final = "AWS4-HMAC-SHA256"
SERVICE: Final = "sagemaker"
CONTENT_TYPE: Final = "application/x-amz-json-1.1"
SIGNED: Final = "content-type;host;x-amz-date;x-amz-target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """An access key, and the region that its signatures name."""

    key_id: str
    secret: str
    region: str


def signed_headers(
    url: str, operation: str, body: bytes, credentials: Credentials, now: datetime
) -> dict[str, str]:
    """All headers of the request that calls `operation`. now: UTC."""
    time = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {
        "Content-Type": CONTENT_TYPE,
        "Host": urlsplit(url).netloc,
        "X-Amz-Date": time,
        "X-Amz-Target": f"SageMaker.{operation}",
    }
    lines = [f"{name.lower()}:{value}" for name, value in headers.items()]
    canonical = "\n".join(["POST", "/", "", *lines, "", SIGNED, hashlib.sha256(body).hexdigest()])
    scope = f"{time[:8]}/{credentials.region}/{SERVICE}/aws4_request"
    text = "\n".join([ALGORITHM, time, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{credentials.secret}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.digest(key, part.encode(), hashlib.sha256)
    claim = (
        f"Credential={credentials.key_id}/{scope}, SignedHeaders={SIGNED}, Signature={key.hex()}"
    )
    return {**headers, "Authorization": f"{ALGORITHM} {claim}"}
