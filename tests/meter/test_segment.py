"""Bytes of a log segment: torn tails are cut, damage to what was durable is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts import limits
from gristmill_contracts.errors import VolumeFailedError
from gristmill_meter.segment import (
    FRAME_HEADER_BYTES,
    HEADER_BYTES,
    pack_frame,
    read_segment,
    segment_header,
)

payload_lists = st.lists(st.binary(max_size=200), max_size=12)


def packed(payloads: list[bytes], first: int = 1, durable: int = 0) -> bytes:
    frames = [pack_frame(first + at, durable, payload) for at, payload in enumerate(payloads)]
    return segment_header(first) + b"".join(frames)


@given(payload_lists, st.integers(1, 10**6))
def test_what_was_written_is_read(payloads: list[bytes], first: int) -> None:
    segment = read_segment(packed(payloads, first))
    assert segment is not None
    assert (segment.first, segment.payloads) == (first, payloads)
    assert segment.end == len(packed(payloads, first))


@given(payload_lists, st.data())
def test_a_torn_tail_leaves_the_whole_frames_before_it(
    payloads: list[bytes], data: st.DataObject
) -> None:
    content = packed(payloads)
    cut = data.draw(st.integers(HEADER_BYTES, len(content)))
    segment = read_segment(content[:cut])
    assert segment is not None
    assert segment.payloads == payloads[: len(segment.payloads)]
    sizes = [FRAME_HEADER_BYTES + len(payload) for payload in segment.payloads]
    assert segment.end == HEADER_BYTES + sum(sizes) <= cut
    if len(segment.payloads) < len(payloads):
        assert segment.end + FRAME_HEADER_BYTES + len(payloads[len(sizes)]) > cut


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=8), st.data())
def test_a_flipped_bit_never_changes_what_is_read(
    payloads: list[bytes], data: st.DataObject
) -> None:
    content = bytearray(packed(payloads))
    at = data.draw(st.integers(HEADER_BYTES, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    segment = read_segment(bytes(content))
    assert segment is not None
    assert segment.payloads == payloads[: len(segment.payloads)]
    assert len(segment.payloads) < len(payloads)


@pytest.mark.parametrize("size", range(HEADER_BYTES))
def test_a_segment_without_a_whole_header_holds_nothing(size: int) -> None:
    assert read_segment(packed([b"x"])[:size]) is None


def test_later_frames_prove_that_a_broken_one_had_been_durable() -> None:
    content = bytearray(
        segment_header(1)
        + pack_frame(1, 0, b"one")
        + pack_frame(2, 1, b"two")
        + pack_frame(3, 2, b"three")
    )
    content[HEADER_BYTES + FRAME_HEADER_BYTES] ^= 1
    segment = read_segment(bytes(content))
    assert segment is not None
    assert (segment.payloads, segment.damaged_after) == ([], 2)


def test_frames_of_one_unsynced_batch_prove_nothing_of_each_other() -> None:
    content = bytearray(packed([b"one", b"two", b"three"], durable=0))
    content[HEADER_BYTES + FRAME_HEADER_BYTES] ^= 1
    segment = read_segment(bytes(content))
    assert segment is not None
    assert segment.damaged_after == 0


def test_a_frame_that_no_reader_would_take_is_not_written() -> None:
    with pytest.raises(VolumeFailedError, match="at most"):
        pack_frame(1, 0, b"x" * (limits.FRAME_BYTES_MAX + 1))
