"""The simulator: five hundred schedules without a broken promise, and planted bugs that it catches.

A seed that fails prints its last events and the command that runs it again. `make simulate` runs on.
"""

import os
import subprocess
import sys

import pytest

from gristmill_testing.simulation.mutations import MUTATIONS, Mutation, plant
from gristmill_testing.simulation.run import run_seed, seeds_of

SEEDS_MAX = 500
BLOCK = 50
DIGEST = "from gristmill_testing.simulation.run import run_seed; print(run_seed({seed}).trace)"


@pytest.mark.parametrize("first", range(1, SEEDS_MAX + 1, BLOCK))
def test_no_promise_is_broken_under(first: int) -> None:
    """Each file runs in one process; a block of seeds is one test."""
    failed = [
        outcome.report
        for outcome in map(run_seed, range(first, first + BLOCK))
        if outcome.violations
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_simulator_catches(mutation: Mutation) -> None:
    assert 1 <= mutation.seed <= SEEDS_MAX
    assert run_seed(mutation.seed, mutation.name).violations
    assert not run_seed(mutation.seed).violations


def test_a_seed_does_the_same_again_to_the_last_event() -> None:
    outcome = run_seed(7)
    assert run_seed(7) == outcome
    assert run_seed(8).trace != outcome.trace


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_a_seed_does_the_same_in_another_process(hash_seed: str) -> None:
    environment = os.environ | {
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    found = subprocess.run(
        [sys.executable, "-c", DIGEST.format(seed=7)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert found.strip() == run_seed(7).trace


def test_a_failure_names_its_seed_its_last_events_and_the_command() -> None:
    mutation = MUTATIONS[0]
    report = run_seed(mutation.seed, mutation.name).report
    assert f"seed {mutation.seed} broke" in report
    assert "request client-0" in report
    assert f"make simulate SEEDS={mutation.seed}" in report


def test_a_bug_that_cannot_be_planted_any_more_is_told() -> None:
    stale = Mutation(
        name="stale", where="gristmill_meter.release:_release", old="no such text", new="", seed=1
    )
    with pytest.raises(ValueError, match="no such text"), plant(stale):
        pass


def test_seeds_are_read_as_ranges_and_lists() -> None:
    assert seeds_of("3-5,9") == [3, 4, 5, 9]
