"""A long session: its log, its memory and its start are bounded, and nothing goes that is needed."""

import asyncio
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_contracts import limits
from gristmill_contracts import operations as ops
from gristmill_contracts.errors import ConflictError, LogLostError, NotFoundError
from gristmill_contracts.http import OperationView, Problem
from gristmill_meter import frames
from gristmill_meter.checkpoints import encode_state, restore_state
from gristmill_meter.records import SessionState
from gristmill_meter.retention import forget, needed_from, trim_results
from gristmill_meter.state import apply
from gristmill_testing.hand_clock import HandClock
from gristmill_testing.meter_book import UID, Book
from gristmill_testing.meter_world import (
    World,
    forward,
    forward_backward,
    make_submit,
    optim_step,
    sample,
)

MakeWorld = Callable[..., World]
KEPT_S = 100.0


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 3000)
    monkeypatch.setattr(limits, "INLINE_PAYLOAD_BYTES_MAX", 1000)
    monkeypatch.setattr("gristmill_meter.driver.SWEEP_S", 0.0)


def long_world(make_world: MakeWorld, **settings: Any) -> tuple[World, HandClock]:
    """A world whose clock stands still, with a snapshot before each operation but the first."""
    fields: dict[str, Any] = {"result_retention_s": KEPT_S, "claim_timeout_s": 0.2} | settings
    world = make_world(**({"snapshot_replay_s": 0.0} | fields))
    clock = HandClock(now=1_700_000_000.0)
    world.clock_us = lambda: int(clock() * 1e6)
    return world, clock


async def train(world: World, first: int, last: int) -> None:
    for number in range(first, last + 1):
        step = optim_step() if number % 4 == 0 else forward_backward(5, number)
        assert (await world.train(number, step)).state == "Completed"


async def swept(world: World, until: Callable[[], bool], what: str) -> None:
    await world.until(until, what)


def segments(world: World) -> list[str]:
    return [name for name in world.disk.list(UID_FOLDER) if name.startswith("log-")]


UID_FOLDER = "11111111-2222-4333-8444-555555555555"


# --- the state as bytes --------------------------------------------------------------------------


def random_history(chance: random.Random, steps: int) -> Iterator[Book]:
    """A book after each of so many random steps."""
    book, number = Book(), 0
    for _ in range(steps):
        pick = chance.random()
        if pick < 0.4:
            number += 1 + (chance.random() < 0.1)
            book.train(number, chance.choice([forward_backward(3, number), forward(2, number)]))
        elif pick < 0.55:
            token = f"token-{chance.randrange(5)}" if chance.random() < 0.5 else None
            if token is None or token not in book.state.tokens:
                book.submit(make_submit(None, sample(2, 3, 1, chance.randrange(9)), token=token))
        elif pick < 0.6:
            number += 1
            book.refuse(number)
        elif pick < 0.9:
            end_one(book, chance)
        elif book.state.unclaimed:
            claimed = next(iter(book.state.unclaimed))
            expires = chance.random() < 0.3
            book.take(
                frames.Expired(numbers=[claimed], at_us=book.now_us)
                if expires
                else frames.Claim(number=claimed, at_us=book.now_us)
            )
        elif book.state.executed_count > book.state.snapshots[1]:
            book.take(frames.Snapshot(applied=book.state.executed_count, at_us=book.now_us))
        yield book


def end_one(book: Book, chance: random.Random) -> None:
    waiting = [key for key in book.state.open_keys if key[0] == "log"]
    train_keys = [number for stream, number in book.state.open_keys if stream == "train"]
    if waiting and chance.random() < 0.5:
        book.end(waiting[0][1], stream="log")
    elif train_keys and min(train_keys) < book.state.next_number:
        book.end(min(train_keys), failed=chance.random() < 0.2)


def without_inline_results(state: SessionState) -> SessionState:
    state = copy.deepcopy(state)
    trim_results(state, -1)
    return state


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_a_checkpoint_says_all_that_the_frames_before_say(seed: int) -> None:
    """Restored at any point, and fed the same frames from there on, the state is the same."""
    chance = random.Random(seed)
    at, content, frames_before = chance.randrange(40), b"", 0
    book = Book()
    for step, book in enumerate(random_history(chance, 60)):
        if chance.random() < 0.2:
            forget(book.state, book.now_us - 100, book.state.frames)
        if step == at:
            content, frames_before = encode_state(book.state), book.state.frames
            restored = SessionState(uid=UID)
            restore_state(restored, content)
            assert_same(restored, without_inline_results(book.state))
    restored = SessionState(uid=UID)
    restore_state(restored, content)
    for frame in book.frames[frames_before:]:
        apply(restored, frame)
    for state in (book.state, restored):
        state.events.clear()  # All was acknowledged: now both forget the same.
        forget(state, book.now_us + 1, state.frames)
    assert_same(without_inline_results(restored), without_inline_results(book.state))


