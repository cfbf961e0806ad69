"""The power fails at every named point of an operation's way; the run goes on as if it had not.

A window is recognised at the `Disk` port (or at the worker) by what is being written. Unsynced bytes are
dropped. After the restart the client goes on as clients do: it sends again what was not answered. Then
every result equals the undisturbed run's, and the ledger holds what the client received, once.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from gristmill_contracts import limits
from gristmill_contracts import operations as ops
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.http import OperationView
from gristmill_contracts.usage import Counts
from gristmill_testing.meter_world import (
    World,
    checkpoint,
    forward,
    forward_backward,
    load_state,
    make_submit,
    optim_step,
    sample,
    save_state,
)

STEP: Final = 3
CHUNK: Final = 6

FRAME = re.compile(rb"\xa4type[\xa0-\xbf]([a-z_]+)")

WINDOWS: Final = (
    "blob of an INTENT before the INTENT",
    "INTENT unsynced",
    "after INTENT",
    "dispatched",
    "executed, unanswered",
    "RESULT unsynced",
    "RESULT unreleased",
    "stepped before snapshot",
    "mid-snapshot",
    "snapshot unsynced in the log",
    "mid-replay",
    "CLAIM unsynced",
    "CLAIM unreleased",
    "saved, unregistered",
)
STREAM_WINDOWS: Final = (
    "mid-stream, PROGRESS unsynced",
    "mid-stream, PROGRESS unflushed",
    "stream ended, RESULT unsynced",
    "stream ended, RESULT unreleased",
)

PROMISED: Final = {
    "after INTENT": {"after INTENT"},
    "dispatched": {"dispatched"},
    "RESULT unsynced": {"RESULT unsynced", "stream ended, RESULT unsynced"},
    "RESULT unreleased": {"RESULT unreleased", "stream ended, RESULT unreleased"},
    "stepped before snapshot": {"stepped before snapshot"},
    "mid-snapshot": {"mid-snapshot"},
    "mid-replay": {"mid-replay"},
    "mid-stream": {"mid-stream, PROGRESS unsynced", "mid-stream, PROGRESS unflushed"},
}
"""Every window that must be survived, and the places of this module that cut the power in it."""

GROUPS: Final[list[list[ops.Operation]]] = [
    [forward_backward(5, 1), forward_backward(6000, 2), optim_step()],
    [sample(prompt=6, tokens=8, samples=2, seed=11)],
    [save_state(), forward(4, 3), forward_backward(7, 4), optim_step()],
    [sample(prompt=3, tokens=5, seed=12)],
    [load_state(checkpoint("saved")), forward_backward(3, 5), optim_step()],
]
"""What the client does: each group is submitted at once, then fetched in order."""


@pytest.fixture(scope="module")
def visited(request: pytest.FixtureRequest) -> Iterator[set[str]]:
    """Every window that a test really hit. One that none did fails the module."""
    hit: set[str] = set()
    yield hit
    here = [i for i in request.session.items if i.path == request.path]
    wanted = {
        i.callspec.params["window"] for i in here if "window" in getattr(i, "fixturenames", [])
    }
    missed = wanted - hit
    assert not missed, f"windows that no test visited: {sorted(missed)}"


class Trap:
    """Turns the power off once, at the given window."""

    def __init__(self, world: World, window: str) -> None:
        self.world = world
        self.window = window
        self.sprung = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.written: list[str] = []
        self.count = 0

    def set(self) -> None:
        disk, worker = self.world.disk, self.world.worker
        disk.hook = self._on_disk
        disk.after_fsync = self._after_fsync
        worker.before = self._before_run
        worker.after = self._after_run
        worker.on_replay = self._on_replay
        worker.on_snapshot = self._on_snapshot
        if self.window == "saved, unregistered":
            self.world.ledger.on_checkpoint = self._spring

    def _spring(self) -> None:
        if not self.sprung.is_set():
            self.world.disk.freeze()
            self.loop.call_soon_threadsafe(self.sprung.set)

    def _on_disk(self, verb: str, path: str, content: bytes) -> None:
        if verb == "write" and path.endswith(".seg"):
            self.written = [tag.decode() for tag in FRAME.findall(content)]
        if verb == "fsync_dir" and path.endswith("blobs") and self.window.startswith("blob"):
            self._spring()
        if verb != "fsync" or not path.endswith(".seg"):
            return
        expected = {
            "INTENT unsynced": ("intent", 3),
            "RESULT unsynced": ("result", 3),
            "CLAIM unsynced": ("claim", 1),
            "snapshot unsynced in the log": ("snapshot", 1),
            "mid-stream, PROGRESS unsynced": ("progress", 2),
            "stream ended, RESULT unsynced": ("result", 1),
        }
        self._count(expected)

    def _after_fsync(self, path: str) -> None:
        expected = {
            "after INTENT": ("intent", 3),
            "RESULT unreleased": ("result", 3),
            "stepped before snapshot": ("result", STEP),
            "CLAIM unreleased": ("claim", 1),
            "mid-stream, PROGRESS unflushed": ("progress", 2),
            "stream ended, RESULT unreleased": ("result", 1),
        }
        if path.endswith(".seg"):
            self._count(expected)

    def _count(self, expected: dict[str, tuple[str, int]]) -> None:
        """Spring at the nth frame of a kind."""
        kind, nth = expected.get(self.window, ("", 0))
        self.count += self.written.count(kind)
        if kind and kind in self.written and self.count >= nth:
            self._spring()

    def _before_run(self, op_id: str, operation: ops.Operation) -> object:
        if self.window == "dispatched" and op_id.endswith(f"train/{CHUNK}"):
            self._spring()
        return None

    def _after_run(self, op_id: str, operation: ops.Operation) -> object:
        if self.window == "executed, unanswered" and op_id.endswith(f"train/{STEP}"):
            self._spring()
        return None

    def _on_snapshot(self) -> object:
        if self.window != "mid-snapshot" or self.sprung.is_set():
            return None
        self._spring()
        return self.world.next_life(self.world.life)

    def _on_replay(self, op_id: str) -> None:
        if self.window == "mid-replay" and op_id.endswith("train/2"):
            self._spring()


class Client:
    """Sends again what was not answered, as the official SDKs do, until everything is fetched."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.views: list[OperationView] = []

    async def run(self) -> None:
        number = 0
        for group in GROUPS:
            names: list[tuple[str, int]] = []
            for operation in group:
                train = not isinstance(operation, ops.SampleOperation)
                number += train
                names.append(await self._submit(number if train else None, self._bound(operation)))
            for stream, n in names:
                self.views.append(await self._fetch(stream, n))

    def _bound(self, operation: ops.Operation) -> ops.Operation:
        """A load names the checkpoint that the run has saved."""
        if not isinstance(operation, ops.LoadState):
            return operation
        saved = next(v.result for v in self.views if isinstance(v.result, ops.SaveResult))
        return load_state(ops.CheckpointRef(id=saved.checkpoint_id, path=saved.path, name="saved"))

    async def _submit(self, number: int | None, operation: ops.Operation) -> tuple[str, int]:
        while True:
            life = self.world.life
            try:
                answer = await self.world.submit(number, operation)
            except (GristmillError, TimeoutError):
                await self.world.next_life(life)
            else:
                return answer.stream, answer.number

    async def _fetch(self, stream: str, number: int) -> OperationView:
        while True:
            life = self.world.life
            try:
                view = await self.world.poll("train" if stream == "train" else "log", number)
            except (GristmillError, TimeoutError):
                await self.world.next_life(life)
                continue
            if view.state not in ("Pending", "InProgress"):
                return view
            try:
                over = self.world.session.draining
            except GristmillError:
                over = True  # The next life has begun, and has not read the log yet.
            if over:
                await self.world.next_life(life)


