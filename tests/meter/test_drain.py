"""`drain`: logs whose pods are gone are closed and shipped, without a worker."""

import asyncio
import errno
from collections.abc import Callable

import msgspec
import pytest

from gristmill_contracts.usage import Counts
from gristmill_meter.drain import EXITS, Drain, exit_status
from gristmill_meter.listing import list_logs, table
from gristmill_meter.segment import segment_header
from gristmill_testing.fake_disk import FakeDisk, FakeFile
from gristmill_testing.meter_world import UID, World, forward_backward, sample

MakeWorld = Callable[..., World]


async def drain(world: World, timeout_s: float = 20.0) -> int:
    """Drain what the world's machine, now off, has left on its disk."""
    return await Drain(
        settings=world.settings, disk=world.disk, ledger=world.ledger, timeout_s=timeout_s
    ).run()


async def lose_pods(world: World) -> None:
    """Every process of the session dies at once; the volume stays."""
    disk = world.disk.crash()
    await world.power_off()
    world.disk = disk


def take_assignments_away(world: World) -> None:
    for path in world.settings.assignments_dir.iterdir():
        path.unlink()


async def busy_then_lost(world: World) -> None:
    """Shipped: train 1. Left on the volume: train 2, an unfetched sample, a cut stream, train 3 and 4."""
    await world.start()
    await world.train(1, forward_backward(5, 1))
    await world.settled()
    world.ledger.away = True
    assert (await world.train(2, forward_backward(7, 2))).state == "Completed"
    unfetched = (await world.submit(None, sample(prompt=4, tokens=8))).number
    await world.until(lambda: world.session.state.records["log", unfetched].terminal)
    gate, seen = asyncio.Event(), asyncio.Event()

    async def hold(count: int) -> None:
        if count == 2:
            seen.set()
            await gate.wait()

    reading = asyncio.create_task(world.read_stream(sample(prompt=3, tokens=24), hold))
    async with asyncio.timeout(20):
        await seen.wait()
    world.worker.before = lambda op_id, operation: gate.wait()
    await world.submit(3, forward_backward(9, 3))
    await world.submit(4, forward_backward(9, 4))
    await world.until(lambda: world.worker.at_once >= 1, "one of them runs")
    streamed = world.session.state.records["log", unfetched + 1].progress_tokens
    assert streamed >= 8
    await lose_pods(world)
    reading.cancel()
    await asyncio.wait([reading])
    world.ledger.away = False


@pytest.mark.parametrize("assigned", [True, False], ids=["assigned", "found"])
async def test_everything_is_settled_shipped_and_told(
    make_world: MakeWorld, assigned: bool
) -> None:
    world = make_world()
    await busy_then_lost(world)
    if not assigned:
        take_assignments_away(world)
    assert await drain(world) == 0
    kinds = [(e.stream, e.number, e.kind, e.outcome) for e in world.ledger.events]
    assert kinds == [
        ("train", 1, "usage", "completed"),
        ("train", 2, "usage", "completed"),
        ("log", 2, "usage", "aborted"),
        ("log", 1, "attempt", "completed"),
    ]
    streamed = world.ledger.events[2].counts
    assert streamed is not None
    assert streamed.prefill == 3
    assert 8 <= streamed.sample < 24
    assert world.ledger.billed() == Counts(train=12) + streamed
    beat = world.ledger.heartbeats[UID]
    assert (beat.view.state, beat.acked_seq, beat.head_seq) == ("Closed", 4, 4)
    assert (beat.view.open_operations, beat.tenant) == (0, "acme")


async def test_draining_again_changes_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    await busy_then_lost(world)
    assert await drain(world) == 0
    events = list(world.ledger.events)
    world.disk = world.disk.crash()
    assert await drain(world) == 0
    assert world.ledger.events == events
    assert world.ledger.heartbeats[UID].view.state == "Closed"


async def test_it_waits_for_a_ledger_that_is_away(make_world: MakeWorld) -> None:
    world = make_world()
    await busy_then_lost(world)
    world.ledger.away = True
    draining = asyncio.create_task(drain(world))
    calls = world.ledger.calls["register_producer"]
    await world.until(lambda: world.ledger.calls["register_producer"] > calls + 2, "it tries again")
    assert not draining.done()
    world.ledger.away = False
    async with asyncio.timeout(20):
        assert await draining == 0
    assert world.ledger.heartbeats[UID].view.state == "Closed"


