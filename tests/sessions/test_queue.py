"""Who of a tenant's sessions may run: first come, first served, and never more than the quota admits."""

from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts.session import TrainingSession
from gristmill_sessions.queue import holds_place, is_over, position, waits
from gristmill_testing.worlds import condition, session


def one(
    number: int, *conditions: Any, attempt: int = 0, created_us: int | None = None, **spec: Any
) -> TrainingSession:
    made = session(*conditions, status={"attempt": attempt}, **spec)
    at = {"uid": f"uid-{number}", "creation_time_us": number if created_us is None else created_us}
    return made.model_copy(update={"metadata": made.metadata.model_copy(update=at)})


REFUSED = condition("Accepted", "False", "ModelNotFound")


def test_without_a_bound_nobody_waits() -> None:
    assert position(one(1), [one(1), one(2)], None) is None


def test_the_first_that_came_run_and_the_others_have_their_places() -> None:
    all_of_them = [one(3), one(1), one(4), one(2)]
    assert [position(one(n), all_of_them, 2) for n in (1, 2, 3, 4)] == [None, None, 1, 2]


def test_of_two_that_came_at_once_the_order_is_fixed() -> None:
    both = [one(1, created_us=7), one(2, created_us=7)]
    assert [position(each, both, 1) for each in both] == [None, 1]


def test_one_that_runs_keeps_its_place_whoever_came_earlier() -> None:
    late, early = one(9, attempt=1), one(1)
    assert position(late, [late, early], 1) is None
    assert position(early, [late, early], 1) == 1


def test_the_end_of_one_lets_the_next_in() -> None:
    for end in ("Failed", "Expired", "Stopped"):
        over = one(1, condition(end), attempt=1)
        assert is_over(over)
        assert not holds_place(over)
        assert position(one(2), [over, one(2)], 1) is None


def test_one_that_is_being_deleted_keeps_its_place_until_it_is_gone() -> None:
    going = one(1, attempt=1, deleted_us=5)
    assert position(one(2), [going, one(2)], 1) == 1


def test_what_wants_no_place_stands_in_nobodys_way() -> None:
    idle = [
        one(1, REFUSED),
        one(2, desired_state="Stopped"),
        one(3, desired_state="Parked"),
        one(4, deleted_us=5),
        one(5, condition("Failed")),
    ]
    assert not any(waits(each) for each in idle)
    assert position(one(9), [*idle, one(9)], 1) is None


def test_one_that_was_refused_gets_the_place_that_its_age_gives_it_once_it_is_not() -> None:
    refused, later = one(1, REFUSED), one(2)
    assert position(refused, [refused, later], 1) is None
    assert position(refused, [refused, one(3, attempt=1)], 1) == 1


def test_a_quota_of_none_makes_all_wait() -> None:
    assert [position(one(n), [one(1), one(2)], 0) for n in (1, 2)] == [1, 2]


def test_a_place_that_was_just_given_is_not_given_again() -> None:
    """Though the status that says so is still on its way."""
    older = one(1)
    assert position(older, [older, one(2)], 1, held={"uid-2"}) == 1
    assert position(one(2), [older, one(2)], 1, held={"uid-2"}) is None


@given(
    seed=st.integers(min_value=0, max_value=2**32),
    count=st.integers(min_value=1, max_value=8),
    maximum=st.integers(min_value=0, max_value=4),
)
def test_never_more_than_the_quota_admits_run_in_whatever_order_they_are_asked(
    seed: int, count: int, maximum: int
) -> None:
    """Each is asked in turn, and those that may run take their place; the statuses are seen late."""
    random = Random(seed)
    seen = [
        one(n, *([REFUSED] if random.random() < 0.3 else []), created_us=random.randrange(3))
        for n in range(count)
    ]
    held: set[str] = set()
    for each in random.sample(seen, k=count) * 2:
        if position(each, seen, maximum, held) is None:
            held.add(each.metadata.uid)
        assert len(held) <= maximum
    assert len(held) == min(maximum, count)