def assert_same(restored: SessionState, state: SessionState) -> None:
    for name in SessionState.__dataclass_fields__:
        if name in ("ended", "lingering", "inline_results", "inline_bytes"):
            continue  # Where they stand in the queue of those to be forgotten does not matter.
        assert getattr(restored, name) == getattr(state, name), name
    assert {*restored.ended, *restored.lingering} == {*state.ended, *state.lingering}


# --- a whole session -----------------------------------------------------------------------------


async def test_log_memory_and_blobs_of_a_long_session_stay_small(
    make_world: MakeWorld, small_segments: None
) -> None:
    world, clock = long_world(make_world)
    await world.start()
    most_segments = most_records = most_blobs = 0
    for round_number in range(12):
        first = round_number * 8 + 1
        await train(world, first, first + 7)
        await world.sample(sample(3, 4, seed=round_number))
        await world.settled()
        clock.pass_s(KEPT_S / 2)
        frames_now = world.session.state.frames
        state = world.session.state
        await asyncio.sleep(0.05)
        most_segments = max(most_segments, len(segments(world)))
        most_records = max(most_records, len(state.records))
        most_blobs = max(most_blobs, len(world.disk.list(f"{UID_FOLDER}/blobs")))
        assert frames_now == world.session.log.appended_number
    assert world.session.log.first_number > 100
    assert (most_segments, most_records) <= (12, 40)
    assert len(world.session.state.executed) < 30
    await world.crash()
    await world.until(lambda: world.session.worker_ready)
    assert world.session.log.first_number > 100
    await train(world, 97, 100)
    await world.settled()
    assert sorted(e.number for e in world.ledger.events if e.stream == "train") == [*range(1, 101)]
    assert world.session.view().counts == world.ledger.billed()


async def test_what_was_forgotten_is_neither_found_nor_run_again(
    make_world: MakeWorld, small_segments: None
) -> None:
    world, clock = long_world(make_world)
    await world.start()
    await train(world, 1, 12)
    clock.pass_s(KEPT_S + 1)
    await train(world, 13, 16)
    for _ in range(2):
        await world.until(lambda: ("train", 2) not in world.session.state.records, "forgotten")
        with pytest.raises(NotFoundError, match="ended long ago"):
            await world.poll("train", 2)
        with pytest.raises(ConflictError, match="already used"):
            await world.submit(2, forward_backward(5, 2))
        with pytest.raises(ConflictError, match="already used"):
            await world.refuse(2)
        assert (await world.poll("train", 16)).state == "Completed"
        await world.crash()
    assert all(runs == 1 for runs in world.worker.runs.values())


@pytest.mark.parametrize("why", ["unacknowledged", "fetchable", "above the older snapshot"])
async def test_a_segment_stays_as_long_as_it_is_needed(
    why: str, make_world: MakeWorld, small_segments: None
) -> None:
    snapshots = {"snapshot_replay_s": 1e9} if why == "above the older snapshot" else {}
    world, clock = long_world(make_world, **snapshots)
    await world.start()
    await train(world, 1, 2)
    await world.settled()
    world.ledger.away = why == "unacknowledged"
    await train(world, 3, 24)
    clock.pass_s(KEPT_S - 0.1 if why == "fetchable" else KEPT_S + 1)
    await asyncio.sleep(0.1)
    replays = world.worker.replays.copy()
    if why == "above the older snapshot":
        # Segments may go: their checkpoint holds what replay needs.
        await world.crash(worker=True)
        await world.until(lambda: world.session.worker_ready)
        assert sum((world.worker.replays - replays).values()) == 24
        return
    assert world.session.log.first_number == 1
    assert {("train", number) for number in range(3, 25)} <= world.session.state.records.keys()
    await world.crash()
    world.ledger.away = False
    await world.settled()
    if why == "fetchable":
        assert (await world.poll("train", 1)).state == "Completed"
    assert [event.number for event in world.ledger.events] == [*range(1, 25)]


