"""The names of resources that follow from names of the SageMaker wire. Pure."""

import base64
import hashlib
import re
from typing import Final

from gristmill_contracts import limits

_DNS_LABEL: Final = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
"""It begins with a letter, for a Service gets the name too."""


def object_name(session_name: str) -> str:
    """The resource's name: the session's own if it is a DNS label that fits, else a hash of it."""
    if len(session_name) <= limits.OBJECT_NAME_CHARS_MAX and _DNS_LABEL.fullmatch(session_name):
        return session_name
    digest = hashlib.sha256(session_name.encode("utf-8", "surrogatepass")).digest()[:16]
    return "ts-" + base64.b32encode(digest).decode().rstrip("=").lower()
