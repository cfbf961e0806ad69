"""Usage reaches the ledger in order and once, whatever happens to the way there."""

import asyncio
import errno
import threading
from collections.abc import Callable

import pytest

from gristmill_contracts import limits
from gristmill_contracts.errors import (
    FencedError,
    LogFullError,
    LogLostError,
    OverloadedError,
    UnavailableError,
    VolumeFailedError,
)
from gristmill_contracts.usage import Counts
from gristmill_testing.fake_disk import FakeDisk
from gristmill_testing.meter_world import UID, World, forward_backward, sample


async def test_f34_a_ledger_that_was_away_gets_everything_once_and_in_order(world: World) -> None:
    await world.train(1, forward_backward(3, 1))  # It brings the word that no budget applies.
    await world.settled()
    world.ledger.away = True
    for number in range(2, 21):
        assert (await world.train(number, forward_backward(3, number))).state == "Completed"
    await world.crash()
    assert len(world.ledger.events) == 1
    world.ledger.away = False
    await world.settled()
    assert [event.producer_seq for event in world.ledger.events] == list(range(1, 21))
    assert [event.number for event in world.ledger.events] == list(range(1, 21))
    assert world.ledger.billed() == Counts(train=60)


@pytest.mark.parametrize(
    ("name", "bound"), [("UNACKED_OPERATIONS_MAX", 2), ("UNACKED_AGE_S_MAX", 0.0)]
)
async def test_what_the_ledger_does_not_have_yet_is_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str, bound: float
) -> None:
    await world.train(1, forward_backward(3, 1))
    await world.settled()
    world.ledger.away = True
    for number in (2, 3):
        await world.train(number, forward_backward(3, number))
    monkeypatch.setattr(limits, name, bound)
    with pytest.raises(OverloadedError, match="has not acknowledged 2 operations"):
        await world.submit(4, forward_backward(3, 4))
    assert (await world.submit(3, forward_backward(3, 3))).duplicate
    world.ledger.away = False
    await world.settled()
    assert (await world.train(4, forward_backward(3, 4))).state == "Completed"


async def test_an_answer_that_was_lost_stores_nothing_twice(world: World) -> None:
    world.ledger.lose_answers = 3
    for number in range(1, 6):
        await world.train(number, forward_backward())
    await world.settled()
    assert [event.number for event in world.ledger.events] == [1, 2, 3, 4, 5]
    assert world.ledger.calls["post_batch"] >= 4


async def test_nothing_is_posted_before_it_is_durable(world: World) -> None:
    await world.train(1, forward_backward())
    await world.settled()
    gate, held = threading.Event(), threading.Event()

    def hold_results(verb: str, path: str, content: bytes) -> None:
        if verb == "write" and b"\xa6result" in content:
            held.set()
        if verb == "fsync" and held.is_set():
            gate.wait(5)

    world.disk.hook = hold_results
    batches = world.ledger.calls["post_batch"]
    await world.submit(2, forward_backward())
    await world.until(held.is_set, "the RESULT was written, not synced")
    beats = world.ledger.calls["post_heartbeats"]
    await world.until(lambda: world.ledger.calls["post_heartbeats"] > beats + 2, "time went by")
    assert world.ledger.calls["post_batch"] == batches
    assert (await world.poll("train", 2, wait_s=0.01)).state == "InProgress"
    gate.set()
    await world.settled()
    assert [event.number for event in world.ledger.events] == [1, 2]


async def test_batches_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BATCH_EVENTS_MAX", 4)
    await world.train(
        1, forward_backward()
    )  # By now the ledger has granted the release of results.
    await world.settled()
    world.ledger.away = True
    for number in range(2, 12):
        await world.train(number, forward_backward())
    world.ledger.away = False
    before = world.ledger.calls["post_batch"]
    await world.settled()
    assert len(world.ledger.events) == 11
    assert world.ledger.calls["post_batch"] - before >= 3


