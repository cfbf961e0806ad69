"""A meter in a cluster: admitted by the ledger, told what to do by it, and fenced by a newer attempt."""

import asyncio
from collections.abc import Callable

import pytest

from gristmill_contracts.cluster_http import Directive
from gristmill_contracts.errors import FencedError, LogLostError, UnavailableError
from gristmill_contracts.usage import Counts
from gristmill_meter.ports import LedgerAwayError
from gristmill_testing.fake_disk import FakeDisk
from gristmill_testing.meter_world import (
    UID,
    World,
    forward_backward,
    optim_step,
    sample,
    save_weights,
)

MakeWorld = Callable[..., World]


@pytest.fixture
def cluster_world(make_world: MakeWorld) -> World:
    """A world whose meter asks the ledger first. Not started."""
    world = make_world()
    world.registers_first = True
    return world


class TestAdmission:
    async def test_nothing_is_taken_before_the_ledger_has_taken_the_registration(
        self, cluster_world: World
    ) -> None:
        world = cluster_world
        world.ledger.away = True
        await world.start()
        with pytest.raises(UnavailableError, match="waits for the ledger"):
            await world.submit(1, forward_backward())
        with pytest.raises(UnavailableError, match="waits for the ledger"):
            await world.refuse(1)
        with pytest.raises(UnavailableError, match="waits for the ledger"):
            await world.read_stream(sample())
        assert world.session.service == "Recovering"
        world.ledger.away = False
        await world.until(lambda: world.session.service == "Serving", "the session was admitted")
        assert (await world.train(1, forward_backward())).state == "Completed"

    async def test_nothing_is_released_or_run_before_it_either(self, cluster_world: World) -> None:
        world = await cluster_world.start()
        await world.until(lambda: world.session.admitted)
        await world.train(1, forward_backward())
        number = (await world.submit(None, sample())).number
        await world.until(lambda: world.session.state.records["log", number].terminal)
        await world.settled()
        world.ledger.away = True
        await world.crash()
        executed = dict(world.worker.runs)
        assert (await world.poll("train", 1, wait_s=0.02)).state == "InProgress"
        assert (await world.poll("log", number, wait_s=0.02)).result is None
        held = asyncio.create_task(world.poll("train", 1))
        await world.until(lambda: world.session.polls_held == 1)
        assert world.worker.runs == executed
        world.ledger.away = False
        assert (await held).state == "Completed"
        assert (await world.poll("log", number)).state == "Completed"
        await world.settled()
        assert world.ledger.billed() == Counts(train=5, prefill=6, sample=8)

    async def test_a_volume_that_is_gone_is_noticed_before_anything_is_accepted(
        self, cluster_world: World
    ) -> None:
        world = await cluster_world.start()
        await world.until(lambda: world.session.admitted)
        await world.train(1, forward_backward())
        await world.settled()
        await world.power_off()
        world.disk = FakeDisk()
        await world.start()
        await world.until(lambda: world.session.broken is not None, "the loss was noticed")
        with pytest.raises(LogLostError, match="up to 1"):
            await world.submit(1, forward_backward())
        await world.until(lambda: world.ledger.heartbeats[UID].view.state == "Failed")
        error = world.ledger.heartbeats[UID].view.error
        assert error is not None
        assert error.code == "log_lost"
        assert [event.number for event in world.ledger.events] == [1]


class TestDirectives:
    async def test_stop_ends_the_session_as_an_assignment_would(self, world: World) -> None:
        gate = asyncio.Event()
        world.worker.before = lambda op_id, operation: gate.wait()
        for number in (1, 2):
            await world.submit(number, forward_backward(5, number))
        await world.until(lambda: world.worker.at_once == 1, "the first one runs")
        world.ledger.directives[UID] = Directive(attempt=1, desired="stop")
        await world.until(lambda: world.session.service == "Draining", "the session drains")
        assert (await world.poll("train", 2)).state == "Skipped"
        gate.set()
        assert (await world.poll("train", 1)).state == "Completed"
        await world.until(lambda: world.ledger.heartbeats[UID].view.state == "Closed")
        beat = world.ledger.heartbeats[UID]
        assert beat.acked_seq == beat.head_seq == 1

    async def test_serve_and_another_attempts_stop_change_nothing(self, world: World) -> None:
        for told in (
            Directive(attempt=2, desired="stop"),
            Directive(attempt=0, desired="stop"),
            Directive(attempt=1, desired="serve"),
        ):
            world.ledger.directives[UID] = told
            beats = world.ledger.calls["post_heartbeats"]
            await world.until(
                lambda before=beats: world.ledger.calls["post_heartbeats"] > before + 2
            )
            assert world.session.service == "Serving"

    async def test_a_stop_is_obeyed_again_after_a_crash_on_the_way(self, world: World) -> None:
        await world.train(1, forward_backward())
        await world.settled()
        world.ledger.directives[UID] = Directive(attempt=1, desired="stop")
        await world.until(lambda: world.session.told_to_stop)
        await world.crash()
        await world.until(lambda: world.session.service == "Closed")
        await world.until(lambda: world.ledger.heartbeats[UID].view.state == "Closed")

    async def test_a_stop_of_a_lost_log_ends_it(self, world: World) -> None:
        await world.train(1, forward_backward())
        await world.settled()
        await world.power_off()
        world.disk = FakeDisk()
        await world.start()
        await world.until(lambda: world.session.broken is not None)
        world.ledger.directives[UID] = Directive(attempt=1, desired="stop")
        await world.until(lambda: world.ledger.heartbeats[UID].view.state == "Closed")


