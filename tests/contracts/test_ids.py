"""Ids that are pure functions of other ids."""

import uuid

from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts.ids import EVENT_NAMESPACE, OpId, SessionUid, event_id

GOLDEN = "16c2c3dd-34f7-591c-b153-6b4cc36071e9"


@given(st.text(max_size=40), st.integers(0, 2**63 - 1), st.integers(0, 9))
def test_an_event_id_is_the_uuid_of_its_operation(session: str, number: int, n: int) -> None:
    op = OpId(SessionUid(session), "train", number)
    expected = uuid.uuid5(EVENT_NAMESPACE, f"{op}/usage/{n}")
    assert event_id(op, "usage", n) == str(expected)
    assert uuid.UUID(event_id(op, "usage", n)).version == 5


def test_event_ids_are_frozen() -> None:
    op = OpId(SessionUid("s-1"), "log", 1)
    assert event_id(op, "usage") == GOLDEN
