"""The folder of checkpoints that meter and worker share. Blocking: use a thread.

The worker runs what a tenant sends it and writes here with its own rights, so nothing in this folder is
believed: every step of a path is opened by itself and never through a link. Otherwise a link from here
to our secret, or to a log, would have us read it out or write over it.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.errors import OperationFailedError

MANIFEST: Final = "manifest.json"
MANIFEST_BYTES_MAX: Final = 4 * 2**20
ASIDE: Final = ".fetching-"
FOLDER_MODE: Final = 0o770
FILE_MODE: Final = 0o660
"""For the group that both belong to: the worker replaces folders, the meter reads and fetches."""


class FileFacts(msgspec.Struct, kw_only=True):
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, kw_only=True):
    """What a checkpoint's manifest says of its files, by their path below its folder."""

    files: dict[str, FileFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFolder:
    root: Path

    def holds(self, parts: Sequence[str]) -> bool:
        """Whether the checkpoint in the folder `parts` is there; its manifest is written last."""
        try:
            with self._folder(parts) as folder:
                return stat.S_ISREG(os.stat(MANIFEST, dir_fd=folder, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def manifest(self, parts: Sequence[str], sha256: str) -> Manifest:
        """The manifest of a finished checkpoint. Raises OperationFailedError where it is another one."""
        name = "/".join(parts)
        try:
            with self.read([*parts, MANIFEST]) as file:
                content = file.read(MANIFEST_BYTES_MAX + 1)
        except OSError as error:
            raise OperationFailedError(
                f"checkpoint {name} has no readable manifest: {error.strerror}; save it again"
            ) from error
        if len(content) > MANIFEST_BYTES_MAX or hashlib.sha256(content).hexdigest() != sha256:
            raise OperationFailedError(
                f"checkpoint {name} has another manifest than the worker told; save it again"
            )
        try:
            manifest = msgspec.json.decode(content, type=Manifest)
        except msgspec.MsgspecError as error:
            raise OperationFailedError(f"checkpoint {name}: manifest: {error}") from error
        bad = [path for path in manifest.files if not is_path(path)]
        if bad or len(manifest.files) > limits.ARTIFACT_FILES_MAX:
            raise OperationFailedError(
                f"checkpoint {name} names {len(manifest.files)} files, at most "
                f"{limits.ARTIFACT_FILES_MAX} may be, and {bad[:3]} cannot be"
            )
        return manifest

    def read(self, parts: Sequence[str]) -> BinaryIO:
        """A file, to be closed by the caller. Raises OSError, for a link or a pipe too."""
        with self._folder(parts[:-1]) as folder:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(parts[-1], flags, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{parts[-1]} is no file")
        return os.fdopen(descriptor, "rb")

    def begin(self, parts: Sequence[str]) -> None:
        """Make an empty folder to fetch the checkpoint `parts` into."""
        with self._folder(parts[:-1], make=True) as parent:
            _remove(parent, ASIDE + parts[-1])

    def write(self, parts: Sequence[str], path: str) -> BinaryIO:
        """A new file of the checkpoint that is being fetched, to be closed by the caller."""
        *folders, name = path.split("/")
        aside = [*parts[:-1], ASIDE + parts[-1], *folders]
        with self._folder(aside, make=True) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, FILE_MODE, dir_fd=folder)
        os.fchmod(descriptor, FILE_MODE)
        return os.fdopen(descriptor, "wb")

    def finish(self, parts: Sequence[str]) -> None:
        """Put what was fetched in its place, unless something is there meanwhile."""
        with self._folder(parts[:-1]) as parent:
            aside = ASIDE + parts[-1]
            with suppress(OSError):
                os.rename(aside, parts[-1], src_dir_fd=parent, dst_dir_fd=parent)
            _remove(parent, aside)
            os.fsync(parent)

    def abandon(self, parts: Sequence[str]) -> None:
        """Remove what was fetched so far."""
        with suppress(OSError), self._folder(parts[:-1]) as parent:
            _remove(parent, ASIDE + parts[-1])

    @contextmanager
    def _folder(self, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder below the root, opened step by step."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                if make:
                    _make(folder, part)
                below = os.open(part, flags, dir_fd=folder)
                os.close(folder)
                folder = below
            yield folder
        finally:
            os.close(folder)


def is_path(path: str) -> bool:
    """Whether it is a path below a folder, of names that anybody may have."""
    return all(name and name[0] != "." and name.isprintable() for name in path.split("/"))


def _make(folder: int, name: str) -> None:
    try:
        os.mkdir(name, FOLDER_MODE, dir_fd=folder)
    except FileExistsError:
        return
    # The umask has taken the group's rights away.
    os.chmod(name, os.stat(name, dir_fd=folder).st_mode | FOLDER_MODE, dir_fd=folder)


def _remove(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(name, dir_fd=folder)
