"""The log on a disk that forgets, fails and fills up."""

import asyncio
import errno
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_contracts import limits
from gristmill_contracts.errors import LogLostError, VolumeFailedError
from gristmill_meter.frames import Claim, Frame, encode_frame
from gristmill_meter.log import SessionLog
from gristmill_testing.fake_disk import FakeDisk


def claim(number: int) -> Claim:
    return Claim(number=number, at_us=number)


def opened(disk: FakeDisk) -> tuple[SessionLog, list[Frame]]:
    log = SessionLog(disk=disk, folder="s")
    return log, log.recover(epoch_if_new=7)


def append(log: SessionLog, number: int) -> int:
    return log.append(encode_frame(claim(number)))


def fsyncs(disk: FakeDisk) -> int:
    return sum(call[0] == "fsync" and call[1].endswith(".seg") for call in disk.calls)


async def test_f36_durable_frames_survive_a_power_failure_and_others_do_not() -> None:
    disk = FakeDisk()
    log, _ = opened(disk)
    await log.durable(append(log, 1))
    gate = threading.Event()
    disk.hook = lambda verb, path, content: gate.wait(5) if verb == "fsync" else None
    number = append(log, 2)
    await asyncio.sleep(0)
    survivor = disk.crash()
    gate.set()
    await log.durable(number)
    assert opened(survivor)[1] == [claim(1)]
    assert opened(disk.crash())[1] == [claim(1), claim(2)]


async def test_frames_that_come_while_a_write_is_in_flight_share_the_next_one() -> None:
    disk = FakeDisk()
    log, _ = opened(disk)
    gate = threading.Event()
    disk.hook = lambda verb, path, content: gate.wait(5) if verb == "fsync" else None
    before = fsyncs(disk)
    numbers = [append(log, 1)]
    while fsyncs(disk) == before:
        await asyncio.sleep(0.001)
    numbers += [append(log, number) for number in range(2, 101)]
    gate.set()
    await asyncio.gather(*(log.durable(number) for number in numbers))
    assert fsyncs(disk) == before + 2


async def test_after_a_failed_fsync_the_frames_go_into_a_new_segment() -> None:
    disk = FakeDisk()
    log, _ = opened(disk)
    await log.durable(append(log, 1))
    disk.fail_fsyncs = 1
    await log.durable(append(log, 2))
    await log.durable(append(log, 3))
    assert disk.list("s") == ["durable", "epoch", "log-00000001.seg", "log-00000002.seg"]
    for survivor in (disk.crash(), disk.crash(random.Random(1)), disk.killed()):
        assert opened(survivor)[1] == [claim(1), claim(2), claim(3)]


async def test_when_that_fails_too_nothing_is_released_and_nothing_more_accepted() -> None:
    disk = FakeDisk()
    log, _ = opened(disk)
    await log.durable(append(log, 1))
    disk.fail_fsyncs = 2
    with pytest.raises(VolumeFailedError):
        await log.durable(append(log, 2))
    with pytest.raises(VolumeFailedError):
        append(log, 3)
    assert log.durable_number == 1
    assert opened(disk.crash())[1] == [claim(1)]


async def test_a_full_volume_is_tried_again_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gristmill_meter.log.FULL_RETRY_S", 0.01)
    disk = FakeDisk()
    log, _ = opened(disk)
    await log.durable(append(log, 1))
    disk.free = 10
    number = append(log, 2)
    while not log.full:
        await asyncio.sleep(0.001)
    assert log.durable_number == 1
    disk.free = 10**6
    await log.durable(number)
    assert not log.full
    assert opened(disk.crash())[1] == [claim(1), claim(2)]
    assert disk.list("s") == ["durable", "epoch", "log-00000001.seg"]


async def test_a_large_body_is_durable_before_the_frame_that_names_it() -> None:
    disk = FakeDisk()
    log, _ = opened(disk)
    content = b"x" * (limits.INLINE_PAYLOAD_BYTES_MAX + 1)
    body, blob = log.make_body("train-1.op", content)
    order: list[str] = []
    disk.hook = lambda verb, path, _: order.append(f"{verb} {path.rpartition('/')[2]}")
    await log.durable(log.append(encode_frame(claim(1)), blob))
    durable = order.index("fsync_dir blobs")
    assert order.index("fsync train-1.op") < durable < order.index("write log-00000001.seg")
    again = SessionLog(disk=disk.crash(), folder="s")
    assert await again.read_body(body) == content


