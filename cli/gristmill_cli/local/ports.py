"""Addresses that stay the same over every restart, so that whoever was connected finds its part again."""

import json
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gristmill_cli.errors import CommandError
from gristmill_cli.local.layout import SOCKET_PATH_BYTES_MAX, GroupKey, Layout, write_private

LOOPBACK: Final = "127.0.0.1"
GATEWAY_PORT_DEFAULT: Final = 8450


@dataclass(slots=True)
class Addresses:
    """Recorded in `run/ports.json`. Loaded once by the one supervisor of the folder."""

    layout: Layout
    known: dict[str, Any]  # Any: JSON; ports by process name, and the folder of sockets

    def port(self, process: str) -> int:
        """The port of a process: the recorded one, else a free one that is then recorded."""
        if process not in self.known:
            self.known[process] = free_port()
            self._save()
        return int(self.known[process])

    def record(self, process: str, port: int) -> None:
        self.known[process] = port
        self._save()

    def forget_taken(self) -> None:
        """At start: ports that somebody else took meanwhile are chosen again."""
        for name in [name for name, value in self.known.items() if isinstance(value, int)]:
            if not is_free(LOOPBACK, int(self.known[name])):
                del self.known[name]

    def socket(self, key: GroupKey) -> Path:
        """The worker's socket. Unix socket paths are short: a deep data folder gets one elsewhere."""
        path = self.layout.run / f"worker.{key}.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
            return path
        if "sockets" not in self.known or not Path(self.known["sockets"]).is_dir():
            self.known["sockets"] = tempfile.mkdtemp(prefix="gristmill-")
        sockets = self.known.setdefault("socket_names", {})
        name = sockets.setdefault(str(key), f"w{len(sockets)}.sock")
        self._save()
        return Path(str(self.known["sockets"]), str(name))

    def _save(self) -> None:
        write_private(self.layout.ports, json.dumps(self.known, indent=2).encode())


def load_addresses(layout: Layout) -> Addresses:
    try:
        known = json.loads(layout.ports.read_bytes())
    except FileNotFoundError:
        known = {}
    except ValueError as error:
        raise CommandError(f"{layout.ports} cannot be read: {error}; delete it") from error
    return Addresses(layout, known)


def free_port(host: str = LOOPBACK) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