async def test_a_ledger_restored_from_a_backup_gets_what_it_lost(world: World) -> None:
    for number in range(1, 9):
        await world.train(number, forward_backward())
    await world.settled()
    del world.ledger.events[3:]
    world.ledger.cursors[UID] = 3
    await world.train(9, forward_backward())
    await world.settled()
    assert [event.number for event in world.ledger.events] == list(range(1, 10))


async def test_a_ledger_that_is_ahead_of_our_cursor_is_believed(world: World) -> None:
    world.ledger.away = True
    for number in (1, 2):
        await world.submit(number, forward_backward())
    world.ledger.away = False
    await world.settled()
    await world.crash()
    await world.settled()
    assert world.session.acked_seq == 2
    assert len(world.ledger.events) == 2


async def test_a_log_older_than_the_ledger_knows_accepts_nothing(world: World) -> None:
    for number in (1, 2):
        await world.train(number, forward_backward())
    await world.settled()
    await world.power_off()
    world.disk = FakeDisk()
    await world.start()
    await world.until(lambda: world.session.broken is not None, "the loss was noticed")
    with pytest.raises(LogLostError, match="up to 2"):
        await world.submit(1, forward_backward())
    view = world.session.view()
    assert view.state == "Failed"
    assert view.error is not None
    assert view.error.code == "log_lost"
    world.assign(desired="stop")
    await world.until(lambda: world.session.service == "Closed", "it can still be ended")
    await world.crash()
    await world.until(lambda: world.session.service == "Closed", "it stays ended")


async def test_a_fenced_attempt_stops(world: World) -> None:
    world.ledger.attempts[UID] = 2
    await world.crash()
    await world.until(lambda: world.session.broken is not None, "the fence was noticed")
    with pytest.raises(FencedError):
        await world.submit(1, forward_backward())


async def test_an_attempt_older_than_the_log_waits_until_it_is_the_owner_again(
    world: World,
) -> None:
    world.assign(attempt=3)
    await world.until(lambda: world.session.state.attempt == 3)
    world.assign(attempt=2)
    await world.crash()
    with pytest.raises(FencedError, match="attempt 2"):
        await world.submit(1, forward_backward())
    world.assign(attempt=4)
    world.ledger.let_grants_run_out()
    await world.until(lambda: world.session.state.attempt == 4, "it took over")
    await world.until(lambda: world.session.serves, "its inbox was taken")
    assert (await world.train(1, forward_backward())).state == "Completed"


async def test_a_volume_that_cannot_be_read_at_first_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_meter.session.REOPEN_AFTER_S", 0.02)
    await world.train(1, forward_backward())
    await world.power_off()
    world.disk = world.disk.crash()

    def refuse(verb: str, path: str, content: bytes) -> None:
        raise OSError(errno.EIO, "input/output error")

    world.disk.hook = refuse
    await world.start()
    with pytest.raises(UnavailableError, match="input/output error"):
        await world.submit(2, forward_backward())
    world.disk.hook = lambda verb, path, content: None
    await world.until(
        lambda: world.session.broken is None and world.session.serves, "the log was opened"
    )
    assert (await world.train(2, forward_backward())).state == "Completed"


async def test_a_session_is_there_for_nobody_before_its_log_was_read(
    make_world: Callable[..., World],
) -> None:
    """Otherwise an operation would be taken for new that the log knows."""
    world = await make_world().start()
    await world.train(1, forward_backward())
    await world.settled()
    await world.power_off()
    world.disk = world.disk.crash()
    gate, reading = threading.Event(), threading.Event()

    def slow(verb: str, path: str, content: bytes) -> None:
        reading.set()
        gate.wait(20)

    world.disk.hook = slow
    starting = asyncio.create_task(world.start())
    await world.until(reading.is_set, "the log is being read")
    assert world.meter is not None
    with pytest.raises(UnavailableError, match="being opened"):
        world.meter.admit(UID, "Bearer s3cret", "1")
    gate.set()
    await starting
    assert (await world.submit(1, forward_backward())).duplicate


