"""The table of states: every row by an example, every order between two rows that both match."""

from itertools import combinations
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts.resources import Condition
from gristmill_contracts.session import State, TrainingSessionSpec
from gristmill_sessions.state import TABLE, derive_state
from gristmill_testing.worlds import condition

Given = tuple[list[Condition], str, bool]
"""Conditions, desiredState, whether deletion was asked for."""

FLUSH_FAILED = condition("Deleted", "False", "FlushFailed")
POD_STUCK = condition("Deleted", "False", "PodStuckTerminating")
VOLUME_IN_USE = condition("Deleted", "False", "VolumeInUse")
IN_PROGRESS = condition("Deleted", "False", "InProgress")
FAILED = condition("Failed")
EXPIRED = condition("Expired")
STOPPED = condition("Stopped")
STOPPING = condition("Stopped", "False", "Stopping")
STARTED = condition("Started")
BLOCKED = condition("Blocked", reason="SequenceGap")
QUOTA = condition("QuotaReserved")
PODS_PENDING = condition("PodsReady", "False", "Unschedulable")
PODS_READY = condition("PodsReady")
PARKED = condition("Parked")

EXAMPLES: list[tuple[State, Given]] = [
    ("DeletionFailed", ([FLUSH_FAILED], "Running", True)),
    ("DeletionFailed", ([POD_STUCK, FAILED], "Running", True)),
    ("DeletionFailed", ([VOLUME_IN_USE, STARTED], "Stopped", True)),
    ("Deleting", ([], "Running", True)),
    ("Deleting", ([IN_PROGRESS, FAILED, STARTED], "Stopped", True)),
    ("Failed", ([FAILED], "Running", False)),
    ("Failed", ([FAILED, EXPIRED, STOPPED, STARTED, BLOCKED], "Stopped", False)),
    ("Failed", ([FAILED, FLUSH_FAILED], "Running", False)),
    ("Expired", ([EXPIRED, STARTED, BLOCKED], "Running", False)),
    ("Expired", ([EXPIRED, STOPPED], "Stopped", False)),
    ("Stopped", ([STOPPED, STARTED, BLOCKED], "Stopped", False)),
    ("Stopped", ([STOPPED, STARTED], "Running", False)),
    ("Stopping", ([STOPPING, STARTED], "Stopped", False)),
    ("Stopping", ([STOPPING, STARTED, BLOCKED], "Running", False)),
    ("Stopping", ([], "Stopped", False)),
    ("Stopping", ([STARTED, BLOCKED], "Stopped", False)),
    ("Blocked", ([STARTED, BLOCKED, QUOTA, PODS_READY], "Running", False)),
    ("Blocked", ([STARTED, BLOCKED], "Parked", False)),
    ("Running", ([STARTED, QUOTA, PODS_READY], "Running", False)),
    ("Running", ([STARTED, condition("Blocked", "False"), PODS_PENDING], "Running", False)),
    ("Running", ([STARTED, PARKED, condition("Serving", "False", "Parked")], "Parked", False)),
    ("Running", ([STARTED, condition("Ready", "False", "NoCapacity")], "Running", False)),
    ("Scheduled", ([QUOTA, PODS_PENDING], "Running", False)),
    ("Scheduled", ([QUOTA, PODS_READY], "Running", False)),
    ("Scheduled", ([QUOTA, PODS_PENDING, BLOCKED], "Running", False)),
    ("Created", ([], "Running", False)),
    ("Created", ([QUOTA], "Running", False)),
    ("Created", ([QUOTA, condition("PodsReady", "Unknown")], "Running", False)),
    ("Created", ([QUOTA, condition("PodsReady", "False", "Creating")], "Running", False)),
    ("Created", ([QUOTA, condition("PodsReady", "False", "CreationRefused")], "Running", False)),
    ("Created", ([PODS_PENDING], "Running", False)),
    ("Created", ([condition("QuotaReserved", "False", "Queued"), PODS_PENDING], "Running", False)),
    ("Created", ([condition("Accepted", "False", "ModelNotFound")], "Running", False)),
    ("Created", ([BLOCKED], "Running", False)),
    (
        "Created",
        ([condition("Failed", "Unknown"), condition("Started", "Unknown")], "Running", False),
    ),
    ("Created", ([condition("Stopped", "Unknown")], "Running", False)),
]


def spec(desired: str) -> TrainingSessionSpec:
    return TrainingSessionSpec.model_validate(
        {"baseModelRef": {"name": "m"}, "desiredState": desired}
    )


def state(conditions: list[Condition], desired: str, deleting: bool) -> State:
    return derive_state(spec(desired), 1 if deleting else None, conditions)


@pytest.mark.parametrize(("expected", "facts"), EXAMPLES)
def test_the_first_row_that_matches_is_the_state(expected: State, facts: Given) -> None:
    assert state(*facts) == expected


def test_every_state_of_the_contract_has_a_row_and_an_example() -> None:
    states = set(get_args(State))
    assert {name for name, _ in TABLE} == states
    assert {name for name, _ in EXAMPLES} == states


def test_the_rows_stand_in_the_order_of_the_specification() -> None:
    assert [name for name, _ in TABLE] == [
        "DeletionFailed", "Deleting", "Failed", "Expired", "Stopped", "Stopping", "Blocked", "Running",
        "Scheduled", "Created",
    ]  # fmt: skip


ALL = [
    FLUSH_FAILED, IN_PROGRESS, FAILED, EXPIRED, STOPPED, STOPPING, STARTED, BLOCKED, QUOTA, PODS_PENDING,
    PODS_READY, PARKED,
]  # fmt: skip


def compatible(first: Given, second: Given) -> bool:
    """One session can be in both: it has one desired state, and one status a condition."""
    types = {each.type for each in first[0]}
    return first[1] == second[1] and not any(each.type in types for each in second[0])


def test_of_two_states_that_both_match_the_earlier_row_wins() -> None:
    order = [name for name, _ in TABLE]
    pairs = [pair for pair in combinations(EXAMPLES, 2) if compatible(pair[0][1], pair[1][1])]
    assert len(pairs) > 100
    for (first, (some, desired, deleting)), (second, (others, _, also_deleting)) in pairs:
        merged = state([*some, *others], desired, deleting or also_deleting)
        earliest = min(order.index(first), order.index(second))
        assert order.index(merged) <= earliest, (some, others)


@given(
    conditions=st.lists(st.sampled_from(ALL), unique_by=lambda each: each.type),
    desired=st.sampled_from(["Running", "Parked", "Stopped"]),
    deleting=st.booleans(),
)
def test_the_state_is_total_and_blocked_is_never_before_the_first_running(
    conditions: list[Condition], desired: str, deleting: bool
) -> None:
    found = state(conditions, desired, deleting)
    assert found in get_args(State)
    if found in ("Blocked", "Running"):
        assert STARTED in conditions
    assert deleting == (found in ("Deleting", "DeletionFailed"))
    assert found == state(list(reversed(conditions)), desired, deleting)


def test_conditions_of_others_do_not_matter() -> None:
    foreign = condition("SomebodyElses", "True")
    assert state([foreign, STARTED], "Running", False) == "Running"
