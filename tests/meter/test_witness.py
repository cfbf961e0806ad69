"""What the worker ran and what the log took are set beside each other, at moments that both have reached."""

from collections.abc import Callable

import pytest

from gristmill_contracts.http import Problem, WorkerStatus
from gristmill_contracts.reconciliation import (
    STREAM_KIND,
    ReconPoint,
    SessionTallies,
    Tally,
    differences,
    tally_of,
    worker_differences,
)
from gristmill_contracts.usage import Counts
from gristmill_meter.ports import WorkerLostError
from gristmill_meter.records import SessionState
from gristmill_meter.witness import QUARRELS_MAX, Witness, log_point
from gristmill_testing.ledger import make_event
from gristmill_testing.meter_world import (
    UID,
    World,
    forward_backward,
    sample,
)
from gristmill_testing.metered import mix

ONE = Tally(1, train=5)


def status(ran: dict[str, Tally], *, opening: int = 1, boot: str = "boot-1") -> WorkerStatus:
    return WorkerStatus(
        boot_id=boot,
        model="fake",
        ready=True,
        fingerprint="",
        vocabulary_size=1,
        context_length=1,
        sessions={},
        tallies={UID: SessionTallies(opening=opening, ran=ran)},
        devices=2,
    )


def opened() -> Witness:
    witness = Witness()
    witness.opened("boot-1", 1)
    return witness


def test_at_rest_whatever_the_worker_says_is_set_beside_the_log() -> None:
    witness = opened()
    witness.end(witness.begin(), "forward", ONE)
    witness.heard(witness.mark(), UID, status({}), 7)
    point = witness.point
    assert point is not None
    assert (point.ran, point.logged, point.at_us) == ({}, {"forward": ONE}, 7)
    assert worker_differences(point) == {"forward": ONE}


def test_a_run_under_way_is_no_difference() -> None:
    witness = opened()
    mark = witness.mark()
    run = witness.begin()
    witness.heard(mark, UID, status({"forward": ONE}), 7)
    assert (witness.point, witness.waiting_since_us) == (None, 7)
    witness.end(run, "forward", ONE)
    witness.heard(mark, UID, status({}), 8)
    assert (witness.point, witness.waiting_since_us) == (None, 7)
    witness.heard(mark, UID, status({"forward": ONE}), 9)
    assert witness.point is not None
    assert witness.waiting_since_us is None


def test_a_run_that_began_before_the_worker_was_asked_is_none_either() -> None:
    witness = opened()
    run = witness.begin()
    mark = witness.mark()
    witness.heard(mark, UID, status({"forward": ONE}), 7)
    witness.end(run)
    witness.heard(mark, UID, status({"forward": ONE}), 8)
    assert witness.point is None


@pytest.mark.parametrize(("opening", "boot"), [(2, "boot-1"), (1, "boot-2")])
def test_what_is_told_of_another_opening_is_not_taken(opening: int, boot: str) -> None:
    witness = opened()
    witness.heard(witness.mark(), UID, status({"forward": ONE}, opening=opening, boot=boot), 7)
    assert witness.point is None


def test_a_run_of_an_earlier_opening_is_in_neither() -> None:
    witness = opened()
    run = witness.begin()
    witness.opened("boot-1", 2)
    witness.end(run, "forward", ONE)
    assert (witness.logged, witness.under_way) == ({}, 0)
    witness.cut(run)
    assert (witness.cut_streams, witness.under_way) == (0, 0)


def test_after_a_lost_answer_nothing_is_compared_until_the_next_opening() -> None:
    """The worker has counted what nobody heard of; it runs again, and is counted in the next opening."""
    witness = opened()
    run = witness.begin()
    witness.end(run)
    witness.lost()
    witness.heard(witness.mark(), UID, status({"forward": ONE}), 7)
    assert (witness.point, witness.waiting_since_us) == (None, None)
    witness.opened("boot-1", 2)
    witness.end(witness.begin(), "forward", ONE)
    witness.heard(witness.mark(), UID, status({"forward": ONE}, opening=2), 8)
    assert witness.point is not None
    assert worker_differences(witness.point) == {}


def test_openings_that_differed_are_told_on_and_the_others_are_not() -> None:
    witness = opened()
    for opening in range(2, QUARRELS_MAX + 5):
        witness.heard(witness.mark(), UID, status({"forward": ONE}, opening=opening - 1), 7)
        witness.opened("boot-1", opening)
    witness.heard(witness.mark(), UID, status({}, opening=QUARRELS_MAX + 4), 7)
    witness.opened("boot-1", 99)
    point = witness.recon_point(SessionState(uid=UID), 0)
    assert len(point.workers) == QUARRELS_MAX
    assert point.workers[-1].opening == QUARRELS_MAX + 3


def test_a_worker_that_tells_nothing_is_not_compared() -> None:
    witness = Witness()
    witness.opened("boot-1", 0)
    witness.end(witness.begin(), "forward", ONE)
    quiet = status({})
    quiet.tallies = {}
    witness.heard(witness.mark(), UID, quiet, 7)
    assert witness.point is None


def test_devices_are_held_between_looks_that_find_them_and_busy_as_the_worker_says() -> None:
    witness = opened()
    assert witness.device_time() is None
    looks = [(0, True), (10, True), (20, False), (50, True), (57, True)]
    for boottime_us, ready in looks:
        witness.look(boottime_us, 1000 + boottime_us, ready=ready)
    witness.heard(witness.mark(), UID, status({"forward": Tally(1, device_us=4)}), 7)
    witness.opened("boot-2", 1)
    busy = status({"forward": Tally(1, device_us=3)}, boot="boot-2")
    witness.heard(witness.mark(), UID, busy, 8)
    told = witness.device_time()
    assert told is not None
    assert (told.since_us, told.held_us, told.devices, told.busy_us) == (1000, 17, 2, 7)