async def test_a_new_attempt_takes_over_and_registers(world: World) -> None:
    await world.train(1, forward_backward())
    world.assign(attempt=2, secret="other")
    await world.until(lambda: world.ledger.attempts.get(UID) == 2, "registered again")
    await world.train(2, forward_backward())
    await world.settled()
    assert [event.attempt for event in world.ledger.events] == [1, 2]


async def test_heartbeats_tell_the_state_and_both_cursors(world: World) -> None:
    await world.train(1, forward_backward(4))
    await world.settled()
    await world.until(lambda: world.ledger.heartbeats[UID].acked_seq == 1, "the cursor was told")
    beat = world.ledger.heartbeats[UID]
    assert (beat.view.state, beat.head_seq, beat.worker_ready) == ("Serving", 1, True)
    assert beat.view.counts == Counts(train=4)
    assert beat.tenant == "acme"


async def test_a_full_volume_refuses_new_work_and_finishes_the_old(
    make_world: Callable[..., World],
) -> None:
    world = await make_world(log_free_bytes_min=1000).start()
    gate = asyncio.Event()
    world.worker.before = lambda op_id, operation: gate.wait()
    await world.submit(1, forward_backward(5))
    number = (await world.submit(None, sample())).number
    world.disk.free = 20_000
    with pytest.raises(LogFullError, match="20000 bytes"):
        await world.submit(2, forward_backward())
    with pytest.raises(LogFullError):
        await world.submit(None, sample())
    assert (await world.submit(1, forward_backward(5))).duplicate
    gate.set()
    assert (await world.poll("train", 1)).state == "Completed"
    assert (await world.poll("log", number)).state == "Completed"
    await world.settled()
    assert world.ledger.billed() == Counts(train=5, prefill=6, sample=8)
    world.disk.free = 10**9
    assert (await world.train(2, forward_backward())).state == "Completed"


async def test_a_volume_that_fills_up_under_a_result_keeps_it_until_there_is_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_meter.log.FULL_RETRY_S", 0.01)
    gate = asyncio.Event()
    world.worker.before = lambda op_id, operation: gate.wait()
    await world.submit(1, forward_backward(5))
    world.disk.free = 0
    gate.set()
    await world.until(lambda: world.session.log.full, "the volume was found full")
    assert (await world.poll("train", 1, wait_s=0.02)).state == "InProgress"
    world.disk.free = 10**9
    assert (await world.poll("train", 1)).state == "Completed"


async def test_a_failing_fsync_releases_nothing_and_a_second_one_stops_the_meter(
    world: World,
) -> None:
    await world.train(1, forward_backward())
    world.disk.fail_fsyncs = 1
    assert (await world.train(2, forward_backward())).state == "Completed"
    world.disk.fail_fsyncs = 10**6
    with pytest.raises(VolumeFailedError):
        await world.submit(3, forward_backward())
    with pytest.raises(VolumeFailedError):
        await world.poll("train", 1)
    assert world.meter is not None
    assert world.meter.volume_failed
    assert world.session.view().state == "Failed"
    await world.crash()
    assert (await world.train(3, forward_backward())).state == "Completed"
    await world.settled()
    assert [event.number for event in world.ledger.events] == [1, 2, 3]


async def test_an_idle_session_sends_again_what_a_restored_ledger_lost(world: World) -> None:
    await world.train(1, forward_backward(3))
    await world.settled()
    before = list(world.ledger.events)
    world.ledger.restore()
    await world.until(lambda: world.ledger.events == before, "the usage is there again")


async def test_a_session_ends_only_once_the_ledger_of_now_has_everything(world: World) -> None:
    """Also where heartbeats do not tell what is stored."""
    world.ledger.tells_acked = False
    await world.train(1, forward_backward(3))
    await world.settled()
    before = list(world.ledger.events)
    world.ledger.restore()
    world.assign(desired="stop")
    await world.until(lambda: world.session.shipped, "everything shipped")
    assert world.ledger.events == before
