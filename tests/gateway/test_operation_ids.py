"""Operation ids: every one is read back by its session alone, and nobody else makes one."""

import re
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError, NotFoundError
from gristmill_contracts.ids import OpId, SessionUid, Stream
from gristmill_gateway.keys import KEY_BYTES, derived_key, load_or_create_key
from gristmill_gateway.operation_ids import make_operation_id, read_operation_id

KEY = b"k" * 32
UIDS = st.uuids().map(lambda value: SessionUid(str(value))) | st.text(min_size=1, max_size=50).map(
    SessionUid
)
STREAMS: st.SearchStrategy[Stream] = st.sampled_from(["train", "log"])
NUMBERS = st.integers(1, limits.SEQUENCE_NUMBER_MAX)
SESSION = SessionUid(str(uuid.UUID(int=7)))


@given(UIDS, STREAMS, NUMBERS)
def test_an_id_is_read_back_and_fits_the_wire(uid: SessionUid, stream: Stream, number: int) -> None:
    text = make_operation_id(KEY, OpId(uid, stream, number))
    assert re.fullmatch("[a-zA-Z0-9-]{1,64}", text)
    assert read_operation_id(KEY, text, uid, stream) == OpId(uid, stream, number)


@given(STREAMS, NUMBERS, st.data())
def test_an_id_with_one_other_character_is_refused(
    stream: Stream, number: int, data: st.DataObject
) -> None:
    text = make_operation_id(KEY, OpId(SESSION, stream, number))
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(
        st.sampled_from("abcdefghijklmnopqrstuvwxyz234567A-0/").filter(lambda c: c != text[at])
    )
    with pytest.raises(NotFoundError):
        read_operation_id(KEY, text[:at] + other + text[at + 1 :], SESSION, stream)


@given(st.text(max_size=80))
def test_made_up_text_is_refused(text: str) -> None:
    with pytest.raises(NotFoundError, match="operationId that its submit"):
        read_operation_id(KEY, text, SESSION, "train")


def test_an_id_is_good_for_its_own_key_session_and_stream_alone() -> None:
    text = make_operation_id(KEY, OpId(SESSION, "train", 3))
    for key, session, stream in (
        (b"x" * 32, SESSION, "train"),
        (KEY, SessionUid(str(uuid.UUID(int=8))), "train"),
        (KEY, SESSION, "log"),
    ):
        with pytest.raises(NotFoundError):
            read_operation_id(key, text, session, stream)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        read_operation_id(KEY, text.upper(), SESSION, "train")


def test_a_key_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "operation.key"
    key = load_or_create_key(path)
    assert len(key) == KEY_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_create_key(path) == key
    assert [each.name for each in path.parent.iterdir()] == ["operation.key"]


def test_a_key_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "operation.key"
    path.write_bytes(b"short")
    with pytest.raises(InvalidRequestError, match="5 bytes"):
        load_or_create_key(path)


def test_keys_for_two_purposes_differ() -> None:
    assert derived_key(KEY, "operation-id") != derived_key(KEY, "page-token") != KEY