class TestFencing:
    """Two meters on copies of one log, as when a node is lost and its volume serves elsewhere."""

    @staticmethod
    async def _second(first: World, make_world: MakeWorld) -> World:
        """The next attempt, on what was durable of the first one's log."""
        second = make_world()
        second.ledger, second.disk = first.ledger, first.disk.crash()
        second.registers_first = True
        await second.start(attempt=2)
        await second.until(lambda: second.session.admitted, "the newer attempt was admitted")
        first.ledger.let_grants_run_out()
        return second

    async def test_the_older_one_stops_releasing_and_the_newer_one_goes_on(
        self, world: World, make_world: MakeWorld
    ) -> None:
        await world.train(1, forward_backward(5, 1))
        await world.settled()
        second = await self._second(world, make_world)
        await world.until(lambda: world.session.fenced, "the older one has heard of it")
        with pytest.raises(FencedError, match="newer attempt"):
            await world.poll("train", 1)
        with pytest.raises(FencedError):
            await world.submit(2, forward_backward())
        with pytest.raises(FencedError):
            await world.read_stream(sample())
        view = world.session.view()
        assert view.error is not None
        assert (view.state, view.error.code) == ("Failed", "fenced")
        assert world.meter is not None
        assert {"session", "fenced"} <= set(world.meter.missing())
        assert (await second.poll("train", 1)).state == "Completed"
        assert (await second.train(2, optim_step())).state == "Completed"
        await second.settled()
        assert [event.number for event in world.ledger.events] == [1, 2]

    async def test_what_the_older_one_released_before_it_knew_is_handed_in(
        self, world: World, make_world: MakeWorld
    ) -> None:
        await world.train(1, forward_backward(5, 1))
        await world.settled()
        world.ledger.away = True
        beats = world.ledger.calls["post_heartbeats"]
        await world.until(lambda: world.ledger.calls["post_heartbeats"] > beats)
        copy = world.disk.crash()
        assert (await world.train(2, forward_backward(7, 2))).state == "Completed"
        second = make_world()
        second.ledger, second.disk = world.ledger, copy
        second.registers_first = True
        second.ledger.attempts[UID] = 2  # It registers while the older one is cut off.
        world.ledger.away = False
        await world.until(lambda: world.driver.poster.handed_in, "handed in")
        assert [(e.number, e.counts) for e in world.ledger.handed_in] == [(2, Counts(train=7))]
        await second.start(attempt=2)
        await second.until(lambda: second.session.admitted)
        assert second.session.state.records.keys() == {("train", 1)}
        assert world.ledger.billed() == Counts(train=5)

    async def test_a_running_operation_of_the_older_one_is_never_released(
        self, world: World, make_world: MakeWorld
    ) -> None:
        gate = asyncio.Event()
        world.worker.before = lambda op_id, operation: gate.wait()
        await world.submit(1, forward_backward())
        await world.until(lambda: world.worker.at_once == 1)
        polling = asyncio.create_task(world.poll("train", 1))
        await world.until(lambda: world.session.polls_held == 1)
        second = await self._second(world, make_world)
        with pytest.raises(FencedError):
            await polling
        gate.set()
        await world.until(lambda: world.driver.poster.handed_in)
        assert world.ledger.handed_in == []
        assert (await second.poll("train", 1)).state == "Completed"
        await second.settled()
        assert world.ledger.billed() == Counts(train=5)

    async def test_a_save_of_the_older_one_is_not_registered(
        self, world: World, make_world: MakeWorld
    ) -> None:
        gate = asyncio.Event()
        world.worker.before = lambda op_id, operation: gate.wait()
        await world.submit(1, save_weights())
        await world.until(lambda: world.worker.at_once == 1)
        world.ledger.attempts[UID] = 2
        gate.set()
        await world.until(lambda: world.session.fenced)
        assert world.ledger.checkpoints == {}
        second = await self._second(world, make_world)
        assert (await second.poll("train", 1)).state == "Completed"
        assert len(world.ledger.checkpoints) == 1

    async def test_one_that_hears_of_it_only_when_it_posts_stops_as_well(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await world.train(1, forward_backward())
        await world.settled()

        async def silent(_heartbeats: object) -> None:
            raise LedgerAwayError("heartbeats are cut off")

        monkeypatch.setattr(type(world.ledger), "post_heartbeats", silent)
        world.ledger.attempts[UID] = 2
        await world.submit(2, forward_backward())
        await world.until(lambda: world.session.fenced)
        await world.until(lambda: world.driver.poster.handed_in)
        assert [event.number for event in world.ledger.handed_in] == [2]

    async def test_a_restarted_older_one_releases_nothing_at_all(
        self, world: World, make_world: MakeWorld
    ) -> None:
        await world.train(1, forward_backward())
        await world.settled()
        await self._second(world, make_world)
        world.registers_first = True
        await world.crash()
        await world.until(lambda: world.session.fenced)
        with pytest.raises(FencedError):
            await world.poll("train", 1)
        # It does not know what the ledger has: it hands in all, which the ledger knows.
        await world.until(lambda: world.driver.poster.handed_in)
        assert [event.number for event in world.ledger.handed_in] == [1]
        assert world.ledger.calls["post_batch"] >= 2

    async def test_a_ledger_that_forgot_us_is_told_again(self, world: World) -> None:
        await world.train(1, forward_backward())
        await world.settled()
        world.ledger.epochs.clear()
        world.ledger.cursors.clear()
        world.ledger.events.clear()
        await world.train(2, forward_backward())
        await world.settled()
        assert [event.number for event in world.ledger.events] == [1, 2]
