"""How a list of conditions changes: only what is new moves."""

from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts.conditions import condition, find, is_true, merge
from gristmill_contracts.resources import Condition

CHANGES = st.lists(
    st.builds(
        condition,
        st.sampled_from(["Ready", "Serving", "Blocked"]),
        st.sampled_from([True, False, None]),
        st.sampled_from(["A", "B"]),
        st.sampled_from(["", "why"]),
    ),
    max_size=6,
)


def at(time_us: int, *changes: Condition, known: list[Condition] | None = None) -> list[Condition]:
    return merge(known or [], changes, now_us=time_us, generation=1)


def test_the_time_moves_only_where_the_status_changes() -> None:
    first = at(5, condition("Ready", True, "Serving"))
    second = at(9, condition("Ready", True, "Other"), known=first)
    third = at(11, condition("Ready", False, "Other"), known=second)
    assert [each[0].last_transition_time_us for each in (first, second, third)] == [5, 5, 11]
    assert [each[0].reason for each in (first, second, third)] == ["Serving", "Other", "Other"]


def test_conditions_that_are_not_named_are_kept() -> None:
    foreign = Condition(type="SomebodyElses", status="True", reason="Theirs")
    merged = at(5, condition("Ready", True, "Serving"), known=[foreign])
    assert merged[0] == foreign
    assert find(merged, "Ready") is not None


def test_unknown_is_neither_true_nor_absent() -> None:
    merged = at(5, condition("Ready", None, "Silent"))
    assert not is_true(merged, "Ready")
    assert merged[0].status == "Unknown"
    assert find(merged, "Serving") is None


@given(CHANGES, CHANGES)
def test_merging_twice_is_merging_once(before: list[Condition], changes: list[Condition]) -> None:
    known = at(1, *before)
    once = at(2, *changes, known=known)
    last = {each.type: each for each in changes}.values()
    assert at(3, *last, known=once) == once
    types = [each.type for each in once]
    assert len(types) == len(set(types))
