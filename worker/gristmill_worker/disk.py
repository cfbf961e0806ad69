"""The file operations of snapshots and checkpoints, behind a port: tests drop what was not synced."""

import os
import shutil
from pathlib import Path
from typing import Protocol


class Disk(Protocol):
    """Nothing is durable before its sync: a file's bytes by sync_file, its name by sync_dir."""

    def write(self, path: Path, data: bytes) -> None:
        """Create or replace a file. Raises OSError."""

    def sync_file(self, path: Path) -> None: ...

    def sync_dir(self, path: Path) -> None: ...

    def make_dirs(self, path: Path) -> None:
        """Missing folders on the way to `path`, and it; their names are durable."""

    def rename(self, source: Path, target: Path) -> None:
        """`target` must not exist."""

    def remove_tree(self, path: Path) -> None:
        """No error if there is nothing."""

    def exists(self, path: Path) -> bool: ...

    def read(self, path: Path) -> bytes:
        """Raises FileNotFoundError."""

    def names(self, path: Path) -> list[str]:
        """Entries of a folder, sorted; [] if there is none."""

    def files(self, path: Path) -> list[str]:
        """Files below a folder, relative, sorted."""


class HostDisk:
    """The file system of this machine."""

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def sync_file(self, path: Path) -> None:
        _sync(path, os.O_RDONLY)

    def sync_dir(self, path: Path) -> None:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def make_dirs(self, path: Path) -> None:
        if path.is_dir():
            return
        self.make_dirs(path.parent)
        path.mkdir(exist_ok=True)
        self.sync_dir(path.parent)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        if path.exists():
            shutil.rmtree(path)

    def exists(self, path: Path) -> bool:
        return path.exists()

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def names(self, path: Path) -> list[str]:
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def files(self, path: Path) -> list[str]:
        return sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
