"""Where no cluster can be, its tests are skipped for one reason, and fail where they are required."""

import os
from pathlib import Path

import pytest

from gristmill_testing import cluster_fixtures
from gristmill_testing.cluster import eventually


def test_without_root_the_reason_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cluster_fixtures.why_not() == "the test cluster needs root: run `sudo make test-cluster`"


def test_without_the_programs_the_reason_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("the check for root comes first")
    monkeypatch.setenv("GRISTMILL_CLUSTER_CACHE", str(tmp_path))
    reason = cluster_fixtures.why_not()
    assert reason is not None
    assert "make cluster-build" in reason or "network namespaces" in reason


@pytest.mark.parametrize(
    ("required", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_a_missing_cluster_skips_and_fails_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch, required: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv(cluster_fixtures.REQUIRED, required)
    with pytest.raises(outcome, match="needs root"):
        cluster_fixtures.refuse_without_cluster()


def test_a_wait_that_gives_up_says_what_it_saw_last() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.1 s: rain; last seen: \[\]"):
        eventually("rain", list, seconds=0.1)
