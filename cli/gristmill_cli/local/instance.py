"""Who runs on a data folder: a lock that ends with its process, and what it says of itself."""

import fcntl
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from gristmill_cli.errors import CommandError, NotRunningError
from gristmill_cli.local.layout import Layout, write_private


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A running `gristmill up`."""

    pid: int
    url: str
    """Where the gateway listens, as clients on this machine reach it."""
    ledger_url: str
    started_us: int
    ready: bool = False

    def as_ready(self) -> "Instance":
        return replace(self, ready=True)


def take_lock(layout: Layout) -> IO[str]:
    """Hold the data folder for as long as the returned file is open. Raises CommandError if taken."""
    file = layout.lock.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        pid = file.read().strip() or "?"
        file.close()
        raise CommandError(
            f"gristmill is already running on {layout.root} (process {pid}); stop it, or give another "
            "--data-dir"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def announce(layout: Layout, instance: Instance) -> None:
    write_private(layout.instance, json.dumps(asdict(instance)).encode())


def is_held(path: Path) -> bool:
    """Whether some process holds the lock."""
    try:
        with path.open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def find_instance(layout: Layout) -> Instance | None:
    """The instance that runs on the folder, once it announced itself."""
    if not is_held(layout.lock):
        return None
    try:
        found = Instance(**json.loads(layout.instance.read_bytes()))
        held_by = int(layout.lock.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    # What an earlier instance left behind is not this one's.
    return found if found.pid == held_by else None


def require_instance(layout: Layout) -> Instance:
    """Raises NotRunningError with what to type."""
    found = find_instance(layout)
    if found is None:
        raise NotRunningError(
            f"gristmill is not running on {layout.root}; start it with `gristmill up --data-dir "
            f"{layout.root}`"
        )
    return found
