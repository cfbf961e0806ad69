"""Whose time it is that a lease runs by: that of the meter, from when it asked, however long the answer takes."""

import asyncio
from collections.abc import Callable

import pytest

from gristmill_testing.hand_clock import HandClock
from gristmill_testing.meter_world import World, forward_backward

MakeWorld = Callable[..., World]
LEASE_S = 20.0
ON_ITS_WAY_S = 15.0


class SlowAnswers:
    """Answers of one call of the ledger are held back from now on, until `let_go`."""

    def __init__(self, world: World, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self._arrive = asyncio.Event(), asyncio.Event()
        answer = getattr(type(world.ledger), call)

        async def slowly(ledger: object, *asked: object) -> object:
            told = await answer(ledger, *asked)
            self.made.set()
            await self._arrive.wait()
            return told

        monkeypatch.setattr(type(world.ledger), call, slowly)

    def let_go(self) -> None:
        self._arrive.set()


def bounded(make_world: MakeWorld) -> tuple[World, HandClock]:
    """A world with a budget, whose leases last 20 s by a clock that stands still."""
    world, clock = make_world(), HandClock()
    world.boottime_us = lambda: int(clock() * 1e6)
    world.ledger.clock_us = world.boottime_us
    world.ledger.budgets.limit, world.ledger.budgets.expires_in_s = 1000, LEASE_S
    return world, clock


async def pending_until_it_is_back(world: World, number: int) -> None:
    """The lease is over: nothing begins before the ledger has given another."""
    await world.submit(number, forward_backward(8, number))
    assert (await world.poll("train", number, wait_s=0.1)).state == "Pending"
    world.ledger.away = False
    assert (await world.poll("train", number)).state == "Completed"
    await world.settled()
    budgets = world.ledger.budgets
    assert (budgets.posted, budgets.late) == (8 * number, 0)


async def test_the_time_of_a_lease_begins_when_it_is_asked_for(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, clock = bounded(make_world)
    await world.start()
    slow = SlowAnswers(world, "take_lease", monkeypatch)
    await world.submit(1, forward_backward(8, 1))
    await slow.made.wait()
    clock.pass_s(ON_ITS_WAY_S)
    world.ledger.away = True
    slow.let_go()
    assert (await world.poll("train", 1)).state == "Completed"
    clock.pass_s(LEASE_S - ON_ITS_WAY_S - 0.1)
    assert (await world.train(2, forward_backward(8, 2))).state == "Completed"
    clock.pass_s(0.1)
    await pending_until_it_is_back(world, 3)


async def test_the_time_of_a_renewed_lease_begins_when_the_heartbeat_was_sent(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, clock = bounded(make_world)
    await world.start()
    assert (await world.train(1, forward_backward(8, 1))).state == "Completed"
    await world.settled()
    slow = SlowAnswers(world, "post_heartbeats", monkeypatch)
    await slow.made.wait()
    clock.pass_s(ON_ITS_WAY_S)
    world.ledger.away = True
    slow.let_go()
    calls = world.ledger.calls["post_heartbeats"]
    await world.until(lambda: world.ledger.calls["post_heartbeats"] > calls, "the answer was taken")
    clock.pass_s(LEASE_S - ON_ITS_WAY_S - 0.1)
    assert (await world.train(2, forward_backward(8, 2))).state == "Completed"
    clock.pass_s(0.1)
    await pending_until_it_is_back(world, 3)
