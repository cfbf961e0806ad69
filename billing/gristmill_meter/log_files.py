"""The files of a session's log, read back: which frames there are, and whether any that was durable is gone.

A log begins with segment 1, or, where older segments were removed, with one that begins with a CHECKPOINT.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from gristmill_contracts.errors import LogLostError
from gristmill_meter.disk import Disk
from gristmill_meter.frames import Checkpoint, Frame, decode_frame
from gristmill_meter.segment import crc32c, proven_durable, read_segment

TOLD_FILE: Final = "durable"
_CELL: Final = struct.Struct("<QI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A segment that begins with a CHECKPOINT: its first frame, and the oldest usage from there on."""

    frame: int
    first_seq: int


@dataclass(slots=True, kw_only=True)
class LogContent:
    """`payloads[i]` is frame `first + i`. The newest segment ends at `end` of its `size` bytes."""

    first: int = 1
    payloads: list[bytes]
    starts: dict[int, Start]
    """Segment number -> how it begins, for those that begin with a CHECKPOINT."""
    segment: int = 0
    end: int = 0
    size: int = 0

    @property
    def last(self) -> int:
        return self.first + len(self.payloads) - 1


def segment_path(folder: str, number: int) -> str:
    return f"{folder}/log-{number:08d}.seg"


def segment_numbers(disk: Disk, folder: str) -> list[int]:
    return [int(name[4:12]) for name in disk.list(folder) if name.startswith("log-")]


def read_log(disk: Disk, folder: str, *, told: int = 0) -> LogContent:
    """All whole frames. A segment takes over from its first frame on: see `SessionLog._write`.

    told: up to this number frames are known to have been durable. Raises LogLostError where one of
    them, or one that later frames prove to have been so, is missing.
    """
    content = LogContent(payloads=[], starts={})
    damaged_after = 0
    for number in segment_numbers(disk, folder):
        read = disk.read(segment_path(folder, number))
        segment = read_segment(read)
        if segment is None:
            # It was being begun; unless its frames say that more had been durable.
            _check(folder, content, proven_durable(read, 0))
            continue
        start = _start_of(folder, segment.first, segment.payloads)
        if content.segment == 0 and start is not None:
            content.first = segment.first
        if segment.first > content.last + 1:
            raise lost(folder, content.last + 1, segment.first - 1)
        content.payloads[segment.first - content.first :] = segment.payloads
        content.segment, content.end, content.size = number, segment.end, len(read)
        damaged_after = segment.damaged_after
        if start is not None:
            content.starts[number] = start
    _check(folder, content, max(damaged_after, told))
    return content


def _start_of(folder: str, first: int, payloads: list[bytes]) -> Start | None:
    frame = decode(folder, first, payloads[0]) if payloads else None
    if not isinstance(frame, Checkpoint):
        return None
    return Start(frame=first, first_seq=frame.first_seq)


def _check(folder: str, content: LogContent, proven: int) -> None:
    if proven > content.last:
        raise lost(folder, content.last + 1, proven)


def read_frame(disk: Disk, folder: str, number: int) -> Frame:
    """One durable frame. Raises LogLostError where no segment holds it."""
    for segment_number in reversed(segment_numbers(disk, folder)):
        segment = read_segment(disk.read(segment_path(folder, segment_number)))
        if segment is not None and segment.first <= number:
            if number - segment.first >= len(segment.payloads):
                break
            return decode(folder, number, segment.payloads[number - segment.first])
    raise lost(folder, number, number)


def decode(folder: str, number: int, payload: bytes) -> Frame:
    try:
        return decode_frame(payload)
    except msgspec.MsgspecError as error:
        raise LogLostError(
            f"frame {number} of log {folder} is whole but unknown to this version: {error}"
        ) from error


def lost(folder: str, first: int, last: int) -> LogLostError:
    return LogLostError(
        f"log {folder} lost frames {first} to {last}, which had been durable; restore the volume"
    )


def pack_told(durable: int) -> bytes:
    """What the file `durable` says: how far the log was durable when it was last written."""
    content = struct.pack("<Q", durable)
    return content + struct.pack("<I", crc32c(content))


def read_told(content: bytes) -> int:
    """0 for a file that is torn: it is never synced, and proves something only where it is whole."""
    if len(content) != _CELL.size:
        return 0
    durable, crc = _CELL.unpack(content)
    return int(durable) if crc == crc32c(content[:8]) else 0


def told_of(disk: Disk, folder: str) -> int:
    if TOLD_FILE not in disk.list(folder):
        return 0
    return read_told(disk.read(f"{folder}/{TOLD_FILE}"))


def epoch_of(disk: Disk, folder: str, epoch_if_new: int, *, fresh: bool) -> int:
    """The epoch that the log was begun with; a `fresh` one gets it now, durably."""
    path = f"{folder}/epoch"
    if "epoch" in disk.list(folder):
        return int(disk.read(path))
    if not fresh:
        raise LogLostError(f"log {folder} has frames but no epoch file; restore the volume")
    write_file(disk, f"{path}.tmp", str(epoch_if_new).encode())
    disk.rename(f"{path}.tmp", path)
    disk.fsync_dir(folder)
    return epoch_if_new


def write_file(disk: Disk, path: str, content: bytes) -> None:
    """Write a file whole and sync it; its name is durable once its folder is synced."""
    disk.remove(path)  # A half-written one of an earlier try, or of a crash.
    file = disk.open_append(path)
    try:
        file.write(content)
        file.fsync()
    finally:
        file.close()


def bytes_since_start(frames: Sequence[Frame], payloads: Sequence[bytes]) -> int:
    """Bytes behind the last CHECKPOINT."""
    total = 0
    for frame, payload in zip(reversed(frames), reversed(payloads), strict=True):
        if isinstance(frame, Checkpoint):
            break
        total += len(payload)
    return total
