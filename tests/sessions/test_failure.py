"""Backoff doubles to its maximum; giving up names the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts.session import FailurePolicy
from gristmill_sessions.failure import GiveUp, Retry, backoff_s, judge

DEFAULT = FailurePolicy()


@pytest.mark.parametrize(
    ("restarts", "seconds"), [(0, 10), (1, 10), (2, 20), (3, 40), (5, 160), (6, 300), (60, 300)]
)
def test_the_pause_doubles_up_to_its_maximum(restarts: int, seconds: float) -> None:
    assert backoff_s(DEFAULT, restarts) == seconds


@given(st.integers(0, 100), st.floats(-1, 1))
def test_jitter_moves_the_pause_by_a_fifth_at_most(restarts: int, jitter: float) -> None:
    plain = backoff_s(DEFAULT, restarts)
    assert abs(backoff_s(DEFAULT, restarts, jitter) - plain) <= 0.2 * plain + 1e-9


@pytest.mark.parametrize(
    ("failures", "code", "expected"),
    [
        (0, None, None),
        (0, 42, None),
        (1, 1, Retry(after_s=10)),
        (3, None, Retry(after_s=40)),
        (4, 1, "MaxRestartsExceeded"),
        (1, 42, "FatalExit"),
        (9, 42, "FatalExit"),
    ],
)
def test_a_failure_is_retried_or_given_up(
    failures: int, code: int | None, expected: Retry | str | None
) -> None:
    verdict = judge(FailurePolicy(fatal_exit_codes=[42]), failures, code)
    assert (verdict.reason if isinstance(verdict, GiveUp) else verdict) == expected


def test_no_restart_may_be_allowed() -> None:
    verdict = judge(FailurePolicy(max_restarts=0), 1, -9, "its log is w.log")
    assert isinstance(verdict, GiveUp)
    assert "exit code -9" in verdict.message
    assert "w.log" in verdict.message
