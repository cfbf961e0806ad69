"""Bodies of operations: small ones lie in a row, large ones in the store under a name that is used once."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError, NotFoundError
from gristmill_ledger.artifact_port import ArtifactStore, get_bytes, put_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """`inline`, or the file `blob` of the tenant."""

    size: int
    inline: bytes | None = None
    blob: str | None = None


async def store_body(store: ArtifactStore, tenant: str, uid: str, content: bytes) -> Body:
    """Durable once this returns. Raises UnavailableError."""
    if len(content) <= limits.INLINE_PAYLOAD_BYTES_MAX:
        return Body(size=len(content), inline=content)
    # A session's uid may be any text; names in the store may not.
    folder = hashlib.sha256(uid.encode()).hexdigest()[:32]
    name = f"{folder}/{secrets.token_hex(16)}"
    sha256 = hashlib.sha256(content).hexdigest()
    await asyncio.to_thread(put_bytes, store, tenant, name, content, sha256)
    return Body(size=len(content), blob=name)


async def load_body(store: ArtifactStore, tenant: str, body: Body) -> bytes:
    """Raises NotFoundError where it is gone, UnavailableError."""
    if body.blob is None:
        return body.inline or b""
    content = await asyncio.to_thread(get_bytes, store, tenant, body.blob)
    if len(content) != body.size:
        raise NotFoundError(
            f"body {body.blob} of tenant {tenant} has {len(content)} bytes, not {body.size}"
        )
    return content


async def drop_bodies(store: ArtifactStore, tenant: str, blobs: Iterable[str]) -> None:
    """Remove files that no row names any more. One that stays takes room and nothing else."""
    for blob in blobs:
        try:
            await asyncio.to_thread(store.delete, tenant, blob)
        except (GristmillError, OSError) as error:
            log.warning("body_not_removed", extra={"blob": blob, "error": str(error)})
