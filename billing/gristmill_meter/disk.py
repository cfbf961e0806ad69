"""The port to the volume that holds the logs, and its implementation on a real file system.

Calls block; the log calls them on a thread. Paths are relative to the disk's root. Nothing is durable
before `fsync` of the file, and a new, renamed or removed name not before `fsync_dir` of its folder.
"""

import os
import shutil
from pathlib import Path
from typing import Protocol


class Appender(Protocol):
    """A file open for appending."""

    def write(self, content: bytes) -> None: ...

    def fsync(self) -> None: ...

    def close(self) -> None: ...


class Cell(Protocol):
    """A small file that is written over and over, and never synced: it may lag behind after a crash."""

    def write(self, content: bytes) -> None: ...

    def close(self) -> None: ...


class Disk(Protocol):
    """Errors: OSError, with ENOSPC when the volume is full."""

    def make_dir(self, path: str) -> None:
        """Make a folder and its parents durably; an existing one is fine."""
        ...

    def list(self, path: str) -> list[str]:
        """Names in a folder, sorted; a missing folder is empty."""
        ...

    def open_append(self, path: str) -> Appender: ...

    def open_cell(self, path: str) -> Cell: ...

    def read(self, path: str) -> bytes: ...

    def truncate(self, path: str, size: int) -> None:
        """Cut a file durably."""
        ...

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None:
        """A missing file is fine."""
        ...

    def fsync_dir(self, path: str) -> None: ...

    def free_bytes(self) -> int: ...


class LocalAppender:
    """Appends with unbuffered writes, so that a failed write is seen where it happens."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[os.write(self.descriptor, view) :]

    def fsync(self) -> None:
        os.fdatasync(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


class LocalCell:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def write(self, content: bytes) -> None:
        os.pwrite(self.descriptor, content, 0)

    def close(self) -> None:
        os.close(self.descriptor)


class LocalDisk:
    """A folder of the local file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make_dir(self, path: str) -> None:
        folder = self.root / path
        missing = [part for part in (folder, *folder.parents) if not part.exists()]
        for part in reversed(missing):
            # One by one: `parents=True` would make those above with the umask's rights.
            part.mkdir(mode=0o700, exist_ok=True)
            _fsync_folder(part.parent)

    def list(self, path: str) -> list[str]:
        folder = self.root / path
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def open_append(self, path: str) -> LocalAppender:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return LocalAppender(os.open(self.root / path, flags, 0o600))

    def open_cell(self, path: str) -> LocalCell:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        return LocalCell(os.open(self.root / path, flags, 0o600))

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def truncate(self, path: str, size: int) -> None:
        with (self.root / path).open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())

    def rename(self, source: str, target: str) -> None:
        (self.root / source).rename(self.root / target)

    def remove(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)

    def fsync_dir(self, path: str) -> None:
        _fsync_folder(self.root / path)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
