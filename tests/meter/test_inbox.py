"""A meter takes what waits in its session's inbox: in order, once, before it takes a call."""

import hashlib
import random

import msgspec
import pytest

from gristmill_contracts import limits
from gristmill_contracts import operations as ops
from gristmill_contracts.errors import OperationFailedError, UnavailableError
from gristmill_contracts.http import Refuse
from gristmill_contracts.ids import SessionUid, Stream
from gristmill_contracts.inbox import AckInbox, InboxEntry
from gristmill_meter.checkpoints import encode_state, restore_state
from gristmill_meter.records import SessionState
from gristmill_testing.fake_ledger import FakeLedger
from gristmill_testing.meter_world import (
    UID,
    World,
    forward_backward,
    make_submit,
    optim_step,
    sample,
)

LOG_1 = limits.INBOX_LOG_NUMBER_MIN + 7
LOG_2 = limits.INBOX_LOG_NUMBER_MIN + 9


def entry(position: int, number: int, operation: ops.Operation | None, **how: str) -> InboxEntry:
    """As the ledger hands it out; no operation: a refusal."""
    stream: Stream = "log" if isinstance(operation, ops.Sample) else "train"
    if operation is None:
        message: object = Refuse(
            number=number, client_token=None, message="no", breaks_accumulation=True
        )
    else:
        message = make_submit(None if stream == "log" else number, operation, **how)  # type: ignore[arg-type]
    return InboxEntry(
        position=position,
        stream=stream,
        number=number,
        kind="refuse" if operation is None else "submit",
        body=msgspec.msgpack.encode(message),
        accepted_us=1,
    )


@pytest.fixture
def world(make_world: object) -> World:
    made: World = make_world()  # type: ignore[operator]
    return made


def fill(world: World, *entries: InboxEntry) -> None:
    world.ledger.inboxes[UID] = list(entries)


async def test_what_waits_runs_in_order_once_and_is_billed_once(world: World) -> None:
    fill(
        world,
        entry(1, 2, forward_backward(7)),
        entry(2, LOG_1, sample()),
        entry(3, 1, forward_backward(5)),
        entry(4, 3, optim_step()),
        entry(5, LOG_2, sample()),
    )
    await world.start()
    for number in (1, 2, 3):
        assert (await world.poll("train", number)).state == "Completed"
    for number in (LOG_1, LOG_2):
        assert (await world.poll("log", number)).state == "Completed"
    direct = await world.sample(sample())
    assert direct.number == 1, "the meter's own numbers begin at 1 all the same"
    await world.settled()
    assert world.ledger.inboxes[UID] == []
    train = [event.number for event in world.ledger.events if event.stream == "train"]
    assert train == [1, 2, 3]
    assert len(world.ledger.events) == 6


async def test_no_call_is_taken_before(world: World) -> None:
    world.ledger.away = True
    fill(world, entry(1, 1, forward_backward()))
    await world.start()
    with pytest.raises(UnavailableError, match="inbox"):
        await world.submit(1, forward_backward())
    assert world.session.service == "Recovering"
    world.ledger.away = False
    await world.until(lambda: world.session.serves)
    again = await world.submit(1, forward_backward())
    assert again.duplicate


async def test_what_comes_while_it_serves_is_taken_with_the_next_heartbeat(world: World) -> None:
    await world.start()
    await world.train(1, forward_backward())
    fill(world, entry(1, 2, forward_backward()))
    await world.until(lambda: ("train", 2) in world.session.state.records)
    assert (await world.poll("train", 2)).state == "Completed"


async def test_a_refusal_closes_its_number(world: World) -> None:
    fill(world, entry(1, 1, None), entry(2, 2, optim_step()), entry(3, 3, forward_backward()))
    await world.start()
    assert (await world.poll("train", 1)).state == "Refused"
    assert (await world.poll("train", 2)).state == "Skipped"
    assert (await world.poll("train", 3)).state == "Completed"


