"""The artifact store in a folder: files in one folder for each tenant, each whole or not there.

A file is written aside, synced, compared with the SHA-256 that its sender told, and renamed. Names that
begin with a dot are the store's own: `.upload-*` what is on its way, `.sha256/<name>` the checksum of
`<name>`, valid as long as size, time and inode are those that it was taken of. All calls block: use a
thread. Nothing but this process writes here, and links are never followed.
"""

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.cluster_http import ArtifactInfo, ArtifactPage
from gristmill_contracts.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from gristmill_ledger import checks
from gristmill_ledger.problems import TooLargeError

UPLOAD_PREFIX: Final = ".upload-"
SUMS_FOLDER: Final = ".sha256"
UPLOAD_AGE_S_MAX: Final = 86_400.0
"""Older uploads were left by a process that died."""


class Summed(msgspec.Struct, frozen=True, array_like=True):
    """A checksum and what it was taken of."""

    sha256: str
    size: int
    mtime_ns: int
    inode: int


class Entry(NamedTuple):
    """A file or folder below a listed one; `key` of a folder ends with a slash."""

    key: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalArtifactStore:
    """Implements `artifact_port.ArtifactStore`. `root` is the store's own folder."""

    root: Path
    free_bytes_min: int

    def open(self) -> None:
        """Make the folder, and remove what dead processes left half-written."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        oldest = time.time() - UPLOAD_AGE_S_MAX
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = Path(folder) / name
                if name.startswith(UPLOAD_PREFIX) and path.lstat().st_mtime < oldest:
                    path.unlink(missing_ok=True)

    # --- writing ---------------------------------------------------------------------------------

    def begin(self, tenant: str, key: str, sha256: str) -> "Upload":
        """Make room for a file. Raises InvalidRequestError, ConflictError, UnavailableError (full)."""
        path = self._path(tenant, key)
        self._check_room()
        self._make_folders(path.parent)
        if path.is_dir():
            raise ConflictError(f"artifact {key!r} is a folder; choose another name")
        aside = path.with_name(UPLOAD_PREFIX + secrets.token_hex(8))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(aside, flags, 0o600)
        except OSError as error:
            raise UnavailableError(
                f"artifact {key!r} cannot be begun: {error.strerror}; try again later"
            ) from error
        return Upload(key=key, sha256=sha256, path=path, aside=aside, descriptor=descriptor)

    def sha256_of(self, tenant: str, key: str) -> str | None:
        """The checksum of a file; None = there is none."""
        path = self._path(tenant, key)
        try:
            status = path.lstat()
        except OSError:
            return None
        return _sum_of(path, status) if stat.S_ISREG(status.st_mode) else None

    def make_folder(self, tenant: str, key: str) -> None:
        """Make the folder `key`, which ends with a slash; one that is there is fine."""
        self._make_folders(self._path(tenant, key.removesuffix("/")))

    def _check_room(self) -> None:
        free = os.statvfs(self.root)
        left = free.f_bavail * free.f_frsize
        if left < self.free_bytes_min:
            raise UnavailableError(
                f"the artifact store's volume has {left} bytes left and keeps {self.free_bytes_min}; "
                "enlarge it or delete checkpoints"
            )

    def _make_folders(self, folder: Path) -> None:
        missing = []
        while not folder.is_dir() or folder.is_symlink():
            if folder.exists() or folder.is_symlink():
                raise ConflictError(f"artifact {folder.name!r} is a file; nothing can lie below it")
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            each.mkdir(mode=0o700, exist_ok=True)
            _sync_folder(each.parent)

    def delete(self, tenant: str, key: str) -> None:
        """Remove a file, or an empty folder (`key` ends with a slash); a missing one is removed already.

        Raises ConflictError for a folder that holds something.
        """
        path = self._path(tenant, key.removesuffix("/"))
        try:
            if key.endswith("/"):
                _remove_folder(path)
            else:
                path.unlink()
                (path.parent / SUMS_FOLDER / path.name).unlink(missing_ok=True)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        except OSError as error:
            raise ConflictError(
                f"folder {key!r} is not empty; delete what it holds first"
            ) from error
        _sync_folder(path.parent)

    # --- reading ---------------------------------------------------------------------------------

    def read(self, tenant: str, key: str) -> tuple[ArtifactInfo, BinaryIO]:
        """A file, to be closed by the caller. Raises NotFoundError."""
        path = self._path(tenant, key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise missing(tenant, key) from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise missing(tenant, key)
        file = os.fdopen(descriptor, "rb")
        return _info(key, path, status), file

    def list(
        self, tenant: str, *, prefix: str, after: str, limit: int, delimiter: bool
    ) -> ArtifactPage:
        """Files whose path begins with `prefix` and comes behind `after`, in UTF-8 order.

        delimiter: files directly below the prefix alone, and the folders beside them in `folders`.
        """
        root = self.root / checks.tenant_name(tenant)
        page = ArtifactPage(artifacts=[], next_after=None)
        last = ""
        for entry in _walk(root, "", prefix, after, deep=not delimiter):
            if len(page.artifacts) + len(page.folders) == limit:
                page.next_after = last
                break
            last = entry.key
            if entry.key.endswith("/"):
                page.folders.append(entry.key)
                continue
            try:
                page.artifacts.append(_info(entry.key, entry.path, entry.path.lstat()))
            except FileNotFoundError:
                continue  # Deleted meanwhile.
        return page

    def _path(self, tenant: str, key: str) -> Path:
        """Where an artifact lies. Raises ConflictError for one behind a link, which nobody here makes."""
        root = self.root.resolve()
        path = root / checks.tenant_name(tenant) / check_key(key)
        if path.parent.resolve() != path.parent:
            raise ConflictError(f"artifact {key[:200]!r} lies behind a link; remove the link")
        return path


@dataclass(slots=True, kw_only=True)
class Upload:
    """A file on its way: `write` its bytes, then `finish`; `abandon` in any case at the end."""

    key: str
    sha256: str
    path: Path
    aside: Path
    descriptor: int
    size: int = 0
    done: bool = False
    _hash: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def write(self, content: bytes) -> None:
        """Raises TooLargeError past the bound, UnavailableError when the volume is full."""
        self.size += len(content)
        if self.size > limits.ARTIFACT_BYTES_MAX:
            raise TooLargeError(
                f"artifact {self.key!r} is over {limits.ARTIFACT_BYTES_MAX} bytes; split it"
            )
        self._hash.update(content)
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self.descriptor, view) :]
        except OSError as error:
            raise UnavailableError(
                f"artifact {self.key!r} cannot be written: {error.strerror}; try again later"
            ) from error

    def finish(self) -> None:
        """Make it durable under its name. Raises InvalidRequestError where the bytes are others."""
        found = self._hash.hexdigest()
        check_sha256(self.key, found, self.sha256)
        os.fsync(self.descriptor)
        try:
            self.aside.rename(self.path)
        except OSError as error:
            raise ConflictError(f"artifact {self.key!r} became a folder meanwhile") from error
        self.done = True
        _sync_folder(self.path.parent)
        _keep_sum(self.path, found, os.fstat(self.descriptor))

    def abandon(self) -> None:
        """Close, and leave nothing behind unless it was finished."""
        os.close(self.descriptor)
        if not self.done:
            self.aside.unlink(missing_ok=True)


def check_key(key: str) -> str:
    """A path below a tenant's folder. Raises InvalidRequestError for one that cannot be there."""
    checks.text("artifact path", key)
    if len(key.encode(errors="replace")) > limits.OBJECT_KEY_BYTES_MAX:
        raise InvalidRequestError(
            f"the artifact path has over {limits.OBJECT_KEY_BYTES_MAX} bytes; shorten it"
        )
    for name in key.split("/"):
        if not _is_name(name):
            raise InvalidRequestError(
                f"artifact path {key[:200]!r} has the part {name[:80]!r}; parts are names of 1 to "
                f"{limits.KEY_SEGMENT_BYTES_MAX} bytes that do not begin with a dot"
            )
    return key


