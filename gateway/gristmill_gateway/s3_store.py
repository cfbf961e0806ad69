"""The artifact store as buckets of objects: a port, and its implementation in a local folder.

Object `key` of bucket `bucket` of a tenant is the file `<root>/<tenant>/<bucket>/<key>`, where workers
write checkpoints. Only folders that `locations` allows are ever named, and links are never followed,
so no key leads out of its bucket.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from gristmill_contracts.errors import InvalidRequestError, NotFoundError
from gristmill_gateway import locations

TEMPORARY_PREFIX = "."
"""Files and folders of this beginning are still being written, and no objects yet."""


class BucketInfo(NamedTuple):
    name: str
    created_us: int


class ObjectInfo(NamedTuple):
    """`etag` changes whenever the content may have; it is no checksum of it."""

    key: str
    size: int
    modified_us: int
    etag: str


class ArtifactStore(Protocol):
    """Buckets of one tenant at a time. Calls block on the disk: async callers use `asyncio.to_thread`.

    A name that cannot be a bucket's or an object's names nothing: NotFoundError where one is needed.
    """

    def buckets(self, tenant: str) -> list[BucketInfo]:
        """All buckets, by name."""
        ...

    def has_bucket(self, tenant: str, bucket: str) -> bool: ...

    def create_bucket(self, tenant: str, bucket: str) -> bool:
        """Make it; False if it was there. Raises InvalidRequestError for a name it cannot have."""
        ...

    def objects(self, tenant: str, bucket: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix` and comes behind `after`, in UTF-8 order of keys."""
        ...

    def open(self, tenant: str, bucket: str, key: str) -> tuple[ObjectInfo, BinaryIO]:
        """An object and its content, to be closed by the caller. Raises NotFoundError."""
        ...

    def delete(self, tenant: str, bucket: str, key: str) -> None:
        """Remove an object; one that is not there is removed already."""
        ...


class LocalArtifactStore:
    """The port over a folder of this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def buckets(self, tenant: str) -> list[BucketInfo]:
        try:
            with os.scandir(self._root / tenant) as entries:
                found = [entry for entry in entries if _is_bucket_folder(entry)]
        except FileNotFoundError:
            return []
        infos = [
            BucketInfo(entry.name, entry.stat(follow_symlinks=False).st_ctime_ns // 1000)
            for entry in found
        ]
        return sorted(infos)

    def has_bucket(self, tenant: str, bucket: str) -> bool:
        try:
            folder = self._bucket_folder(tenant, bucket)
        except NotFoundError:
            return False
        return folder.is_dir() and not folder.is_symlink()

    def create_bucket(self, tenant: str, bucket: str) -> bool:
        folder = self._root / tenant / locations.check_bucket(bucket)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            return False
        return True

    def objects(self, tenant: str, bucket: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        return _walk(str(self._bucket_folder(tenant, bucket)), "", prefix.encode(), after.encode())

    def open(self, tenant: str, bucket: str, key: str) -> tuple[ObjectInfo, BinaryIO]:
        path = self._object_path(tenant, bucket, key)
        try:
            # Not blocking, or opening a named pipe would wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NotFoundError(f"there is no object {key!r} in bucket {bucket!r}") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise NotFoundError(f"{key!r} in bucket {bucket!r} is no object")
        return _info(key, status), os.fdopen(descriptor, "rb")

    def delete(self, tenant: str, bucket: str, key: str) -> None:
        # Emptied folders stay: removing one could race a save that is about to write into it.
        try:
            self._object_path(tenant, bucket, key).unlink()
        except (NotFoundError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return

    def _bucket_folder(self, tenant: str, bucket: str) -> Path:
        try:
            return self._root / tenant / locations.check_bucket(bucket)
        except InvalidRequestError as error:
            raise NotFoundError(f"there is no bucket {bucket!r}") from error

    def _object_path(self, tenant: str, bucket: str, key: str) -> Path:
        """The file of a key, whose folders are real ones inside the bucket."""
        folder = self._bucket_folder(tenant, bucket)
        try:
            path = folder / locations.check_key(key)
        except InvalidRequestError as error:
            raise NotFoundError(f"there is no object {key!r} in bucket {bucket!r}") from error
        if not all(map(is_object_name, key.split("/"))):
            raise NotFoundError(f"{key!r} in bucket {bucket!r} is no object yet")
        if path.parent.resolve() != folder.resolve() / path.parent.relative_to(folder):
            raise NotFoundError(f"{key!r} in bucket {bucket!r} lies behind a link")
        return path


def _is_bucket_folder(entry: os.DirEntry[str]) -> bool:
    return bool(locations.BUCKET_PATTERN.fullmatch(entry.name)) and entry.is_dir(
        follow_symlinks=False
    )


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    etag = f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"
    return ObjectInfo(key, status.st_size, status.st_mtime_ns // 1000, etag)


def _walk(folder: str, base: str, prefix: bytes, after: bytes) -> Iterator[ObjectInfo]:
    """Files below `folder` in the order of their keys, whole subtrees outside the range skipped.

    base: the key of `folder`, with a slash at its end; empty at the top.
    """
    try:
        with os.scandir(folder) as entries:
            children = [
                (entry, _key(entry, base)) for entry in entries if is_object_name(entry.name)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry, key in sorted(children, key=lambda child: child[1].encode()):
        name = key.encode()
        if key.endswith("/"):
            covers = prefix.startswith(name) or name.startswith(prefix)
            if covers and (after.startswith(name) or name > after):
                yield from _walk(entry.path, key, prefix, after)
        elif name.startswith(prefix) and name > after and entry.is_file(follow_symlinks=False):
            try:
                yield _info(key, entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue


def is_object_name(name: str) -> bool:
    return not name.startswith(TEMPORARY_PREFIX) and name.isprintable()


def _key(entry: os.DirEntry[str], base: str) -> str:
    """An entry's key. A folder's has its slash, or the order would not be that of the keys below it."""
    return f"{base}{entry.name}/" if entry.is_dir(follow_symlinks=False) else base + entry.name