@pytest.mark.parametrize("call", ["claim_inbox", "ack_inbox"])
@pytest.mark.parametrize("torn", [False, True])
async def test_whoever_dies_on_the_way_loses_nothing_and_runs_nothing_twice(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str, torn: bool
) -> None:
    """The power fails as the call is made, and with an acknowledgement whose answer is lost."""
    fill(world, *(entry(n, n, forward_backward(n)) for n in (1, 2, 3)), entry(4, LOG_1, sample()))
    real = getattr(type(world.ledger), call)
    lives: list[int] = []

    async def dying(self: object, *arguments: object) -> object:
        lives.append(world.life)
        if len(lives) <= 3:
            if len(lives) % 2:
                world.ledger.calls["lost"] += 1
            else:
                await real(self, *arguments)
            raise UnavailableError("the power fails")
        return await real(self, *arguments)

    world.settings = world.settings.model_copy(update={"retry_first_s": 30.0, "retry_last_s": 30.0})
    monkeypatch.setattr(type(world.ledger), call, dying)
    world._takes_calls = lambda: True  # type: ignore[method-assign]
    await world.start()
    for died in (1, 2, 3):
        await world.until(lambda died=died: len(lives) >= died)  # type: ignore[misc]
        await world.crash(random.Random(died) if torn else None, worker=died == 2)
    await world.until(lambda: world.session.serves)
    for number in (1, 2, 3):
        assert (await world.poll("train", number)).state == "Completed"
    assert (await world.poll("log", LOG_1)).state == "Completed"
    await world.settled()
    assert sorted((e.stream, e.number) for e in world.ledger.events) == [
        ("log", LOG_1), ("train", 1), ("train", 2), ("train", 3),
    ]  # fmt: skip
    assert world.ledger.inboxes[UID] == []


async def test_an_operation_that_the_log_has_already_is_not_taken_again(world: World) -> None:
    await world.start()
    await world.train(1, forward_backward(5))
    fill(world, entry(1, LOG_1, sample()))
    await world.until(lambda: world.session.state.inbox_number == LOG_1)
    await world.poll("log", LOG_1)
    await world.settled()
    fill(world, entry(2, 1, forward_backward(5)), entry(3, LOG_1, sample()))
    await world.crash()
    await world.settled()
    assert world.ledger.inboxes[UID] == []
    assert len(world.ledger.events) == 2


async def test_what_the_log_cannot_take_is_skipped_and_nothing_waits_for_it(world: World) -> None:
    await world.start()
    await world.train(1, forward_backward(5))
    fill(world, entry(1, 1, forward_backward(9)), entry(2, 2, optim_step()))
    await world.until(lambda: world.ledger.inboxes[UID] == [])
    (skip,) = world.ledger.skipped
    assert skip.position == 1
    assert "number 1 was already used" in skip.reason
    assert (await world.poll("train", 2)).state == "Completed"
    used = hashlib.sha256(b"other").hexdigest()
    await world.submit(3, forward_backward(), token=used)
    fill(world, entry(3, 4, forward_backward(9), token=used), entry(4, 5, forward_backward(9)))
    await world.until(lambda: world.ledger.inboxes[UID] == [])
    assert (await world.poll("train", 4)).state == "Refused"
    assert (await world.poll("train", 5)).state == "Completed"


async def test_a_failed_session_skips_what_waits(world: World) -> None:
    await world.start()
    await world.submit(2, forward_backward())
    world.session.fail(OperationFailedError("it failed"))
    await world.session.log.durable(world.session.log.appended_number)
    fill(world, entry(1, 3, forward_backward()))
    await world.crash()
    assert ("train", 3) not in world.session.state.records
    world.assign(desired="stop")
    await world.until(lambda: world.session.shipped)
    assert world.ledger.inboxes[UID] == []


async def test_a_full_volume_makes_it_wait(world: World) -> None:
    fill(world, entry(1, 1, forward_backward()))
    world.disk.free = 1000
    world.settings = world.settings.model_copy(update={"log_free_bytes_min": 500})
    world._takes_calls = lambda: True  # type: ignore[method-assign]
    await world.start()
    await world.until(lambda: world.ledger.calls["claim_inbox"] >= 2)
    assert not world.session.serves
    world.disk.free = 2**40
    assert await world.until(lambda: world.session.serves) is None
    assert (await world.poll("train", 1)).state == "Completed"


async def test_the_number_of_the_last_one_survives_a_checkpoint_of_the_log() -> None:
    state = SessionState(uid=UID)
    state.inbox_number = LOG_1
    again = SessionState(uid=UID)
    restore_state(again, encode_state(state))
    assert again.inbox_number == LOG_1