async def test_a_changed_blob_is_not_taken_for_the_recorded_one() -> None:
    disk = FakeDisk()
    log, _ = opened(disk)
    body, blob = log.make_body("train-1.op", b"x" * 20_000)
    await log.durable(log.append(encode_frame(claim(1)), blob))
    disk.files["s/blobs/train-1.op"].content[5] ^= 4
    with pytest.raises(VolumeFailedError, match="checksum"):
        await log.read_body(body)


async def test_damage_to_what_was_durable_is_told_and_not_cut() -> None:
    disk = FakeDisk()
    log, _ = opened(disk)
    for number in range(1, 6):
        await log.durable(append(log, number))
    survivor = disk.crash()
    content = survivor.files["s/log-00000001.seg"].content
    content[content.index(b"claim")] ^= 1
    with pytest.raises(LogLostError, match="frames 1 to 4"):
        opened(survivor)


@pytest.mark.parametrize("fate", ["power failure", "kill -9"])
async def test_a_segment_that_was_just_being_begun_hides_nothing(fate: str) -> None:
    disk = FakeDisk()
    log, _ = opened(disk)
    await log.durable(append(log, 1))
    survivor = disk.crash() if fate == "power failure" else disk.killed()
    survivor.open_append("s/log-00000002.seg").write(b"GML")
    log, frames = opened(survivor)
    assert frames == [claim(1)]
    await log.durable(append(log, 2))
    assert opened(survivor.crash())[1] == [claim(1), claim(2)]


async def test_what_recovery_finds_unsynced_is_durable_before_it_counts() -> None:
    """After kill -9 the page cache may hold frames that no fsync has reached."""
    disk = FakeDisk()
    log, _ = opened(disk)
    await log.durable(append(log, 1))
    survivor = disk.crash()
    await log.durable(append(log, 2))
    cached = disk.files["s/log-00000001.seg"].content
    survivor.files["s/log-00000001.seg"].content = bytearray(cached)
    assert opened(survivor)[1] == [claim(1), claim(2)]
    assert opened(survivor.crash())[1] == [claim(1), claim(2)]


async def test_a_broken_header_over_durable_frames_is_told() -> None:
    disk = FakeDisk()
    log, _ = opened(disk)
    for number in (1, 2, 3):
        await log.durable(append(log, number))
    survivor = disk.crash()
    survivor.files["s/log-00000001.seg"].content[3] ^= 1
    with pytest.raises(LogLostError):
        opened(survivor)


async def test_a_missing_segment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES_MAX", 100)
    disk = FakeDisk()
    log, _ = opened(disk)
    for number in range(1, 10):
        await log.durable(append(log, number))
    assert opened(disk.crash())[1] == [claim(number) for number in range(1, 10)]
    survivor = disk.crash()
    survivor.remove("s/log-00000002.seg")
    with pytest.raises(LogLostError):
        opened(survivor)


async def test_the_epoch_stays_with_the_log() -> None:
    disk = FakeDisk()
    log, _ = opened(disk)
    await log.durable(append(log, 1))
    again = SessionLog(disk=disk.crash(), folder="s")
    again.recover(epoch_if_new=99)
    assert again.epoch == 7


@given(st.lists(st.integers(0, 3), min_size=1, max_size=15), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_no_acknowledged_frame_is_lost_whatever_tears(steps: list[int], seed: int) -> None:
    """Append, sometimes wait, crash with a torn tail, recover, go on: acknowledged frames stay."""

    async def run() -> None:
        disk, chance, number = FakeDisk(), random.Random(seed), 0
        log, _ = opened(disk)
        acknowledged: list[Claim] = []
        for step in steps:
            for _ in range(step + 1):
                number += 1
                append(log, number)
            if chance.random() < 0.3:
                disk.fail_fsyncs = 1
            if step:
                await log.durable(log.appended_number)
            else:
                await asyncio.sleep(0)
            durable = log.durable_number
            survivor = disk.crash(chance)
            await log.close()
            disk = survivor
            log, frames = opened(disk)
            assert len(frames) >= durable
            assert frames[: len(acknowledged)] == acknowledged
            acknowledged = [frame for frame in frames if isinstance(frame, Claim)]
            number = acknowledged[-1].number if acknowledged else 0
            assert [frame.number for frame in acknowledged] == list(range(1, number + 1))
        await log.close()

    asyncio.run(run())


async def test_a_disk_that_cannot_be_written_at_all_fails_the_log() -> None:
    disk = FakeDisk()
    log, _ = opened(disk)

    def refuse(verb: str, path: str, content: bytes) -> None:
        if verb == "write":
            raise OSError(errno.EROFS, "read-only")

    disk.hook = refuse
    with pytest.raises(VolumeFailedError, match="read-only"):
        await log.durable(append(log, 1))
