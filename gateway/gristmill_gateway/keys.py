"""The key that signs what the gateway hands out: one file, shared by all its replicas."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Final

from gristmill_contracts.errors import InvalidRequestError

KEY_BYTES: Final = 32


def load_or_create_key(path: Path) -> bytes:
    """The key in a file, made with mode 0600 if there is none. Raises InvalidRequestError for a short one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}")
    if not path.exists():
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(file, secrets.token_bytes(KEY_BYTES))
            os.fsync(file)
        finally:
            os.close(file)
        try:
            # A link fails where another process was faster, and then its key is the key.
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    key = path.read_bytes()
    if len(key) < KEY_BYTES:
        raise InvalidRequestError(
            f"{path} holds {len(key)} bytes and a signing key has {KEY_BYTES}; remove the file to have "
            "a new one made (operation ids given out before become invalid)"
        )
    return key


def derived_key(key: bytes, purpose: str) -> bytes:
    """A key for one purpose, so that nothing signed for one can be passed off in another."""
    return hmac.new(key, purpose.encode(), hashlib.sha256).digest()