async def test_f34_nothing_is_acknowledged_before_it_is_durable(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(world, *(entry(n, n, forward_backward(n)) for n in range(1, 6)))
    real = type(world.ledger).ack_inbox
    held: list[int] = []

    async def watching(self: FakeLedger, uid: SessionUid, request: AckInbox) -> None:
        session = world.session
        frames = [session.state.records["train", n].accepted_frame for n in request.taken]
        assert max(frames) <= session.log.durable_number
        held.extend(request.taken)
        await real(self, uid, request)

    monkeypatch.setattr(type(world.ledger), "ack_inbox", watching)
    await world.start()
    assert held == [1, 2, 3, 4, 5]
    await world.crash()
    assert [world.session.state.records["train", n].number for n in held] == held


class TestArchive:
    async def test_a_session_that_stops_ships_its_results_once_all_usage_is_acknowledged(
        self, world: World
    ) -> None:
        await world.start()
        await world.train(1, forward_backward(5))
        big = await world.train(2, forward_backward(9000))
        fetched = await world.sample(sample())
        unfetched = await world.submit(None, sample(seed=4))
        await world.until(lambda: not world.session.state.open_keys)
        await world.submit(4, optim_step())
        fill(world)
        world.assign(desired="stop")
        await world.until(lambda: world.session.shipped)
        archived = {key[1:]: each for key, each in world.ledger.archived.items()}
        assert {key: each.state for key, each in archived.items()} == {
            ("train", 1): "Completed",
            ("train", 2): "Completed",
            ("train", 4): "Skipped",
            ("log", fetched.number): "Completed",
            ("log", unfetched.number): "Failed",
        }
        result = archived["train", 2].result
        assert result is not None
        assert msgspec.msgpack.decode(result, type=ops.Result) == big.result
        assert archived["log", unfetched.number].result is None
        assert world.ledger.cursors[UID] == world.session.state.head_seq

    async def test_it_waits_for_a_ledger_that_is_away(self, world: World) -> None:
        await world.start()
        await world.train(1, forward_backward(5))
        world.ledger.away = True
        world.assign(desired="stop")
        await world.until(lambda: world.session.state.closed)
        assert world.session.service == "Draining"
        world.ledger.away = False
        await world.until(lambda: world.session.shipped)
        assert len(world.ledger.archived) == 1

    async def test_what_is_past_its_retention_stays_behind(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "ARCHIVE_PAGE_OPERATIONS_MAX", 2)
        await world.start()
        for number in range(1, 6):
            await world.train(number, forward_backward(5))
        late_us = int(world.settings.result_retention_s * 1e6)
        world.session.state.records["train", 2].ended_us -= late_us
        world.assign(desired="stop")
        await world.until(lambda: world.session.shipped)
        assert sorted(key[2] for key in world.ledger.archived) == [1, 3, 4, 5]
        assert world.ledger.calls["archive"] == 2

    async def test_a_process_that_goes_down_ships_nothing_before_its_usage_is_acknowledged(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its log has both, and whoever goes on with it ships them."""

        async def refuse(*_asked: object) -> object:
            raise UnavailableError("the ledger takes no usage just now")

        await world.start()
        await world.train(1, forward_backward(5))
        await world.settled()
        monkeypatch.setattr(type(world.ledger), "post_batch", refuse)
        await world.train(2, forward_backward(5, 2))
        assert world.meter is not None
        await world.meter.close()
        world.meter = None
        assert (world.ledger.archived, world.ledger.calls["archive"]) == ({}, 0)

    async def test_a_process_that_goes_down_ships_what_was_billed_and_nothing_else(
        self, world: World
    ) -> None:
        await world.start()
        await world.train(1, forward_backward(5))
        await world.refuse(2)
        fetched = await world.sample(sample())
        unfetched = await world.submit(None, sample(seed=4))
        await world.until(lambda: not world.session.state.open_keys)
        assert world.meter is not None
        fill(world, entry(1, 3, forward_backward()))
        await world.meter.close()
        world.meter = None
        assert sorted(key[1:] for key in world.ledger.archived) == [
            ("log", fetched.number), ("train", 1),
        ]  # fmt: skip
        assert unfetched.number != fetched.number
        assert len(world.ledger.inboxes[UID]) == 1, "the inbox stays open"
