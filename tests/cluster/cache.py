"""Results of slow steps, kept outside the repository by a hash of what they are made from."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

UNUSED_DAYS_MAX = 14


def root() -> Path:
    """$GRISTMILL_CLUSTER_CACHE, else gristmill/cluster in the user's cache folder."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("GRISTMILL_CLUSTER_CACHE", home / "gristmill/cluster")).absolute()


def key_of(files: Iterable[Path], *words: str) -> str:
    """A hash of the files' names and content and of the words."""
    total = hashlib.sha256("\0".join(words).encode())
    for path in sorted(files):
        total.update(f"\0{path.name}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:20]


def made(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills, made once; several processes that want it wait for the first.

    `make` works in a folder of its own that takes the name at the end: what is there is complete.
    """
    folder = root() / f"{kind}-{key}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (root() / f"{kind}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                new = folder.with_name(folder.name + ".new")
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir()
                make(new)
                new.rename(folder)
    os.utime(folder)
    return folder


def prune(days: float = UNUSED_DAYS_MAX) -> list[Path]:
    """Remove what nobody asked for in so many days; returns what went."""
    oldest = time.time() - days * 86400
    gone = [path for path in root().glob("*-*") if path.is_dir() and path.stat().st_mtime < oldest]
    for path in gone:
        shutil.rmtree(path)
    return gone
