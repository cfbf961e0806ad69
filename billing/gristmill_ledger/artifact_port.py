"""The artifact store as a port: `artifacts` keeps files in a folder, `artifacts_s3` in a bucket.

Paths have parts between slashes, lie below a tenant, and are listed in UTF-8 order. A file is whole or
not there. All calls block: use a thread.
"""

from typing import Protocol

from gristmill_contracts.cluster_http import ArtifactInfo, ArtifactPage


class ArtifactFile(Protocol):
    """An open file. Reads may raise UnavailableError where the store lies across a network."""

    def seek(self, offset: int, /) -> int: ...

    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class ArtifactUpload(Protocol):
    """A file on its way: `write` its bytes, then `finish`; `abandon` in any case at the end."""

    def write(self, content: bytes, /) -> None:
        """Raises TooLargeError past the bound, UnavailableError where the store does not take it."""
        ...

    def finish(self) -> None:
        """Make it durable under its name. Raises InvalidRequestError where the bytes are others."""
        ...

    def abandon(self) -> None:
        """Leave nothing behind unless it was finished."""
        ...


class ArtifactStore(Protocol):
    def open(self) -> None:
        """Make it ready for use. Raises OSError or UnavailableError where it cannot be."""
        ...

    def begin(self, tenant: str, key: str, sha256: str) -> ArtifactUpload:
        """Make room for a file with this checksum. Raises InvalidRequestError for a path that cannot be,
        ConflictError where a folder has the name, or a file is above it; UnavailableError."""
        ...

    def sha256_of(self, tenant: str, key: str) -> str | None:
        """The checksum of a file; None = there is none."""
        ...

    def make_folder(self, tenant: str, key: str) -> None:
        """Make the folder `key`, which ends with a slash; one that is there is fine."""
        ...

    def delete(self, tenant: str, key: str) -> None:
        """Remove a file, or an empty folder (`key` ends with a slash); a missing one is removed already.

        Raises ConflictError for a folder that holds something.
        """
        ...

    def read(self, tenant: str, key: str) -> tuple[ArtifactInfo, ArtifactFile]:
        """A file, to be closed by the caller. Raises NotFoundError."""
        ...

    def list(
        self, tenant: str, *, prefix: str, after: str, limit: int, delimiter: bool
    ) -> ArtifactPage:
        """Files whose path begins with `prefix` and comes behind `after`, in UTF-8 order.

        delimiter: files directly below the prefix alone, and the folders beside them in `folders`.
        """
        ...


def put_bytes(store: ArtifactStore, tenant: str, key: str, content: bytes, sha256: str) -> None:
    """Keep a small file as a whole. Raises as an upload does."""
    upload = store.begin(tenant, key, sha256)
    try:
        upload.write(content)
        upload.finish()
    finally:
        upload.abandon()


def get_bytes(store: ArtifactStore, tenant: str, key: str) -> bytes:
    """All of a small file. Raises NotFoundError, UnavailableError."""
    info, file = store.read(tenant, key)
    try:
        parts = []
        left = info.size_bytes
        while left > 0 and (part := file.read(left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        file.close()