# --- a whole meter -------------------------------------------------------------------------------


async def told(world: World) -> ReconPoint:
    """What the meter tells once everything has ended and was heard of."""
    await world.settled()
    witness = world.session.witness
    await world.until(lambda: witness.under_way == 0, "nothing is under way")
    begun = world.session.witness.changes

    def compared() -> bool:
        point = witness.point
        same = witness.changes == begun and point is not None
        return same and point is not None and point.logged == witness.logged

    await world.until(compared, "the worker was asked")
    return witness.recon_point(world.session.state, world.session.log.durable_number)


def ledger_sums(world: World) -> dict[str, Tally]:
    sums: dict[str, Tally] = {}
    for event in world.ledger.events:
        name = f"{event.kind}/{event.operation}"
        sums[name] = sums.get(name, Tally()) + tally_of(event.counts)
    return sums


def agree(point: ReconPoint, world: World) -> bool:
    """Worker = log = ledger."""
    even = all(not worker_differences(each) for each in point.workers)
    return even and differences(point.log.told, ledger_sums(world)) == {}


async def test_worker_log_and_ledger_agree_to_the_token(world: World) -> None:
    await mix(world)
    point = await told(world)
    assert agree(point, world)
    (worker,) = point.workers
    assert worker.ran["forward_backward"].train == 15
    assert worker.ran["sample"].tokens == (6, 12, 24, 0)
    assert worker.ran[STREAM_KIND].tokens == (5, 0, 9, 0)
    assert point.log.seq == world.session.state.head_seq == 10


async def test_they_agree_after_crashes_of_each(make_world: Callable[..., World]) -> None:
    world = await make_world().start()
    number = await mix(world)
    await world.crash()
    number = await mix(world, number)
    world.worker.kill()
    number = await mix(world, number)
    await world.crash(worker=True)
    await mix(world, number)
    point = await told(world)
    assert agree(point, world)
    assert point.log.told["usage/forward_backward"].operations == 12


async def test_they_agree_after_an_answer_was_lost(world: World) -> None:
    """The worker ran it, and its answer did not arrive: it runs again, and is billed once."""
    lost: list[str] = []

    def lose(op_id: str, _operation: object) -> None:
        if not lost:
            lost.append(op_id)
            raise WorkerLostError("the answer was lost")

    await world.train(1, forward_backward(5))
    world.worker.after = lose
    await world.train(2, forward_backward(7, 2))
    await mix(world, 3)
    point = await told(world)
    assert lost
    assert world.worker.runs[f"{UID}/train/2"] == 2
    assert agree(point, world)
    assert point.log.told["usage/forward_backward"] == Tally(5, train=27)


async def test_a_failed_operation_is_in_no_sum(world: World) -> None:
    problem = Problem(code="operation_failed", message="no")
    world.worker.fail[f"{UID}/train/1"] = [problem]
    assert (await world.train(1, forward_backward(5))).state == "Failed"
    await world.train(2, forward_backward(5, 2))
    point = await told(world)
    assert agree(point, world)
    assert point.workers[0].ran == {"forward_backward": Tally(1, train=5, device_us=1000)}


async def test_a_client_that_leaves_a_stream_makes_no_difference(world: World) -> None:
    async def leave(count: int) -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        await world.read_stream(sample(5, 400), leave)
    await mix(world)
    point = await told(world)
    assert agree(point, world)
    assert point.workers[0].cut_streams == 1


async def test_a_worker_that_counts_otherwise_is_seen(world: World) -> None:
    await world.train(1, forward_backward(5))
    book = world.worker.book
    known = book.told()[UID]
    book._sessions[UID] = SessionTallies(
        opening=known.opening, ran=known.ran | {"forward_backward": Tally(1, train=6)}
    )
    point = await told(world)
    await world.until(
        lambda: bool(
            world.session.witness.point and worker_differences(world.session.witness.point)
        ),
        "the difference was told",
    )
    point = world.session.witness.recon_point(world.session.state, 10**6)
    assert worker_differences(point.workers[-1]) == {
        "forward_backward": Tally(train=-1, device_us=1000)
    }


def test_usage_that_is_not_durable_is_not_told() -> None:
    """Its frames may be lost, and its numbers used again for other usage."""
    state = SessionState(uid=UID, head_seq=3, told_after=1)
    for frame, number in ((4, 2), (9, 3)):
        event = make_event(number, counts=Counts(train=number))
        state.events.append((frame, event))
        state.told["usage/sample"] = state.told.get("usage/sample", Tally()) + tally_of(
            event.counts
        )
    for durable, seq, sums in (
        (9, 3, Tally(2, train=5)),
        (8, 2, Tally(1, train=2)),
        (3, 1, Tally()),
    ):
        point = log_point(state, durable)
        assert (point.after, point.seq, point.told) == (1, seq, {"usage/sample": sums})


async def test_the_end_of_a_session_hears_the_last_word_of_its_worker(world: World) -> None:
    await mix(world)
    world.assign(desired="stop")
    await world.until(lambda: world.session.service == "Closed", "the session was closed")
    beat = world.driver.heartbeat(0)
    assert beat.recon is not None
    assert agree(beat.recon, world)
    assert beat.recon.workers[-1].ran["forward_backward"].train == 15


def test_counts_of_an_operation_are_one_of_it() -> None:
    counts = Counts(prefill=1, cached_prefill=2, sample=3, train=4)
    assert tally_of(counts, 5) == Tally(1, 1, 2, 3, 4, 5)
    assert tally_of(None) == Tally(1)
