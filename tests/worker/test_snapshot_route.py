"""Over the worker's own route, a snapshot holds nobody up but the next snapshot."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gristmill_contracts.http import Execute, OpenSession, Snapshotted
from gristmill_contracts.ids import TenantName
from gristmill_contracts.operations import ForwardBackward
from gristmill_testing.local_runner import datum
from gristmill_testing.lossy_disk import HeldDisk
from gristmill_worker.app import _snapshot
from gristmill_worker.engine import Engine
from gristmill_worker.settings import WorkerSettings

UID = "66666666-6666-6666-6666-666666666666"


@pytest.fixture
def engine(tmp_path: Path, llama_dir: Path) -> Iterator[Engine]:
    settings = WorkerSettings(
        socket=tmp_path / "s", model_dir=llama_dir, artifacts_dir=tmp_path / "a", dtype="float32",
        device="cpu", threads=1,
    )  # fmt: skip
    started = Engine(settings)
    started.start()
    yield started
    started.stop(120)
    assert not started.thread.is_alive()


def call(index: int) -> Execute:
    op = ForwardBackward(loss="cross_entropy", loss_config={}, datums=[datum([5, 6, 7 + index])])
    return Execute(index=index, op_id=f"{UID}/train/{index}", operation=op)


async def test_operations_run_while_a_snapshot_is_written_and_the_next_one_waits(
    engine: Engine,
) -> None:
    while not engine.ready:
        assert not engine.failure
        await asyncio.sleep(0.01)
    disk, opening = HeldDisk(), OpenSession(
        tenant=TenantName("acme"), rank=4, alpha=8, seed=0, state_dir="/state/66"
    )  # fmt: skip

    async def run(work: Any) -> Any:
        return await asyncio.wrap_future(engine.submit(work))

    async def snapshot() -> Snapshotted:
        state = SimpleNamespace(engine=engine, one_snapshot=turn)
        request: Any = SimpleNamespace(app=SimpleNamespace(state=state))
        answer = await _snapshot(UID, request)
        return msgspec.msgpack.decode(bytes(answer.body), type=Snapshotted)

    turn = asyncio.Lock()
    await run(lambda runner: setattr(runner, "disk", disk))
    await run(lambda runner: runner.open(UID, opening))
    await run(lambda runner: runner.execute(UID, call(1)))
    first = asyncio.create_task(snapshot())
    assert await asyncio.to_thread(disk.writing.wait, 120)
    second = asyncio.create_task(snapshot())
    for index in (2, 3):
        executed = await run(lambda runner, index=index: runner.execute(UID, call(index)))
        assert executed.error is None
    assert not first.done()
    assert not second.done()

    disk.go.set()
    assert (await first).applied == 1
    assert (await second).applied == 3  # it was not even copied before its turn
    disk.crash()
    assert disk.names(Path("/state/66/snapshots")) == ["1", "3"]