async def test_what_replay_needs_stays_however_old_it_is(
    make_world: MakeWorld, small_segments: None
) -> None:
    """Without a snapshot that is all. The CHECKPOINT that the log begins with was written when the results
    had long been let go, and large bodies lie in files of their own."""
    world, clock = long_world(make_world, snapshot_replay_s=1e9)
    await world.start()
    for number in range(1, 7):
        operation = forward_backward(400, number)
        assert (await world.train(number, operation)).state == "Completed"
    await world.settled()
    clock.pass_s(KEPT_S + 1)
    await world.until(lambda: not world.session.state.results, "the results were let go")
    await train(world, 7, 40)
    await world.settled()
    clock.pass_s(KEPT_S + 1)
    await world.until(lambda: world.session.log.first_number > 40, "the log was trimmed")
    replays = world.worker.replays.copy()
    await world.crash(worker=True)
    await world.until(lambda: world.session.worker_ready, "everything was fed again")
    assert sum((world.worker.replays - replays).values()) == 40
    await train(world, 41, 41)
    await world.settled()
    assert [event.number for event in world.ledger.events] == [*range(1, 42)]


async def test_what_the_older_of_two_snapshots_needs_stays(
    make_world: MakeWorld, small_segments: None
) -> None:
    """The worker may come back with that one: the newer one may be damaged."""
    world, clock = long_world(make_world)
    await world.start()
    await train(world, 1, 8)
    await world.settled()
    await world.until(lambda: world.session.state.snapshots == (7, 8), "both were taken")
    clock.pass_s(KEPT_S + 1)
    await world.until(lambda: not world.session.state.results, "the results were let go")
    for seed in range(40):
        await world.sample(sample(3, 4, seed=seed))
    await world.settled()
    clock.pass_s(KEPT_S + 1)
    await world.until(lambda: world.session.log.first_number > 40, "the log was trimmed")
    assert world.session.state.snapshots == (7, 8)
    assert world.worker.snapshots[UID_FOLDER].pop().applied == 8
    replays = world.worker.replays.copy()
    await world.crash(worker=True)
    await world.until(lambda: world.session.worker_ready, "the last one was fed again")
    assert sum((world.worker.replays - replays).values()) == 1


def test_usage_that_the_ledger_lacks_keeps_its_frame_without_a_result() -> None:
    book = Book()
    book.train(1)
    book.end(1)
    settled = book.state.records["train", 1].settled_frame
    book.state.results.clear()
    assert needed_from(book.state) == settled
    book.state.events.clear()
    assert needed_from(book.state) == book.state.frames + 1


async def test_a_restored_ledger_is_told_again_what_is_kept_and_records_the_rest_as_a_gap(
    make_world: MakeWorld, small_segments: None
) -> None:
    world, clock = long_world(make_world)
    await world.start()
    for first in (1, 13, 25):
        await train(world, first, first + 11)
        await world.settled()
        clock.pass_s(KEPT_S * 0.6)
        await asyncio.sleep(0.05)
    await world.until(lambda: world.session.log.first_seq > 1, "the log was trimmed")
    kept_from = world.session.log.first_seq
    world.ledger.epochs.clear()
    world.ledger.cursors.clear()
    world.ledger.events.clear()
    await world.train(37, forward_backward(5, 37))
    await world.settled()
    assert world.ledger.gaps == [(0, kept_from - 1)]
    assert [event.producer_seq for event in world.ledger.events] == [*range(kept_from, 38)]


async def test_a_checkpoint_that_is_damaged_is_told(
    make_world: MakeWorld, small_segments: None
) -> None:
    world, clock = long_world(make_world)
    await world.start()
    # Long client tokens make it a blob.
    for number in range(1, 20):
        await world.submit(number, forward_backward(5, number), token=f"{number}" * 60)
        await world.poll("train", number)
    await world.settled()
    clock.pass_s(KEPT_S + 1)
    await train(world, 20, 23)
    await world.until(lambda: world.session.log.first_number > 1, "the log was trimmed")
    await world.power_off()
    world.disk = world.disk.crash()
    first = min(name for name in segments(world))
    content = world.disk.files[f"{UID_FOLDER}/{first}"].content
    content[content.index(b"checkpoint")] ^= 1
    await world.start()
    assert isinstance(world.session.broken, LogLostError)


