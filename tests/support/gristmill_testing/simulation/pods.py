"""Pods: the real meter beside a worker that is a state machine of integers, on a volume that outlives both."""

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from gristmill_contracts import http
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.http import Assignment
from gristmill_contracts.ids import SessionUid
from gristmill_meter.app import make_app
from gristmill_meter.ledger_client import TIMEOUT_S, LedgerClient
from gristmill_meter.meter import Meter
from gristmill_meter.ports import ExecuteCall
from gristmill_meter.settings import MeterSettings
from gristmill_meter.worker_client import WorkerClient
from gristmill_testing.fake_worker import FakeWorker
from gristmill_testing.simulation.disk import Volume
from gristmill_testing.simulation.loop import Process
from gristmill_testing.simulation.network import SimHttp
from gristmill_testing.simulation.traps import RELEASED

if TYPE_CHECKING:
    from gristmill_testing.simulation.world import World

STATUSES = {"not_found": 404, "conflict": 409, "invalid_request": 400}


class SimFolder:
    """Stands in for `AssignmentsFolder`: the folder's name leads to what the world assigns."""

    assigned: dict[str, dict[SessionUid, Assignment]] = {}  # noqa: RUF012 - one for the run that is on

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def scan(self) -> dict[SessionUid, Assignment]:
        return dict(self.assigned.get(self.folder, {}))


class Pod:
    """One attempt: where it runs, and its two processes. Embedded: the one machine, with all sessions."""

    def __init__(self, world: "World", name: str, volume: Volume, settings: MeterSettings) -> None:
        self.world = world
        self.name = name
        self.volume = volume
        self.folder = f"/assignments/{name}"
        self.settings = settings.model_copy(update={"assignments_dir": Path(self.folder)})
        self.meter_process: Process | None = None
        self.worker_process: Process | None = None
        self.meter: Meter | None = None
        self.lives = 0
        self.boots = 0
        self.over = False
        """Replaced by another attempt: nothing of it is started again."""

    @property
    def meter_host(self) -> str:
        return f"meter-{self.name}"

    @property
    def assigned(self) -> dict[SessionUid, Assignment]:
        return SimFolder.assigned.setdefault(self.folder, {})

    # --- meter -----------------------------------------------------------------------------------

    def start_meter(self) -> None:
        self.lives += 1
        # One host for both processes: a partition cuts both off, and nothing comes between them.
        process = Process(self.world.loop, f"meter-{self.name}.{self.lives}", self.name)
        self.meter_process = process
        process.spawn(self._run_meter(process), "meter")

    async def _run_meter(self, process: Process) -> None:
        world = self.world
        worker = WorkerClient("worker")
        alias = {"worker": f"worker-{self.name}"}
        worker.http = cast(Any, SimHttp(world.net, process, aliases=alias, reliable=True))
        ledger = LedgerClient("http://ledger")
        ledger.http = cast(Any, SimHttp(world.net, process, timeout_s=TIMEOUT_S))
        meter = Meter(
            settings=self.settings,
            disk=self.volume.disk,
            worker=worker,
            ledger=ledger,
            registers_first=world.plan.registers_first,
        )
        self.meter = meter
        await meter.start()
        world.net.serve(
            self.meter_host, process, _watched(world, self, make_app(meter, own_lifespan=False))
        )
        while not meter.volume_failed:
            await asyncio.sleep(0.5)
        process.kill()  # As __main__: a meter that cannot write does not go on.
        world.keeper.meter_died(self)

    # --- worker ----------------------------------------------------------------------------------

    def start_worker(self) -> None:
        self.boots += 1
        world = self.world
        process = Process(world.loop, f"worker-{self.name}.{self.boots}", self.name)
        self.worker_process = process
        worker = FakeWorker(
            boot=world.next_boot(),
            snapshots=self.volume.snapshots,
            saved=world.saved,
            runs=world.runs,
            before=lambda _op_id, _operation: asyncio.sleep(world.work_s()),
            before_chunk=lambda _number: asyncio.sleep(world.work_s()),
        )
        world.net.serve(f"worker-{self.name}", process, worker_app(worker))

    def kill(self) -> None:
        for process in (self.meter_process, self.worker_process):
            if process is not None:
                process.kill()


def _watched(world: "World", pod: Pod, app: Any) -> Any:
    """Notes every result that leaves, and the attempt that lets it."""

    async def watch(scope: Any, receive: Any, send: Any) -> None:
        parts = scope["path"].split("/")
        results = scope["method"] == "GET" and len(parts) == 7

        async def sending(message: dict[str, Any]) -> None:
            released = False
            if results and message["type"] == "http.response.body" and message.get("body"):
                released = world.audit.released(pod, parts[3], message["body"])
            await send(message)
            if released:
                world.traps.spring(RELEASED, parts[3])

        await app(scope, receive, sending)

    return watch


def worker_app(worker: FakeWorker) -> Callable[..., Any]:
    """The routes of `contracts.http`, meter -> worker, as an ASGI application."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        parts = scope["path"].split("/")
        try:
            if scope["path"] == "/v1/status":
                await _reply(send, 200, await worker.status())
            elif len(parts) == 5 and parts[4] == "stream":
                await _stream(worker, parts[3], body, receive, send)
            else:
                await _reply(send, 200, await _call(worker, scope["method"], parts, body))
        except GristmillError as error:
            problem = http.Problem(
                code=error.code, message=error.message, retryable=error.retryable
            )
            await _reply(send, STATUSES.get(error.code, 503), problem)

    return app


async def _call(worker: FakeWorker, method: str, parts: list[str], body: bytes) -> object:
    uid, verb = parts[3], parts[4] if len(parts) > 4 else ""
    if method == "PUT":
        return await worker.open_session(uid, msgspec.msgpack.decode(body, type=http.OpenSession))
    if verb == "execute":
        return await worker.execute(uid, msgspec.msgpack.decode(body, type=ExecuteCall))
    if verb == "snapshot":
        return await worker.snapshot(uid)
    await worker.close_session(uid)
    return http.Empty()


async def _stream(worker: FakeWorker, uid: str, body: bytes, receive: Any, send: Any) -> None:
    chunks = worker.stream(uid, msgspec.msgpack.decode(body, type=ExecuteCall))
    leaving = asyncio.ensure_future(receive())
    try:
        begun = False
        async for chunk in chunks:
            if leaving.done():
                return
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            begun = True
            content = msgspec.msgpack.encode(chunk)
            content = struct.pack("<I", len(content)) + content
            await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        leaving.cancel()
        await chunks.aclose()


async def _reply(send: Any, status: int, body: object) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": msgspec.msgpack.encode(body)})
