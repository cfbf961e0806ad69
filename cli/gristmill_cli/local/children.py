"""Child processes: started, watched, started again, ended in order. Nothing outlives the supervisor."""

import asyncio
import contextlib
import ctypes
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from gristmill_cli.local.programs import Program, child_environment

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG: Final = 1
PAUSE_FIRST_S: Final = 0.5
PAUSE_LAST_S: Final = 15.0
PAUSE_LOOK_S: Final = 0.25
LOG_BYTES_MAX: Final = 64 * 2**20
"""A larger log is put aside as `.1` before the next start."""
READY_POLL_S: Final = 0.05
NOT_STARTED: Final = 127
"""Exit code of a program that could not be started, as a shell gives it."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def restart_pause_s(short_runs: int) -> float:
    """How long to wait after so many runs in a row that never got ready. The first restart is at once."""
    return (
        0.0
        if short_runs <= 1
        else min(PAUSE_LAST_S, PAUSE_FIRST_S * 2.0 ** min(short_runs - 2, 30))
    )


@dataclass(slots=True)
class Child:
    """One program, running or about to run again until `stop`."""

    program: Program
    on_change: Callable[[], None]
    on_exit: Callable[["Child", int], None]
    pause_s: Callable[["Child"], float] = lambda child: restart_pause_s(child.short_runs)
    """How long to wait before the next start, asked again while it waits."""
    jitter: float = field(default_factory=lambda: random.uniform(-1, 1))  # noqa: S311 - no secret
    pid: int | None = None
    ready: bool = False
    restarts: int = 0
    started_us: int = 0
    exit_code: int | None = None
    short_runs: int = 0
    stopping: bool = False
    _process: asyncio.subprocess.Process | None = None
    _task: asyncio.Task[None] | None = None
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_running(), name=self.program.name)

    async def _keep_running(self) -> None:
        while not self.stopping:
            code = await self._run_once()
            was_ready, self.pid, self.ready, self.exit_code = self.ready, None, False, code
            if self.stopping:
                break
            self.short_runs = 0 if was_ready else self.short_runs + 1
            self.restarts += 1
            self.on_exit(self, code)
            logger.warning(
                "child_ended",
                extra={
                    "child": self.program.name,
                    "exit_code": code,
                    "restart_in_s": round(self.pause_s(self), 2),
                },
            )
            self.on_change()
            await self._pause()
        self.on_change()

    async def _pause(self) -> None:
        ended = time.monotonic()
        while not self.stopping and (left := ended + self.pause_s(self) - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), min(left, PAUSE_LOOK_S))

    async def _run_once(self) -> int:
        """Start it and wait for its end. Returns its exit code; -signal if one ended it."""
        try:
            process = self._process = await self._spawn()
        except OSError as error:
            # No memory, no process or no file left just now.
            logger.warning(
                "child_not_started", extra={"child": self.program.name, "error": str(error)}
            )
            return NOT_STARTED
        if self.stopping:
            # Told to end while it was being started.
            process.kill()
        probe = asyncio.create_task(self._watch_ready(process))
        try:
            return await process.wait()
        finally:
            probe.cancel()

    async def _spawn(self) -> asyncio.subprocess.Process:
        parent = os.getpid()

        def tie_to_parent() -> None:
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        self._rotate_log()
        with self.program.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self.program.module,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(self.program, os.environ),
                # A Ctrl-C at the terminal is for the supervisor, which ends its children in order.
                start_new_session=True,
                preexec_fn=tie_to_parent,
            )
        self.pid, self.started_us = process.pid, time.time_ns() // 1000
        logger.info("child_started", extra={"child": self.program.name, "pid": self.pid})
        self.on_change()
        return process

    def _rotate_log(self) -> None:
        path = self.program.log
        if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_name(f"{path.name}.1"))

    async def _watch_ready(self, process: asyncio.subprocess.Process) -> None:
        async with probe_client(self.program) as client:
            while process.returncode is None and not self.ready:
                if await answers_ready(client, self.program.ready_path):
                    self.ready = True
                    logger.info("child_ready", extra={"child": self.program.name})
                    self.on_change()
                await asyncio.sleep(READY_POLL_S)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL once the time is over."""
        self.stopping = True
        self._gone.set()
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
            except TimeoutError:
                logger.warning("child_killed", extra={"child": self.program.name})
                self.kill()
        if self._task is not None:
            await self._task

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def probe_client(program: Program) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=2)
    if program.socket:
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(path=program.socket)
        return aiohttp.ClientSession("http://worker", connector=connector, timeout=timeout)
    host = "127.0.0.1" if program.host in ("", "0.0.0.0", "::") else program.host  # noqa: S104
    return aiohttp.ClientSession(f"http://{host}:{program.port}", timeout=timeout)


async def answers_ready(client: aiohttp.ClientSession, path: str) -> bool:
    try:
        async with client.get(path) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
