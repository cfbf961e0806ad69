"""The sweep: ghosts go, what a watch hid is taken in, and a watch that is late is told from a silent one."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from gristmill_operator.cache import ObjectCache
from gristmill_operator.ghosts import Sweeper, TurnedBackError
from gristmill_operator.kinds import PODS, SESSIONS
from gristmill_operator.probes import Health, LoopLag
from gristmill_operator.queue import KeyQueue
from gristmill_operator.seams import Key
from gristmill_operator.watch import Intake
from gristmill_testing.hand_clock import HandClock
from gristmill_testing.small_api import SmallApi

KEY = Key("TrainingSession", "gm-a", "s")


@dataclass
class World:
    clock: HandClock = field(default_factory=HandClock)
    api: SmallApi = field(default_factory=SmallApi)

    def __post_init__(self) -> None:
        queue = KeyQueue(clock=self.clock, call_later=self.clock.call_later)
        self.intake = Intake(cache=ObjectCache(), queue=queue)
        self.sweeper = Sweeper(
            client=self.api,  # type: ignore[arg-type]
            intake=self.intake,
            every_s=150,
            clock=self.clock,
            sleep=self.clock.sleep,
        )

    def pod(self, name: str = "p") -> dict[str, Any]:
        marks = {"gristmill.dev/session": "s", "app.kubernetes.io/managed-by": "gristmill"}
        return self.api.put(
            PODS, {"metadata": {"namespace": "gm-a", "name": name, "labels": marks}}
        )


@pytest.fixture
def world() -> World:
    return World()


async def test_an_object_whose_end_was_missed_is_removed_and_its_session_looked_at(
    world: World,
) -> None:
    world.intake.take(PODS, world.pod())
    await world.intake.queue.get()
    world.intake.queue.done(KEY)
    world.api.drop(PODS, "gm-a", "p")
    assert await world.sweeper.sweep(PODS) == 1
    assert world.intake.cache.get(PODS, "gm-a", "p") is None
    assert (await world.intake.queue.get())[0] == KEY
    assert not world.sweeper.silent_since, "a missed end is no silent watch"


async def test_what_comes_during_the_sweep_is_no_ghost(world: World) -> None:
    """An object that is new since the list was asked for must not be removed."""
    listed = world.api.list_metadata

    async def late(kind: Any) -> Any:
        answer = await listed(kind)
        world.intake.take(PODS, world.pod("new"))
        return answer

    world.api.list_metadata = late  # type: ignore[method-assign]
    await world.sweeper.sweep(PODS)
    assert world.intake.cache.get(PODS, "gm-a", "new") is not None


async def test_a_watch_that_hides_changes_is_silent_until_a_sweep_finds_it_whole(
    world: World,
) -> None:
    world.pod()
    sweep = asyncio.create_task(world.sweeper.sweep(PODS))
    await world.clock.pass_slowly(40)
    assert await sweep == 1
    assert world.intake.cache.get(PODS, "gm-a", "p") is not None
    health = Health(lag=LoopLag(), silent_since=world.sweeper.silent_since)
    assert "pods" in health.ill()
    assert await world.sweeper.sweep(PODS) == 0
    assert health.ill() == ""


async def test_a_watch_that_is_only_late_is_left_alone(world: World) -> None:
    body = world.pod()
    sweep = asyncio.create_task(world.sweeper.sweep(PODS))
    await world.clock.pass_slowly(10)
    world.intake.take(PODS, body)
    await world.clock.pass_slowly(5)
    assert await sweep == 0
    assert not world.sweeper.silent_since


async def test_nothing_begins_before_all_that_was_there_is_known(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_operator.ghosts.WARM_CHECK_S", 0)
    body, gone = world.pod("p"), world.pod("gone")
    warming = asyncio.create_task(world.sweeper.warm())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not warming.done()
    world.intake.take(PODS, body)
    world.api.drop(PODS, "gm-a", "gone")
    world.clock.pass_s(4)
    await asyncio.wait_for(warming, 5)
    assert world.intake.cache.by_uid(PODS, gone["metadata"]["uid"]) is None


async def test_a_watch_that_is_silent_from_its_start_does_not_hold_up_the_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_operator.ghosts.WARM_CHECK_S", 0)
    world.pod()
    warming = asyncio.create_task(world.sweeper.warm())
    for _ in range(20):
        await asyncio.sleep(0)
        world.clock.pass_s(5)
    await asyncio.wait_for(warming, 5)
    assert world.intake.cache.get(PODS, "gm-a", "p") is not None
    assert PODS in world.sweeper.silent_since


async def test_a_restored_api_server_asks_for_a_new_process(world: World) -> None:
    await world.sweeper.sweep(PODS)
    world.api.version -= 50
    with pytest.raises(TurnedBackError, match="restored from a backup"):
        await world.sweeper.sweep(PODS)


async def test_a_stuck_loop_is_ill(world: World) -> None:
    lag = LoopLag(clock=world.clock, sleep=world.clock.sleep)
    measuring = asyncio.create_task(lag.run())
    await world.clock.pass_slowly(5)
    health = Health(lag=lag, silent_since={})
    assert health.ill() == ""
    world.clock.now += 45
    await world.clock.pass_slowly(1)
    assert "late" in health.ill()
    await world.clock.pass_slowly(60)
    assert health.ill() == ""
    measuring.cancel()


def test_who_lost_the_lead_and_does_not_end_is_ill() -> None:
    lost_s = [0.0]
    health = Health(lag=LoopLag(), silent_since={}, lost_s=lambda: lost_s[0])
    assert health.ill() == ""
    lost_s[0] = 20.0
    assert health.ill() == "", "it may be ending"
    lost_s[0] = 31.0
    assert "the lead was lost 31 s ago" in health.ill()


def test_news_of_a_kind_reach_the_keys_that_they_concern(world: World) -> None:
    body = {
        "metadata": {"namespace": "gm-a", "name": "s", "uid": "u", "resourceVersion": "5"},
        "spec": {"baseModelRef": {"name": "m"}},
    }
    assert world.intake.take(SESSIONS, body)
    assert not world.intake.take(SESSIONS, body)
    assert len(world.intake.queue) == 2, "the session, and its model"