def told(views: list[OperationView]) -> list[bytes]:
    """All that a client sees of its operations, but the meter's own numbers of keyless ones."""
    seen = []
    for view in views:
        assert view.state == "Completed", view
        number = view.number if view.stream == "train" else 0
        seen.append(msgspec.msgpack.encode((view.stream, number, view.result, view.counts)))
    return seen


def received(views: list[OperationView]) -> Counts:
    total = Counts()
    for view in views:
        total += view.counts or Counts()
    return total


async def end_session(world: World) -> None:
    world.assign(desired="stop")
    await world.until(lambda: world.session.service == "Closed", "the session was closed")


@pytest.fixture
async def undisturbed(tmp_path: Path) -> list[bytes]:
    world = await World(tmp_path / "undisturbed").start()
    client = Client(world)
    await client.run()
    await end_session(world)
    assert world.ledger.billed() == received(client.views)
    await world.close()
    return told(client.views)


def test_no_promised_window_is_left_out() -> None:
    """The fixture `visited` then sees to it that each was really hit."""
    assert set().union(*PROMISED.values()) <= {*WINDOWS, *STREAM_WINDOWS}


@pytest.mark.parametrize("worker_dies", [False, True], ids=["worker lives", "worker dies"])
@pytest.mark.parametrize("window", WINDOWS)
async def test_f38_a_run_survives_the_window(
    window: str,
    worker_dies: bool,
    undisturbed: list[bytes],
    make_world: Callable[..., World],
    visited: set[str],
) -> None:
    snapshots = window in ("mid-snapshot", "snapshot unsynced in the log")
    world = await make_world(**({"snapshot_replay_s": 0.002} if snapshots else {})).start()
    trap = Trap(world, window)
    first = Trap(world, "stepped before snapshot") if window == "mid-replay" else trap
    first.set()
    client = Client(world)
    running = asyncio.create_task(client.run())
    async with asyncio.timeout(60):
        await first.sprung.wait()
        if window == "mid-replay":
            trap.set()
            await world.crash(worker=True)
            await trap.sprung.wait()
        visited.add(window)
        await world.crash(worker=worker_dies or window == "stepped before snapshot")
        await running
    await end_session(world)
    assert told(client.views) == undisturbed
    assert world.ledger.billed() == received(client.views)
    billed = [(e.stream, e.number) for e in world.ledger.events if e.kind == "usage"]
    assert len(billed) == len(set(billed)) == len(client.views)


@pytest.mark.parametrize("window", STREAM_WINDOWS)
async def test_a_stream_is_billed_for_what_left_and_at_most_one_frame_more(
    window: str, make_world: Callable[..., World], visited: set[str]
) -> None:
    world = await make_world().start()
    trap = Trap(world, window)
    trap.set()
    tokens = 0

    async def read() -> None:
        nonlocal tokens
        submit = make_submit(None, sample(prompt=5, tokens=16))
        source = await world.driver.stream(submit, msgspec.msgpack.encode(submit.operation))
        async for chunk in source:
            tokens += len(chunk.tokens)

    reading = asyncio.create_task(read())
    async with asyncio.timeout(60):
        await trap.sprung.wait()
    visited.add(window)
    await world.crash()
    reading.cancel()
    await asyncio.wait([reading])
    await world.settled()
    (event,) = world.ledger.events
    assert event.outcome == ("completed" if "ended, RESULT unreleased" in window else "aborted")
    assert event.counts is not None
    assert event.counts.prefill == 5
    assert tokens <= event.counts.sample <= tokens + limits.STREAM_FLUSH_TOKENS
