"""The worker's disk in memory: a crash forgets what was not synced, and may happen at any call."""

import threading
from dataclasses import dataclass, field
from pathlib import Path


class Crash(BaseException):
    """The process dies here. No handler of errors may catch it."""


@dataclass(slots=True)
class File:
    content: bytes = b""
    synced: bytes = b""


@dataclass(slots=True)
class Folder:
    live: dict[str, "Entry"] = field(default_factory=dict)
    durable: dict[str, "Entry"] = field(default_factory=dict)


Entry = File | Folder


class LossyDisk:
    """Implements `gristmill_worker.disk.Disk`. `calls_left` counts changing calls until the crash."""

    def __init__(self) -> None:
        self.root = Folder()
        self.calls_left: int | None = None
        self.changes = 0

    def crash(self) -> None:
        """Come back as after a power cut."""
        self.root = _survivor(self.root)
        self.calls_left = None

    def damage(self, path: Path) -> None:
        """Flip a bit of a file."""
        file = self._file(path)
        changed = bytes([file.content[0] ^ 1]) + file.content[1:]
        file.content = file.synced = changed

    # --- the port --------------------------------------------------------------------------------

    def write(self, path: Path, data: bytes) -> None:
        self._change()
        self._folder(path.parent).live[path.name] = File(content=bytes(data))

    def sync_file(self, path: Path) -> None:
        self._change()
        file = self._file(path)
        file.synced = file.content

    def sync_dir(self, path: Path) -> None:
        self._change()
        folder = self._folder(path)
        folder.durable = dict(folder.live)

    def make_dirs(self, path: Path) -> None:
        self._change()
        folder = self.root
        for part in path.parts:
            entry = folder.live.setdefault(part, Folder())
            folder.durable.setdefault(part, entry)
            assert isinstance(entry, Folder), path
            folder = entry

    def rename(self, source: Path, target: Path) -> None:
        self._change()
        assert target.name not in self._folder(target.parent).live, f"{target} exists"
        entry = self._folder(source.parent).live.pop(source.name)
        self._folder(target.parent).live[target.name] = entry

    def remove_tree(self, path: Path) -> None:
        self._change()
        if self.exists(path.parent):
            self._folder(path.parent).live.pop(path.name, None)

    def exists(self, path: Path) -> bool:
        return self._find(path) is not None

    def read(self, path: Path) -> bytes:
        return self._file(path).content

    def names(self, path: Path) -> list[str]:
        found = self._find(path)
        return sorted(found.live) if isinstance(found, Folder) else []

    def files(self, path: Path) -> list[str]:
        names: list[str] = []
        for name, entry in self._folder(path).live.items():
            if isinstance(entry, File):
                names.append(name)
            else:
                names += [f"{name}/{below}" for below in self.files(path / name)]
        return sorted(names)

    # --- inside ----------------------------------------------------------------------------------

    def _change(self) -> None:
        self.changes += 1
        if self.calls_left is not None:
            if self.calls_left == 0:
                raise Crash
            self.calls_left -= 1

    def _find(self, path: Path) -> Entry | None:
        entry: Entry | None = self.root
        for part in path.parts:
            entry = entry.live.get(part) if isinstance(entry, Folder) else None
        return entry

    def _folder(self, path: Path) -> Folder:
        found = self._find(path)
        if not isinstance(found, Folder):
            raise FileNotFoundError(path)
        return found

    def _file(self, path: Path) -> File:
        found = self._find(path)
        if not isinstance(found, File):
            raise FileNotFoundError(path)
        return found


class HeldDisk(LossyDisk):
    """A disk whose writes wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.writing = threading.Event()

    def write(self, path: Path, data: bytes) -> None:
        self.writing.set()
        assert self.go.wait(120)
        super().write(path, data)


def _survivor(folder: Folder) -> Folder:
    kept: dict[str, Entry] = {
        name: File(content=entry.synced, synced=entry.synced)
        if isinstance(entry, File)
        else _survivor(entry)
        for name, entry in folder.durable.items()
    }
    return Folder(live=kept, durable=dict(kept))
