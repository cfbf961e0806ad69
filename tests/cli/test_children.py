"""Children are started again when they end, and ended when they are told to. With real processes."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gristmill_cli.local.children import LOG_BYTES_MAX, Child, restart_pause_s
from gristmill_cli.local.ports import LOOPBACK, free_port
from gristmill_cli.local.programs import Program

SERVER = """
import os, signal
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass
if os.environ["MODE"] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["MODE"] == "fails":
    raise SystemExit(3)
print("serving", flush=True)
HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@dataclass(slots=True)
class Watched:
    """A child with a note of all that it told."""

    child: Child
    exits: list[int]
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds a package that stands in for the real gateway in child processes alone."""
    package = tmp_path / "gristmill_gateway"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(SERVER)
    return tmp_path


def watch(folder: Path, mode: str = "serves") -> Watched:
    port = free_port()
    settings = (("PYTHONPATH", str(folder)), ("MODE", mode), ("PORT", str(port)))
    program = Program(
        name="gateway",
        part="gateway",
        environment=settings,
        log=folder / "gateway.log",
        host=LOOPBACK,
        port=port,
    )
    exits: list[int] = []
    changed = asyncio.Event()
    child = Child(
        program=program, on_change=changed.set, on_exit=lambda _, code: exits.append(code)
    )
    return Watched(child=child, exits=exits, changed=changed)


def test_the_first_restart_is_at_once_and_pauses_grow_to_a_bound() -> None:
    pauses = [restart_pause_s(runs) for runs in range(10)]
    assert pauses[:4] == [0, 0, 0.5, 1]
    assert pauses == sorted(pauses)
    assert restart_pause_s(10_000) == pauses[-1] == 15


async def test_a_killed_child_runs_again_on_the_same_port(folder: Path) -> None:
    watched = watch(folder)
    child = watched.child
    child.start()
    await watched.until(lambda: child.ready)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await watched.until(lambda: child.ready and child.pid != first)
    assert (watched.exits, child.restarts, child.short_runs) == ([-signal.SIGKILL], 1, 0)
    await child.stop(timeout_s=10)
    assert child.pid is None
    assert (folder / "gateway.log").read_text().count("serving") == 2


async def test_a_stopped_child_is_not_started_again(folder: Path) -> None:
    watched = watch(folder)
    watched.child.start()
    await watched.until(lambda: watched.child.ready)
    await watched.child.stop(timeout_s=10)
    assert (watched.exits, watched.child.restarts, watched.child.ready) == ([], 0, False)


async def test_a_child_that_does_not_listen_to_sigterm_is_killed(folder: Path) -> None:
    watched = watch(folder, "stubborn")
    watched.child.start()
    await watched.until(lambda: watched.child.ready)
    pid = watched.child.pid
    assert pid is not None
    await watched.child.stop(timeout_s=0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_runs_that_never_got_ready_are_counted(folder: Path) -> None:
    watched = watch(folder, "fails")
    watched.child.start()
    await watched.until(lambda: watched.child.short_runs >= 2)
    assert watched.exits[:2] == [3, 3]
    assert watched.child.exit_code == 3
    await watched.child.stop(timeout_s=10)
    assert len(watched.exits) == watched.child.restarts


async def test_a_stop_during_a_pause_does_not_wait_for_its_end(folder: Path) -> None:
    watched = watch(folder, "fails")
    watched.child.start()
    await watched.until(lambda: watched.child.short_runs >= 3)
    async with asyncio.timeout(5):
        await watched.child.stop(timeout_s=10)


async def test_an_interrupt_at_the_terminal_does_not_reach_the_child(folder: Path) -> None:
    watched = watch(folder)
    watched.child.start()
    await watched.until(lambda: watched.child.ready)
    pid = watched.child.pid
    assert pid is not None
    assert os.getsid(pid) == pid != os.getsid(0)
    await watched.child.stop(timeout_s=10)


async def test_a_child_stopped_while_it_is_being_started_ends(folder: Path) -> None:
    watched = watch(folder, "stubborn")
    watched.child.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await watched.child.stop(timeout_s=10)
    assert watched.child.pid is None


async def test_a_pause_ends_when_its_reason_is_gone(folder: Path) -> None:
    watched = watch(folder)
    pauses = [3600.0]
    watched.child.pause_s = lambda _: pauses[-1]
    watched.child.start()
    await watched.until(lambda: watched.child.ready)
    first = watched.child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await watched.until(lambda: watched.child.restarts == 1)
    assert watched.child.pid is None
    pauses.append(0.0)
    await watched.until(lambda: watched.child.ready)
    await watched.child.stop(timeout_s=10)


async def test_a_log_that_grew_too_large_is_put_aside(folder: Path) -> None:
    watched = watch(folder)
    log = watched.child.program.log
    with log.open("wb") as file:
        file.truncate(LOG_BYTES_MAX + 1)
    watched.child.start()
    await watched.until(lambda: watched.child.ready)
    await watched.child.stop(timeout_s=10)
    assert log.stat().st_size < 10_000
    assert log.with_name("gateway.log.1").stat().st_size == LOG_BYTES_MAX + 1
