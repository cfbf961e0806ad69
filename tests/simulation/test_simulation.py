"""The simulator itself: the same seed does the same, in whatever process it runs."""

import os
import subprocess
import sys

import pytest

from gristmill_testing.simulation.mutations import MUTATIONS
from gristmill_testing.simulation.run import run_apart, seeds_of

SEED = 7
DIGEST = "from gristmill_testing.simulation.run import run_seed; print(run_seed({seed}).trace)"


def test_a_seed_does_the_same_again_to_the_last_event() -> None:
    first, again, another = run_apart((SEED, SEED, SEED + 1))
    assert first == again
    assert first.trace != another.trace


def test_a_run_that_breaks_off_leaves_the_next_one_as_it_would_be() -> None:
    """Leases that run out after seconds are of that run alone."""
    torn = next(each for each in MUTATIONS if each.name == "a torn tail stays in the log")
    (before,) = run_apart((SEED,))
    (broken,) = run_apart((torn.seed,), torn.name)
    assert broken.violations
    assert [before] == list(run_apart((SEED,)))


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_a_seed_does_the_same_in_another_process(hash_seed: str) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", DIGEST.format(seed=SEED)],
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    (here,) = run_apart((SEED,))
    assert done.stdout.strip() == here.trace


def test_seeds_are_read_as_ranges_and_lists() -> None:
    assert seeds_of("3-5,9") == [3, 4, 5, 9]