def check_sha256(key: str, found: str, told: str) -> None:
    """Raise InvalidRequestError where a file is not what its sender told."""
    if found != told:
        raise InvalidRequestError(
            f"artifact {key!r} arrived with SHA-256 {found}, not {told}; send it again"
        )


def missing(tenant: str, key: str) -> NotFoundError:
    return NotFoundError(f"tenant {tenant} has no artifact {key!r}; list what there is")


def _is_name(name: str) -> bool:
    """Dots in front are our own names, and the way out of the folder."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= limits.KEY_SEGMENT_BYTES_MAX and name[0] != "." and name.isprintable()


def _walk(folder: Path, key: str, prefix: str, after: str, *, deep: bool) -> Iterator[Entry]:
    """Entries below `folder`, whose own key is `key`, in UTF-8 order of their keys."""
    try:
        with os.scandir(folder) as found:
            entries = [(e.name + "/" if _is_folder(e) else e.name, e) for e in found]
    except (FileNotFoundError, NotADirectoryError):
        return
    for name, entry in sorted(entries, key=lambda pair: pair[0].encode(errors="replace")):
        whole = key + name
        if not _is_name(entry.name) or entry.is_symlink():
            continue
        if name.endswith("/"):
            within = whole.startswith(prefix) or prefix.startswith(whole)
            passed = whole.encode() <= after.encode() and not after.startswith(whole)
            if not within or passed:
                continue
            if deep or prefix.startswith(whole):
                yield from _walk(Path(entry.path), whole, prefix, after, deep=deep)
            elif whole.encode() > after.encode():
                yield Entry(whole, Path(entry.path))
        elif (
            entry.is_file(follow_symlinks=False)
            and whole.startswith(prefix)
            and whole.encode() > after.encode()
        ):
            yield Entry(whole, Path(entry.path))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _info(key: str, path: Path, status: os.stat_result) -> ArtifactInfo:
    return ArtifactInfo(
        path=key,
        size_bytes=status.st_size,
        sha256=_sum_of(path, status),
        modified_us=status.st_mtime_ns // 1000,
    )


def _sum_of(path: Path, status: os.stat_result) -> str:
    """The kept checksum, or a new one where there is none of this very file."""
    try:
        kept = msgspec.msgpack.decode(
            (path.parent / SUMS_FOLDER / path.name).read_bytes(), type=Summed
        )
    except (OSError, msgspec.MsgspecError):
        kept = None
    if kept is not None and kept == _summed(kept.sha256, status):
        return kept.sha256
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    _keep_sum(path, found, status)
    return found


def _summed(sha256: str, status: os.stat_result) -> Summed:
    return Summed(sha256, status.st_size, status.st_mtime_ns, status.st_ino)


def _keep_sum(path: Path, sha256: str, status: os.stat_result) -> None:
    """Not synced: it is taken again where it was lost."""
    folder = path.parent / SUMS_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    aside = folder / (UPLOAD_PREFIX + secrets.token_hex(8))
    aside.write_bytes(msgspec.msgpack.encode(_summed(sha256, status)))
    aside.rename(folder / path.name)


def _remove_folder(path: Path) -> None:
    """Remove a folder that holds nothing but our own."""
    sums = path / SUMS_FOLDER
    if sums.is_dir() and not any(sums.iterdir()):
        sums.rmdir()
    path.rmdir()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