# --- crashes -------------------------------------------------------------------------------------


class PowerCut:
    """The power fails at the nth call of the disk from the first one on that does what is named."""

    def __init__(self, world: World, what: str, nth: int) -> None:
        self.world, self.what, self.nth, self.count = world, what, nth, 0
        self.loop = asyncio.get_running_loop()
        self.sprung = asyncio.Event()
        world.disk.hook = self.look

    def look(self, verb: str, path: str, content: bytes) -> None:
        begins = {
            "a checkpoint begins a segment": "checkpoint-" in path,
            "a segment is removed": (verb, path[-7:]) == ("remove", "001.seg"),
        }
        if self.count == 0 and not begins[self.what]:
            return
        self.count += 1
        if self.count == self.nth:
            self.world.disk.freeze()
            self.loop.call_soon_threadsafe(self.sprung.set)


async def client(world: World, last: int, clock: HandClock) -> list[OperationView]:
    """Train up to `last`, sending again what was not answered; time goes by on the way."""
    views = []
    for number in range(1, last + 1):
        operation: ops.Operation = optim_step() if number % 4 == 0 else forward_backward(5, number)
        while True:
            life = world.life
            try:
                await world.submit(number, operation, token=f"{number}" * 40)
                view = await world.poll("train", number)
            except (LogLostError, NotFoundError, ConflictError):
                raise
            except Exception:  # noqa: BLE001 - whatever a dying meter answers
                await world.next_life(life)
                continue
            if view.state == "Completed":
                break
            await world.next_life(life)
        views.append(view)
        clock.pass_s(KEPT_S / 8)
        await asyncio.sleep(0.005)  # Let the sweep look in now and then.
    return views


@pytest.mark.parametrize("nth", range(1, 13))
@pytest.mark.parametrize("what", ["a checkpoint begins a segment", "a segment is removed"])
async def test_the_power_may_fail_at_any_call_of_the_disk_while(
    what: str, nth: int, make_world: MakeWorld, small_segments: None
) -> None:
    world, clock = long_world(make_world)
    await world.start()
    await world.until(lambda: world.session.worker_ready)
    cut = PowerCut(world, what, nth)
    running = asyncio.create_task(client(world, 40, clock))
    async with asyncio.timeout(60):
        waiting = asyncio.create_task(cut.sprung.wait())
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert cut.sprung.is_set(), "the window was not reached"
        await world.crash(worker=nth % 2 == 0)
        views = await running
    await world.settled()
    assert [view.number for view in views] == [*range(1, 41)]
    assert [event.number for event in world.ledger.events] == [*range(1, 41)]
    clock.pass_s(KEPT_S + 1)
    await world.until(lambda: world.session.log.first_number > 1, "the log was trimmed")


# --- the last frame ------------------------------------------------------------------------------


async def test_damage_to_exactly_the_last_durable_frame_is_told(world: World) -> None:
    """What says so is a file that is never synced: it tells what it reached the disk with."""
    for number in (1, 2):
        await world.train(number, forward_backward(5, number))
    await world.settled()
    await world.power_off()
    world.disk = world.disk.killed()  # All that was written back.
    world.disk.frozen = None
    content = world.disk.files[f"{UID_FOLDER}/log-00000001.seg"].content
    content[-1] ^= 1
    await world.start()
    assert isinstance(world.session.broken, LogLostError)
    view = world.session.view()
    assert view.error is not None
    assert "had been durable" in view.error.message


async def test_a_torn_tail_is_still_cut(world: World) -> None:
    await world.train(1, forward_backward())
    await world.settled()
    await world.power_off()
    world.disk = world.disk.crash()
    world.disk.files[f"{UID_FOLDER}/log-00000001.seg"].content += b"\xa7GMF torn"
    await world.start()
    assert world.session.broken is None
    assert (await world.poll("train", 1)).state == "Completed"


def test_problem_of_a_failed_session_is_kept_by_a_checkpoint() -> None:
    book = Book()
    book.train(1)
    problem = Problem(code="operation_failed", message="gone")
    book.take(frames.SessionFailed(error=problem, skipped=[("train", 1)], at_us=book.now_us))
    restored = SessionState(uid=UID)
    restore_state(restored, encode_state(book.state))
    assert restored.failure == problem
    assert restored.records["train", 1].state == "Skipped"
