"""One attempt of a session releases results at a time: by a grant of the ledger that runs out by itself."""

import asyncio
from collections.abc import Callable

import pytest

from gristmill_contracts import limits
from gristmill_testing.hand_clock import HandClock
from gristmill_testing.meter_world import UID, World, forward_backward, sample

MakeWorld = Callable[..., World]


class Clocks:
    """The meter's boot time, and the ledger's clock; both stand still until a test moves them."""

    def __init__(self, world: World) -> None:
        self.meter, self.ledger = HandClock(), HandClock(now=5000.0)
        world.boottime_us = lambda: int(self.meter() * 1e6)
        world.ledger.clock_us = lambda: int(self.ledger() * 1e6)

    def pass_s(self, seconds: float) -> None:
        self.meter.pass_s(seconds)
        self.ledger.pass_s(seconds)


async def beats(world: World, more: int = 2) -> None:
    """Until so many more heartbeats have been sent."""
    before = world.ledger.calls["post_heartbeats"]
    await world.until(lambda: world.ledger.calls["post_heartbeats"] >= before + more)


async def cut_off(world: World) -> None:
    """No heartbeat reaches the ledger from here on; one that was on its way has arrived."""
    world.ledger.away = True
    await beats(world)


async def test_a_meter_that_is_cut_off_stops_releasing_30_s_after_it_last_asked(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    clocks = Clocks(world)
    await world.start()
    await world.train(1, forward_backward())
    number = (await world.submit(None, sample())).number
    await world.until(lambda: world.session.state.records["log", number].terminal)
    await beats(world)
    await cut_off(world)
    clocks.pass_s(limits.RELEASE_GRANT_S - 0.001)
    assert (await world.poll("train", 1)).state == "Completed"
    clocks.pass_s(0.001)
    assert (await world.poll("train", 1, wait_s=0)).state == "InProgress"
    assert (await world.poll("log", number, wait_s=0)).state == "InProgress"
    assert world.session.state.records["log", number].claim == "waiting", "nothing is billed"
    polling = asyncio.create_task(world.poll("log", number))
    await world.until(lambda: world.session.polls_held == 1)
    world.ledger.away = False
    assert (await polling).state == "Completed"


async def test_a_poll_that_is_held_over_the_durable_end_waits_for_the_grant(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    clocks = Clocks(world)
    await world.start()
    await world.train(1, forward_backward())
    await beats(world)
    await cut_off(world)
    clocks.pass_s(limits.RELEASE_GRANT_S)
    await world.submit(2, forward_backward())
    polling = asyncio.create_task(world.poll("train", 2))
    records, log = world.session.state.records, world.session.log
    await world.until(lambda: records["train", 2].terminal, "it has ended")
    await world.until(lambda: records["train", 2].settled_frame <= log.durable_number, "durably")
    await beats(world)
    assert not polling.done(), "nobody may tell the end yet, and InProgress is no news"
    world.ledger.away = False
    assert (await polling).state == "Completed"


async def test_the_time_of_a_grant_begins_when_it_is_asked_for(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of the last heartbeat is 20 s on its way."""
    world = make_world()
    clocks = Clocks(world)
    await world.start()
    await world.train(1, forward_backward())
    answer = type(world.ledger).post_heartbeats
    slow, asked = asyncio.Event(), asyncio.Event()

    async def slowly(self: object, heartbeats: list[object]) -> object:
        told = await answer(self, heartbeats)  # type: ignore[arg-type]
        asked.set()
        await slow.wait()
        return told

    monkeypatch.setattr(type(world.ledger), "post_heartbeats", slowly)
    await asked.wait()
    clocks.pass_s(20)
    slow.set()
    await cut_off(world)
    clocks.pass_s(9.9)
    assert (await world.poll("train", 1)).state == "Completed"
    clocks.pass_s(0.1)
    assert (await world.poll("train", 1, wait_s=0)).state == "InProgress"


async def test_the_next_attempt_releases_when_the_grant_before_has_run_out_never_both(
    make_world: MakeWorld,
) -> None:
    first, second = make_world(), make_world()
    clocks = Clocks(first)
    await first.start()
    await first.train(1, forward_backward())
    await first.settled()
    await beats(first)
    second.boottime_us, second.ledger = first.boottime_us, first.ledger
    second.disk = first.disk.crash()
    # The first one's heartbeats are lost from here on, but it lives.
    assert first.meter is not None
    for task in first.meter._tasks:
        task.cancel()
    second.registers_first = True
    await second.start(attempt=2)
    await second.until(lambda: second.session.admitted)
    for _ in range(int(limits.RELEASE_GRANT_S)):
        assert first.session.may_release
        assert not second.session.may_release
        clocks.pass_s(1)
        await beats(second, 1)
    assert not first.session.may_release
    await second.until(lambda: second.session.may_release)
    assert (await second.poll("train", 1)).state == "Completed"
    assert (await first.poll("train", 1, wait_s=0)).state == "InProgress"


async def test_a_meter_that_ends_in_order_leaves_the_grant_to_the_next_at_once(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    Clocks(world)
    await world.start()
    await world.train(1, forward_backward())
    assert world.meter is not None
    await world.meter.close()
    assert world.ledger.heartbeats[UID].released
    world.disk = world.disk.crash()
    world.assign(attempt=2)
    await world.start()
    assert (await world.poll("train", 1)).state == "Completed"


async def test_a_stream_holds_its_tokens_back_without_a_grant(make_world: MakeWorld) -> None:
    world = make_world()
    clocks = Clocks(world)
    await world.start()
    await world.until(lambda: world.session.may_release)
    cut = asyncio.Event()

    async def on_chunk(count: int) -> None:
        if count == 1:
            await cut_off(world)
            clocks.pass_s(limits.RELEASE_GRANT_S)
            cut.set()

    reading = asyncio.create_task(world.read_stream(sample(prompt=5, tokens=40), on_chunk))
    await cut.wait()
    record = world.session.state.records["log", 1]
    await beats(world, 4)
    assert record.progress_tokens <= 3 * limits.STREAM_FLUSH_TOKENS
    assert not reading.done()
    world.ledger.away = False
    chunks = await reading
    assert chunks[-1].final == "length"
    assert sum(len(chunk.tokens) for chunk in chunks) == 40


async def test_a_ledger_of_the_release_before_knows_no_grants(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    monkeypatch.setattr(type(world.ledger), "_grants", lambda self, heartbeats: None)
    await world.start()
    assert (await world.train(1, forward_backward())).state == "Completed"
