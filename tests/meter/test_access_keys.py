"""Usage names the access key that its operation was submitted with, whatever happens between."""

import msgspec

from gristmill_contracts import operations as ops
from gristmill_contracts.usage import Counts
from gristmill_meter import frames
from gristmill_meter.intake import submit_operation
from gristmill_testing.meter_world import World, forward_backward, make_submit, sample

KEY = "AKIAACME00000001"


async def submit(world: World, number: int | None, operation: ops.Operation, key: str) -> int:
    message = msgspec.structs.replace(make_submit(number, operation), key=key)
    encoded = msgspec.msgpack.encode(operation)
    return (await submit_operation(world.session, message, encoded)).number


async def test_each_operation_is_told_with_its_own_key(world: World) -> None:
    await submit(world, 1, forward_backward(5), KEY)
    await submit(world, 2, forward_backward(6), "AKIAACME00000002")
    claimed = await submit(world, None, sample(), KEY)
    await world.poll("train", 2)
    await world.poll("log", claimed)
    await world.settled()
    keys = {(event.stream, event.number): event.key for event in world.ledger.events}
    assert keys == {("train", 1): KEY, ("train", 2): "AKIAACME00000002", ("log", claimed): KEY}


async def test_a_repeat_with_another_key_is_the_first_ones_operation(world: World) -> None:
    await submit(world, 1, forward_backward(5), KEY)
    await submit(world, 1, forward_backward(5), "AKIAACME00000002")
    await world.poll("train", 1)
    await world.settled()
    assert [event.key for event in world.ledger.events] == [KEY]


async def test_the_key_survives_a_crash_between_acceptance_and_fetch(world: World) -> None:
    number = await submit(world, None, sample(), KEY)
    await world.until(lambda: world.session.state.records["log", number].terminal)
    await world.crash()
    await world.poll("log", number)
    await world.settled()
    assert [event.key for event in world.ledger.events] == [KEY]


def test_an_intent_of_before_there_were_keys_still_reads() -> None:
    intent = frames.Intent(
        stream="log",
        number=1,
        kind="sample",
        body_hash=b"",
        client_token=None,
        payload=frames.Body(size=0, crc=0, inline=b""),
        counts=Counts(),
        room_bytes=1,
        streaming=False,
        at_us=1,
        key=KEY,
    )
    fields = msgspec.msgpack.decode(frames.encode_frame(intent))
    del fields["key"]
    older = frames.decode_frame(msgspec.msgpack.encode(fields))
    assert older == msgspec.structs.replace(intent, key="")
