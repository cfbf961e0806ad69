"""Secrets that are pure functions of one cluster key, so that nobody has to hand them around.

HMAC-SHA256 with a domain label: knowing one derived secret tells nothing of another. Fields are joined
by a byte that none of them can hold.
"""

import base64
import hashlib
import hmac
from typing import Final, Literal

from gristmill_contracts.ids import SessionUid

CLUSTER_KEY_BYTES: Final = 32
ACCESS_KEY_PREFIX: Final = "GM"
ACCESS_KEY_CHARS: Final = 20

Service = Literal["gateway", "operator", "cli"]


def _derive(key: bytes, domain: str, *fields: str) -> bytes:
    text = "\x00".join((f"gristmill.dev/{domain}/v1", *fields))
    return hmac.digest(key, text.encode(), hashlib.sha256)


def _text(secret: bytes) -> str:
    return base64.urlsafe_b64encode(secret).rstrip(b"=").decode()


def attempt_secret(key: bytes, uid: SessionUid, attempt: int) -> str:
    """What the gateway shows the meter of one attempt."""
    return _text(_derive(key, "attempt", uid, str(attempt)))


def producer_secret(key: bytes, uid: SessionUid, attempt: int) -> str:
    """What the meter of one attempt shows the ledger."""
    return _text(_derive(key, "producer", uid, str(attempt)))


def service_secret(key: bytes, service: Service) -> str:
    """What one of our own services shows the ledger."""
    return _text(_derive(key, "service", service))


def operation_key(key: bytes) -> bytes:
    """Signs operation ids and page tokens; the same for all gateways. 32 bytes."""
    return _derive(key, "operation")


def access_key_id(tenant_uid: str, key_name: str) -> str:
    """The public half of a tenant's client key: 20 capital letters and digits."""
    digest = hashlib.sha256(f"{tenant_uid}\x00{key_name}".encode()).digest()
    body = base64.b32encode(digest).decode()[: ACCESS_KEY_CHARS - len(ACCESS_KEY_PREFIX)]
    return ACCESS_KEY_PREFIX + body


def access_key_secret(key: bytes, access_key: str) -> str:
    """The secret half of the client key `access_key`."""
    return _text(_derive(key, "access-key", access_key))