async def test_a_ledger_that_stays_away_is_5_and_the_next_drain_ships(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    await busy_then_lost(world)
    world.ledger.away = True
    assert await drain(world, timeout_s=0.1) == 5
    world.disk = world.disk.crash()
    world.ledger.away = False
    assert await drain(world) == 0
    assert world.ledger.billed().train == 12


async def test_nothing_to_do_is_0_and_tells_nobody(make_world: MakeWorld) -> None:
    world = make_world()
    world.ledger.away = True
    assert await drain(world) == 0
    assert world.ledger.calls.total() == 0


async def test_a_session_that_never_began_is_closed(make_world: MakeWorld) -> None:
    world = make_world()
    world.assign()
    assert await drain(world) == 0
    beat = world.ledger.heartbeats[UID]
    assert (beat.view.state, beat.acked_seq, beat.head_seq) == ("Closed", 0, 0)


async def test_a_fenced_log_is_handed_in_left_as_it_is_and_6(make_world: MakeWorld) -> None:
    world = make_world()
    await busy_then_lost(world)
    world.ledger.attempts[UID] = 2
    before = {
        name: bytes(file.content) for name, file in world.disk.files.items() if "log-" in name
    }
    assert await drain(world) == 6
    assert [event.number for event in world.ledger.handed_in][:2] == [1, 2]
    assert world.ledger.heartbeats[UID].view.state == "Failed"
    again = World(world.folder / "again")
    again.ledger, again.disk = world.ledger, world.disk.crash()
    for name, content in before.items():
        assert bytes(again.disk.files[name].content).startswith(content)
    # Its owner goes on where it was: nothing was skipped or closed.
    world.ledger.let_grants_run_out()
    await again.start(attempt=2)
    assert (await again.poll("train", 4)).state == "Completed"
    await again.close()


async def test_a_damaged_log_is_4_and_the_ledger_hears_of_it(make_world: MakeWorld) -> None:
    world = make_world()
    await busy_then_lost(world)
    name = next(name for name in world.disk.files if "log-" in name)
    content = world.disk.files[name].content
    content[len(content) // 3] ^= 0xFF
    assert await drain(world) == 4
    view = world.ledger.heartbeats[UID].view
    assert view.error is not None
    assert (view.state, view.error.code) == ("Failed", "log_lost")


async def test_a_volume_that_is_gone_is_4(make_world: MakeWorld) -> None:
    world = make_world()
    await busy_then_lost(world)
    world.disk = FakeDisk()
    assert await drain(world) == 4
    assert [event.number for event in world.ledger.events] == [1]


async def test_a_volume_that_cannot_be_written_is_3(make_world: MakeWorld) -> None:
    world = make_world()
    await busy_then_lost(world)

    def refuse(verb: str, path: str, content: bytes) -> None:
        if verb in ("write", "fsync"):
            raise OSError(errno.EIO, "input/output error")

    world.disk.hook = refuse
    assert await drain(world) == 3


async def test_a_full_volume_is_3_and_what_is_logged_was_shipped(make_world: MakeWorld) -> None:
    world = make_world()
    await busy_then_lost(world)
    world.disk.free = 0
    assert await drain(world, timeout_s=0.5) == 3
    assert world.ledger.billed().train == 12


async def test_one_bad_log_does_not_keep_the_others_back(make_world: MakeWorld) -> None:
    world = make_world()
    await busy_then_lost(world)
    take_assignments_away(world)
    for path in list(world.disk.files):
        content = bytearray(world.disk.files[path].content)
        if path.endswith(".seg"):
            content[len(content) // 3] ^= 0xFF
        world.disk.files[path.replace(UID, "damaged")] = FakeFile(content)
    world.disk.files["empty/epoch"] = FakeFile(bytearray(b"7"))
    assert await drain(world) == 4
    assert list(world.ledger.heartbeats) == [UID]
    assert world.ledger.heartbeats[UID].view.state == "Closed"
    assert world.ledger.billed().train == 12


@pytest.mark.parametrize("window", range(6))
async def test_a_drain_that_is_killed_is_done_by_the_next_one(
    make_world: MakeWorld, window: int
) -> None:
    """Killed at its n-th fsync: whatever was settled by then, each thing is billed once."""
    world = make_world()
    await busy_then_lost(world)
    left = window

    def kill(path: str) -> None:
        nonlocal left
        if left == 0:
            world.disk.freeze()
        left -= 1

    world.disk.after_fsync = kill
    await drain(world, timeout_s=1.0)
    world.disk = world.disk.crash()
    assert await drain(world) == 0
    ids = [event.event_id for event in world.ledger.events]
    assert len(ids) == len(set(ids)) == 4
    assert world.ledger.heartbeats[UID].view.state == "Closed"


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        (["shipped"], 0),
        (["shipped", "fenced"], 6),
        (["fenced", "log_lost", "shipped"], 4),
        (["log_lost", "pending"], 5),
        (["pending", "volume_failed"], 3),
        (["volume_failed", "failed"], 1),
    ],
)
def test_the_status_is_that_of_the_outcome_worth_most_to_try_again(
    outcomes: list[str], status: int
) -> None:
    assert exit_status(outcomes) == status  # type: ignore[arg-type]
    assert sorted(EXITS.values()) == [0, 1, 3, 4, 5, 6]


def test_an_assignment_made_from_a_log_is_a_whole_one() -> None:
    from gristmill_contracts.http import Assignment
    from gristmill_meter.drain import _assignment_of
    from gristmill_meter.records import SessionState

    made = _assignment_of(SessionState(uid=UID))
    assert msgspec.json.decode(msgspec.json.encode(made), type=Assignment) == made


async def test_a_listing_tells_what_lies_there_and_changes_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    await busy_then_lost(world)
    world.disk.files["damaged/epoch"] = FakeFile(bytearray(b"1"))
    world.disk.files["damaged/log-00000003.seg"] = FakeFile(bytearray(segment_header(9)))
    before = {name: bytes(file.content) for name, file in world.disk.files.items()}
    listed = {log.session: log for log in list_logs(world.disk)}
    assert {name: bytes(file.content) for name, file in world.disk.files.items()} == before
    own = listed[UID]
    assert (own.tenant, own.attempt, own.state) == ("acme", 1, "open")
    assert own.usage >= 2
    assert own.waiting >= 1
    assert listed["damaged"].state.startswith("unreadable: log damaged lost frames 1 to 8")
    lines = table(list(listed.values())).splitlines()
    assert lines[0].split() == ["SESSION", "TENANT", "ATTEMPT", "USAGE", "WAITING", "STATE"]
    assert len(lines) == 3
