"""A disk in memory that forgets what was not synced, and fails or fills up when told to.

`crash()` gives the disk as the next process would find it. A "window" is a point in the meter's
work, recognised by the frames that are being written; `crash_at` names one.
"""

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import RLock


@dataclass(slots=True)
class FakeFile:
    """What a reader sees, and how much of it would survive."""

    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


class FakeDiskAppender:
    def __init__(self, disk: "FakeDisk", path: str, file: FakeFile) -> None:
        self.disk = disk
        self.path = path
        self.file = file

    def write(self, content: bytes) -> None:
        with self.disk.lock:
            self.disk.before("write", self.path, content)
            if len(content) > self.disk.free:
                part = content[: self.disk.free]
                self.file.content += part
                self.disk.free = 0
                raise OSError(errno.ENOSPC, "no space left on the fake disk", self.path)
            self.disk.free -= len(content)
            self.file.content += content

    def fsync(self) -> None:
        with self.disk.lock:
            self.disk.before("fsync", self.path, b"")
            self.file.durable = bytes(self.file.content)
            self.disk.after("fsync", self.path)

    def close(self) -> None:
        pass


class FakeCell:
    """What it says reaches the disk by and by: the write before the last has arrived."""

    def __init__(self, disk: "FakeDisk", file: FakeFile) -> None:
        self.disk = disk
        self.file = file

    def write(self, content: bytes) -> None:
        with self.disk.lock:
            if self.disk.frozen is None:
                self.file.durable = bytes(self.file.content)
                self.file.content = bytearray(content)

    def close(self) -> None:
        pass


class FakeDisk:
    """Implements `gristmill_meter.disk.Disk`. Folders are implied by paths, names durable by fsync_dir.

    `fail_fsyncs`: how many of the next fsyncs of log segments fail. `hook(verb, path, content)` runs
    before each call and may raise OSError or call `freeze`. `after_fsync(path)` runs when one is done.
    """

    def __init__(self, free: int = 2**40) -> None:
        self.files: dict[str, FakeFile] = {}
        self.durable_names: dict[str, FakeFile] = {}
        self.free = free
        self.fail_fsyncs = 0
        self.frozen: FakeDisk | None = None
        self.hook: Callable[[str, str, bytes], None] = lambda verb, path, content: None
        self.after_fsync: Callable[[str], None] = lambda path: None
        self.calls: list[tuple[str, str]] = []
        self.lock = RLock()

    # --- the port --------------------------------------------------------------------------------

    def make_dir(self, path: str) -> None:
        self.before("make_dir", path, b"")

    def list(self, path: str) -> list[str]:
        with self.lock:
            prefix = path + "/" if path else ""
            below = (name[len(prefix) :] for name in self.files if name.startswith(prefix))
            return sorted({name.partition("/")[0] for name in below})

    def open_append(self, path: str) -> FakeDiskAppender:
        with self.lock:
            self.before("open", path, b"")
            file = self.files.setdefault(path, FakeFile())
            return FakeDiskAppender(self, path, file)

    def open_cell(self, path: str) -> "FakeCell":
        with self.lock:
            self.before("open", path, b"")
            return FakeCell(self, self.files.setdefault(path, FakeFile()))

    def read(self, path: str) -> bytes:
        with self.lock:
            if path not in self.files:
                raise FileNotFoundError(errno.ENOENT, "no such fake file", path)
            return bytes(self.files[path].content)

    def truncate(self, path: str, size: int) -> None:
        with self.lock:
            self.before("truncate", path, b"")
            file = self.files[path]
            del file.content[size:]
            file.durable = bytes(file.content)

    def rename(self, source: str, target: str) -> None:
        with self.lock:
            self.before("rename", target, b"")
            self.files[target] = self.files.pop(source)

    def remove(self, path: str) -> None:
        with self.lock:
            self.before("remove", path, b"")
            file = self.files.pop(path, None)
            if file is not None:
                self.free += len(file.content)

    def fsync_dir(self, path: str) -> None:
        with self.lock:
            self.before("fsync_dir", path, b"")
            prefix = path + "/"
            here = {n for n in {*self.files, *self.durable_names} if n.startswith(prefix)}
            for name in sorted(here):  # Their order is the same in every process.
                if name in self.files:
                    self.durable_names[name] = self.files[name]
                else:
                    del self.durable_names[name]

    def free_bytes(self) -> int:
        return self.free

    # --- faults ----------------------------------------------------------------------------------

    def before(self, verb: str, path: str, content: bytes) -> None:
        self.calls.append((verb, path))
        self.hook(verb, path, content)
        if self.frozen is not None:
            raise OSError(errno.EIO, "the fake machine is off", path)
        if verb == "fsync" and self.fail_fsyncs > 0 and path.endswith(".seg"):
            self.fail_fsyncs -= 1
            raise OSError(errno.EIO, "fsync failed", path)

    def after(self, verb: str, path: str) -> None:
        if verb == "fsync":
            self.after_fsync(path)

    def freeze(self) -> None:
        """The power fails now: keep the disk as it is, and let no later call reach it."""
        with self.lock:
            if self.frozen is None:
                self.frozen = self._survivor(lambda file: file.durable)

    def crash(self, torn: random.Random | None = None) -> "FakeDisk":
        """The disk that the next process finds: synced bytes, and with `torn` a random part of the rest."""
        with self.lock:
            if self.frozen is not None:
                return self.frozen
            if torn is None:
                return self._survivor(lambda file: file.durable)
            return self._survivor(lambda file: _torn(file, torn))

    def killed(self) -> "FakeDisk":
        """As after kill -9 of the process alone: the page cache survives, synced or not."""
        with self.lock:
            disk = FakeDisk(self.free)
            for name, file in self.files.items():
                disk.files[name] = FakeFile(bytearray(file.content), file.durable)
                if name in self.durable_names:
                    disk.durable_names[name] = disk.files[name]
            return disk

    def _survivor(self, survives: "Callable[[FakeFile], bytes]") -> "FakeDisk":
        disk = FakeDisk(self.free)
        for name, file in self.durable_names.items():
            content = survives(file)
            disk.files[name] = disk.durable_names[name] = FakeFile(bytearray(content), content)
        return disk


def _torn(file: FakeFile, chance: random.Random) -> bytes:
    """The durable part, some of what followed, and perhaps a flipped bit in that."""
    extra = bytearray(file.content[len(file.durable) :])
    del extra[chance.randint(0, len(extra)) :]
    if extra and chance.random() < 0.5:
        extra[chance.randrange(len(extra))] ^= 1 << chance.randrange(8)
    return file.durable + bytes(extra)
