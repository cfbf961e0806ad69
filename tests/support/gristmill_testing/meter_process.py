"""A meter as a real process, between a fake worker and a fake ledger that speak HTTP."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from gristmill_contracts import operations as ops
from gristmill_contracts.http import OperationView, Submitted
from gristmill_testing.fake_ledger import FakeLedger
from gristmill_testing.fake_worker import FakeWorker
from gristmill_testing.fake_worker_server import ledger_app, worker_app
from gristmill_testing.meter_world import UID, World, make_submit

BASE = f"/v1/sessions/{UID}"


@dataclass(slots=True)
class Process:
    """A meter process and what it talks to."""

    folder: Path
    port: int
    ledger_port: int
    worker: FakeWorker = field(default_factory=FakeWorker)
    ledger: FakeLedger = field(default_factory=FakeLedger)
    child: subprocess.Popen[bytes] | None = None
    settings: dict[str, str] = field(default_factory=dict)
    """More settings of the meter, without their prefix."""
    attempt: str = "1"
    secret: str = "s3cret"

    @property
    def environment(self) -> dict[str, str]:
        settings = {
            "PORT": str(self.port),
            "DATA_DIR": str(self.folder / "log"),
            "ASSIGNMENTS_DIR": str(self.folder / "w" / "assignments"),
            "WORKER_SOCKET": str(self.folder / "w.sock"),
            "LEDGER_URL": f"http://127.0.0.1:{self.ledger_port}",
            "HEARTBEAT_S": "0.2",
            "SCAN_S": "0.05",
            "RETRY_LAST_S": "0.2",
        }
        return os.environ | {
            f"GRISTMILL_METER_{name}": value for name, value in (settings | self.settings).items()
        }

    async def start(self, until: str = "/readyz") -> None:
        """Start it, and wait until it answers 200 at `until`."""
        with (self.folder / "stderr").open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "gristmill_meter"], env=self.environment, stderr=log
            )
        await self.answers(until, 200)

    async def answers(self, path: str, status: int) -> bytes:
        """Wait for that answer, and give its body."""
        async with asyncio.timeout(20), aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(f"http://127.0.0.1:{self.port}{path}") as answer:
                        if answer.status == status:
                            return await answer.read()
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.02)

    async def drain(self, *arguments: str) -> tuple[int, str]:
        """Run the drain of its volume: its status, and what it logged."""
        command = [sys.executable, "-m", "gristmill_meter", "drain", *arguments]
        done = await asyncio.to_thread(
            subprocess.run, command, env=self.environment, capture_output=True, text=True
        )
        return done.returncode, done.stderr

    async def stop(self, how: int) -> int:
        assert self.child is not None
        self.child.send_signal(how)
        return await asyncio.to_thread(self.child.wait, 20)

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self.secret}", "X-Gristmill-Attempt": self.attempt}
        content = None if body is None else msgspec.msgpack.encode(body)
        async with (
            aiohttp.ClientSession() as http,
            http.request(
                method, f"http://127.0.0.1:{self.port}{path}", data=content, headers=headers
            ) as answer,
        ):
            return answer.status, await answer.read()

    async def submit(self, number: int | None, operation: ops.Operation) -> Submitted:
        """As a gateway does it: again, while the session first takes what waits in its inbox."""
        message = make_submit(number, operation)
        async with asyncio.timeout(20):
            while True:
                status, body = await self.call("POST", f"{BASE}/operations", message)
                if status != 503:
                    break
                await asyncio.sleep(0.02)
        assert status == 200, body
        return msgspec.msgpack.decode(body, type=Submitted)

    async def poll(self, stream: str, number: int) -> OperationView:
        status, body = await self.call("GET", f"{BASE}/operations/{stream}/{number}?wait_s=15")
        assert status == 200, body
        return msgspec.msgpack.decode(body, type=OperationView)

    async def acknowledged(self, events: int) -> None:
        async with asyncio.timeout(10):
            while len(self.ledger.events) < events:
                await asyncio.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def served(
    folder: Path, *, until: str = "/readyz", worker: bool = True, **settings: str
) -> AsyncIterator[Process]:
    """A meter that serves UID, for the length of the block; `worker`: whether it has one."""
    World(folder / "w").assign()
    process = Process(folder=folder, port=free_port(), ledger_port=free_port(), settings=settings)
    runners = [web.AppRunner(worker_app(process.worker)), web.AppRunner(ledger_app(process.ledger))]
    for runner in runners:
        await runner.setup()
    if worker:
        await web.UnixSite(runners[0], str(folder / "w.sock")).start()
    await web.TCPSite(runners[1], "127.0.0.1", process.ledger_port).start()
    try:
        await process.start(until)
        yield process
    finally:
        if process.child is not None and process.child.poll() is None:
            process.child.kill()
            process.child.wait()
        for runner in runners:
            await runner.cleanup()
