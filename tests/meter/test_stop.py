"""The end of a session, and of the process."""

import asyncio
from collections.abc import Callable

import pytest

from gristmill_contracts.errors import ConflictError, UnavailableError
from gristmill_contracts.usage import Counts
from gristmill_testing.meter_world import UID, World, forward_backward, sample


async def closed(world: World) -> None:
    await world.until(lambda: world.session.service == "Closed", "the session was closed")


async def test_stop_finishes_what_runs_skips_what_waits_and_ships_everything(
    world: World,
) -> None:
    gate = asyncio.Event()
    world.worker.before = lambda op_id, operation: gate.wait()
    for number in (1, 2):
        await world.submit(number, forward_backward(5, number))
    await world.until(lambda: world.worker.at_once == 1, "the first one runs")
    world.assign(desired="stop")
    await world.until(lambda: world.session.service == "Draining", "the session drains")
    with pytest.raises(UnavailableError, match="stopping"):
        await world.submit(3, forward_backward())
    assert (await world.poll("train", 2)).state == "Skipped"
    gate.set()
    assert (await world.poll("train", 1)).state == "Completed"
    await closed(world)
    await world.until(
        lambda: world.ledger.heartbeats[UID].view.state == "Closed", "Closed was told"
    )
    beat = world.ledger.heartbeats[UID]
    assert beat.acked_seq == beat.head_seq == 1
    assert UID not in world.worker.sessions
    assert [state.applied for state in world.worker.snapshots[UID]] == [1]
    with pytest.raises(ConflictError, match="closed"):
        await world.submit(3, forward_backward())
    assert (await world.poll("train", 1)).state == "Completed"


async def test_results_that_nobody_fetched_are_attempts_at_the_end(world: World) -> None:
    number = (await world.submit(None, sample(prompt=6, tokens=8))).number
    await world.until(lambda: world.session.state.records["log", number].terminal)
    world.assign(desired="stop")
    await closed(world)
    (event,) = world.ledger.events
    assert (event.kind, event.counts) == ("attempt", Counts(prefill=6, sample=8))
    assert world.ledger.billed() == Counts()


async def test_a_held_poll_still_gets_and_pays_for_its_result_at_the_end(world: World) -> None:
    gate = asyncio.Event()
    world.worker.before = lambda op_id, operation: gate.wait()
    number = (await world.submit(None, sample())).number
    polling = asyncio.create_task(world.poll("log", number))
    await world.until(lambda: world.session.polls_held == 1 and world.worker.at_once == 1)
    world.assign(desired="stop")
    await world.until(lambda: world.session.stopping)
    gate.set()
    assert (await polling).state == "Completed"
    await closed(world)
    assert [event.kind for event in world.ledger.events] == ["usage"]


async def test_closed_waits_for_the_ledger(world: World) -> None:
    await world.train(1, forward_backward())
    await world.settled()
    world.ledger.away = True
    await world.train(2, forward_backward())
    world.assign(desired="stop")
    await world.until(lambda: world.session.state.closed, "the log was closed")
    assert world.session.service == "Draining"
    await world.crash()
    assert world.session.service == "Draining"
    world.ledger.away = False
    await closed(world)
    assert len(world.ledger.events) == 2


async def test_a_stop_does_not_wait_for_ever_for_a_worker_that_is_away(
    make_world: Callable[..., World],
) -> None:
    world = make_world(stop_wait_s=0.1)
    world.worker.down = True
    await world.start()
    await world.submit(1, forward_backward())
    world.assign(desired="stop")
    await closed(world)
    assert (await world.poll("train", 1)).state == "Skipped"


async def test_a_session_assigned_to_stop_from_the_start_closes(
    make_world: Callable[..., World],
) -> None:
    world = await make_world().start(desired="stop")
    await closed(world)
    assert world.ledger.events == []


async def test_a_session_whose_assignment_is_taken_away_is_left_and_can_come_back(
    world: World,
) -> None:
    await world.train(1, forward_backward())
    path = world.settings.assignments_dir / f"{UID}.json"
    content = path.read_bytes()
    path.unlink()
    assert world.meter is not None
    meter = world.meter
    await world.until(lambda: UID not in meter.drivers, "the session was left")
    path.write_bytes(content)
    await world.until(lambda: UID in meter.drivers, "the session is back")
    assert (await world.poll("train", 1)).state == "Completed"
    assert (await world.train(2, forward_backward())).state == "Completed"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"uid": "x"}', b"\xff" * 100_000])
async def test_an_unreadable_assignment_is_left_out_and_the_others_are_served(
    world: World, content: bytes
) -> None:
    (world.settings.assignments_dir / "broken.json").write_bytes(content)
    assert (await world.train(1, forward_backward())).state == "Completed"
    assert world.meter is not None
    assert list(world.meter.drivers) == [UID]


async def test_an_assignment_cannot_lead_out_of_the_data_folder(world: World) -> None:
    content = (world.settings.assignments_dir / f"{UID}.json").read_bytes()
    evil = content.replace(UID.encode(), b"..%2f..")
    (world.settings.assignments_dir / "..%2f...json").write_bytes(evil)
    assert (await world.train(1, forward_backward())).state == "Completed"
    assert world.meter is not None
    assert list(world.meter.drivers) == [UID]


class TestDrain:
    async def test_refuses_new_work_lets_polls_go_and_finishes_what_runs(
        self, world: World
    ) -> None:
        gate = asyncio.Event()
        world.worker.before = lambda op_id, operation: gate.wait()
        for number in (1, 2):
            await world.submit(number, forward_backward(5, number))
        await world.until(lambda: world.worker.at_once == 1, "the first one runs")
        polling = asyncio.create_task(world.poll("train", 2))
        await world.until(lambda: world.session.polls_held == 1)
        assert world.meter is not None
        closing = asyncio.create_task(world.meter.close())
        assert (await polling).state == "Pending"
        with pytest.raises(UnavailableError, match="going down"):
            await world.submit(3, forward_backward())
        gate.set()
        await closing
        world.disk = world.disk.crash()
        world.meter = None
        await world.start()
        assert (await world.poll("train", 2)).state == "Completed"
        await world.settled()
        assert world.worker.runs == {f"{UID}/train/1": 1, f"{UID}/train/2": 1}
        assert world.ledger.billed() == Counts(train=10)

    async def test_leaves_an_operation_for_the_next_process_when_the_worker_is_away(
        self, make_world: Callable[..., World]
    ) -> None:
        world = make_world(drain_s=0.05)
        world.worker.down = True
        await world.start()
        await world.submit(1, forward_backward())
        number = (await world.submit(None, sample())).number
        assert world.meter is not None
        await world.meter.close()
        world.disk = world.disk.crash()
        world.meter = None
        world.worker.down = False
        await world.start()
        assert (await world.poll("train", 1)).state == "Completed"
        assert (await world.poll("log", number)).state == "Completed"


async def test_a_bug_in_a_session_breaks_it_and_a_moment_later_it_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_meter.session.REOPEN_AFTER_S", 0.05)
    await world.train(1, forward_backward())
    broken = world.session
    broken.crashed(RuntimeError("a bug"))
    assert broken.view().state == "Failed"
    await world.until(lambda: world.session is not broken, "the session was opened again")
    await world.until(lambda: world.session.serves, "it serves again")
    assert (await world.train(2, forward_backward())).state == "Completed"
