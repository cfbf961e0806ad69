"""The bytes of a log segment: a header, then frames, each with its number and a CRC32C.

A frame also says up to which frame the log was durable when it was written. A frame that cannot be
read is a torn tail, to be cut, unless a later one proves that it had once been durable.
"""

import struct
from dataclasses import dataclass
from typing import Final

import google_crc32c

from gristmill_contracts import limits
from gristmill_contracts.errors import VolumeFailedError

MAGIC: Final = b"GMLOG\x00\x00\x01"
MARK: Final = b"\xa7GMF"
_SEGMENT: Final = struct.Struct("<8sQI")
_FRAME: Final = struct.Struct("<4sIIQQ")
_COVERED: Final = struct.Struct("<IQQ")
HEADER_BYTES: Final = _SEGMENT.size
FRAME_HEADER_BYTES: Final = _FRAME.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What could be read of a segment: `payloads[i]` is frame `first + i`; `end` is where it stops.

    `damaged_after`: the highest frame number that later bytes prove to have been durable, 0 = none.
    """

    first: int
    payloads: list[bytes]
    end: int
    damaged_after: int


def crc32c(payload: bytes) -> int:
    return int(google_crc32c.value(payload))


def segment_header(first: int) -> bytes:
    """Header of a segment whose first frame has number `first`."""
    return _SEGMENT.pack(MAGIC, first, crc32c(struct.pack("<Q", first)))


def pack_frame(number: int, durable: int, payload: bytes) -> bytes:
    """One frame. Raises VolumeFailedError for a payload that readers would refuse."""
    if len(payload) > limits.FRAME_BYTES_MAX:
        raise VolumeFailedError(
            f"frame {number} has {len(payload)} bytes; at most {limits.FRAME_BYTES_MAX} are allowed"
        )
    crc = crc32c(_COVERED.pack(len(payload), number, durable) + payload)
    return _FRAME.pack(MARK, len(payload), crc, number, durable) + payload


def read_segment(content: bytes) -> Segment | None:
    """Read frames until the first that is not whole. None if not even the header is."""
    if len(content) < HEADER_BYTES:
        return None
    magic, first, crc = _SEGMENT.unpack_from(content)
    if magic != MAGIC or crc != crc32c(struct.pack("<Q", first)):
        return None
    payloads: list[bytes] = []
    at = HEADER_BYTES
    while (frame := _read_frame(content, at)) is not None and frame[0] == first + len(payloads):
        payloads.append(frame[2])
        at += FRAME_HEADER_BYTES + len(frame[2])
    return Segment(
        first=first, payloads=payloads, end=at, damaged_after=proven_durable(content, at)
    )


def _read_frame(content: bytes, at: int) -> tuple[int, int, bytes] | None:
    """(number, durable, payload) of the frame at a position, or None."""
    if at + FRAME_HEADER_BYTES > len(content):
        return None
    mark, size, crc, number, durable = _FRAME.unpack_from(content, at)
    end = at + FRAME_HEADER_BYTES + size
    if mark != MARK or size > limits.FRAME_BYTES_MAX or end > len(content):
        return None
    payload = content[at + FRAME_HEADER_BYTES : end]
    if crc != crc32c(_COVERED.pack(size, number, durable) + payload):
        return None
    return number, durable, payload


def proven_durable(content: bytes, at: int) -> int:
    """Highest `durable` that a whole frame behind the unreadable position names."""
    highest = 0
    while (at := content.find(MARK, at + 1)) != -1:
        frame = _read_frame(content, at)
        if frame is not None:
            highest = max(highest, frame[1])
    return highest
