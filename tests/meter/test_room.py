"""Room on the log's volume: what was accepted finds place for its result, whoever else writes there."""

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest

from gristmill_contracts.errors import LogFullError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.usage import Counts
from gristmill_meter.decisions import result_room_bytes
from gristmill_meter.intake import submit_operation
from gristmill_testing.meter_world import World, forward_backward, make_submit

MakeWorld = Callable[..., World]
MIN = 1000
"""What must stay free."""
OTHER = SessionUid("other-session")
FIRST, SECOND = forward_backward(30_000, 1), forward_backward(20_000, 2)
PAYLOADS = [len(msgspec.msgpack.encode(each)) for each in (FIRST, SECOND)]
ROOMS = [result_room_bytes(each, 0) for each in (FIRST, SECOND)]


async def test_an_operation_must_find_place_for_itself_and_its_result(
    make_world: MakeWorld,
) -> None:
    world = await make_world(log_free_bytes_min=MIN).start()
    await world.settled()
    world.disk.free = MIN + PAYLOADS[0] + ROOMS[0] - 1
    with pytest.raises(LogFullError, match=str(PAYLOADS[0] + ROOMS[0])):
        await world.submit(1, FIRST)
    world.disk.free += 1
    assert (await world.train(1, FIRST)).state == "Completed"


async def test_what_is_on_its_way_to_the_volume_has_its_place_there(make_world: MakeWorld) -> None:
    """The volume still shows as free what the first operation is just about to take."""
    world = await make_world(log_free_bytes_min=MIN).start()
    await world.settled()
    gate = threading.Event()

    def slow(verb: str, path: str, content: bytes) -> None:
        if path.endswith("train-1.op"):
            gate.wait(60)

    world.disk.hook = slow
    first = asyncio.create_task(world.submit(1, FIRST))
    await world.until(lambda: world.session.state.records.get(("train", 1)) is not None)
    assert world.session.log.unwritten_bytes > PAYLOADS[0]
    world.disk.free = MIN + ROOMS[0] + PAYLOADS[1] + ROOMS[1] + PAYLOADS[0]
    try:
        with pytest.raises(LogFullError):
            await world.submit(2, SECOND)
    finally:
        gate.set()
    assert not (await first).duplicate
    world.disk.free = 10**9
    assert (await world.train(2, SECOND)).state == "Completed"
    await world.settled()
    assert world.session.log.unwritten_bytes == 0
    assert world.ledger.billed() == Counts(train=50_000)


async def test_sessions_on_one_volume_do_not_promise_the_same_place_twice(
    make_world: MakeWorld,
) -> None:
    world = await make_world(log_free_bytes_min=MIN).start()
    assert world.meter is not None
    drivers = world.meter.drivers
    world.assign(OTHER)
    await world.until(lambda: OTHER in drivers and drivers[OTHER].session.serves, "both serve")
    gate = asyncio.Event()
    world.worker.before = lambda op_id, operation: gate.wait()
    await world.submit(1, FIRST)
    world.disk.free = MIN + PAYLOADS[1] + ROOMS[1] + ROOMS[0] - 1
    submit, encoded = make_submit(1, SECOND), msgspec.msgpack.encode(SECOND)
    with pytest.raises(LogFullError):
        await submit_operation(drivers[OTHER].session, submit, encoded)
    gate.set()
    assert (await world.poll("train", 1)).state == "Completed"
    # Its result took its own place, which is no longer promised.
    world.disk.free = MIN + PAYLOADS[1] + ROOMS[1] + ROOMS[0] - 1
    taken = await submit_operation(drivers[OTHER].session, submit, encoded)
    assert (taken.number, taken.duplicate) == (1, False)
