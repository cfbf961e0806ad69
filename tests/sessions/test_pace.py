"""What of a starting session must be told at once, and what may wait for what follows."""

from typing import Any

import pytest

from gristmill_contracts.session import TrainingSessionStatus
from gristmill_sessions.observed import Observed, Place
from gristmill_sessions.pace import (
    HELD_UP_WAITS_S,
    PROGRESS_WAITS_BUSY_S,
    PROGRESS_WAITS_S,
    may_wait_s,
)
from gristmill_sessions.planner import make_plan, next_status
from gristmill_testing.cluster_worlds import ended, new, pending, pod, resource, world


def after(seen: Observed) -> TrainingSessionStatus:
    return next_status(seen, make_plan(seen))


def step(*pods: Any, **told: Any) -> tuple[TrainingSessionStatus, TrainingSessionStatus]:
    """Status before and after a look at a session whose attempt was claimed, and at these pods of it."""
    claimed = after(world(new()))
    session = new().model_copy(update={"status": claimed})
    return claimed, after(world(session, *pods, **told))


@pytest.mark.parametrize("reason", ["", "PullingImage", "LoadingWeights", "MeterNotReady"])
def test_steps_of_a_start_wait_for_what_follows(reason: str) -> None:
    before, now = step(pending(reason=reason))
    assert before != now
    assert may_wait_s(before, now) == PROGRESS_WAITS_S
    assert may_wait_s(before, now, busy=True) == PROGRESS_WAITS_BUSY_S


@pytest.mark.parametrize(
    "reason", ["Unschedulable", "VolumePending", "ClaimPending", "ResourceNotOffered"]
)
def test_a_pod_that_finds_no_place_is_told_within_seconds_however_busy(reason: str) -> None:
    before, now = step(pending(reason=reason, message="0/3 nodes"))
    assert may_wait_s(before, now, busy=True) == HELD_UP_WAITS_S


@pytest.mark.parametrize("reason", ["ImagePullFailed", "StartFailed", "ImageInvalid"])
def test_what_goes_wrong_is_told_at_once(reason: str) -> None:
    before, now = step(pending(reason=reason, message="no such image"))
    assert may_wait_s(before, now, busy=True) == 0


@pytest.mark.parametrize("pods", [(pod(),), (ended(),)], ids=["ready", "ended"])
def test_a_session_that_runs_or_fails_says_so_at_once(pods: tuple[Any, ...]) -> None:
    assert may_wait_s(*step(*pods), busy=True) == 0


def test_a_claim_is_told_at_once() -> None:
    seen = world(new())
    assert may_wait_s(seen.session.status, after(seen), busy=True) == 0


def test_a_pod_that_was_made_and_is_gone_is_not_made_again_though_the_status_does_not_say_so() -> (
    None
):
    """The status may wait; what the operator did may not be forgotten."""
    seen = world(resource(created=0), placed=1)
    plan = make_plan(seen)
    assert not [each for each in plan.actions if isinstance(each, Place)]
    assert next_status(seen, plan).attempt == 2
