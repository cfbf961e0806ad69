"""Bugs planted in the real code, each of which the simulator must catch.

Its listed seed does, and no other one is run. A change of the code under test, or of a library, may shift
every schedule after it: only then is a bug looked for in the other seeds that CI runs.
`make simulate SEEDS=1-500 ARGS="--mutation all"` lists anew.
"""

import pytest

from gristmill_testing.simulation.mutations import MUTATIONS, Mutation, plant
from gristmill_testing.simulation.run import Outcome, run_apart

SEEDS_MAX = 500
"""Of CI. How far a bug is looked for once its schedule has shifted."""
CAUGHT = [mutation for mutation in MUTATIONS if mutation.seed]


def caught(mutation: Mutation) -> Outcome | None:
    seeds = (mutation.seed, *range(1, SEEDS_MAX + 1))
    outcomes = run_apart(seeds, mutation.name)
    return next((outcome for outcome in outcomes if outcome.violations), None)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutation", CAUGHT, ids=lambda mutation: mutation.name)
def test_the_simulator_catches(mutation: Mutation) -> None:
    assert caught(mutation) is not None


def test_there_are_enough_of_them_and_each_is_another() -> None:
    assert len({(each.where, each.old, each.new) for each in MUTATIONS}) == len(MUTATIONS)
    assert all(each.seed <= SEEDS_MAX for each in MUTATIONS)
    assert len(CAUGHT) >= 12


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_code_still_has_the_line_that_is_changed(mutation: Mutation) -> None:
    with plant(mutation):
        pass


def test_a_failure_names_its_seed_its_last_events_and_the_command() -> None:
    mutation = next(each for each in MUTATIONS if "without a claim" in each.name)
    outcome = caught(mutation)
    assert outcome is not None
    assert f"seed {outcome.seed} broke" in outcome.report
    assert "request " in outcome.report
    assert f"make simulate SEEDS={outcome.seed}" in outcome.report


def test_a_bug_that_cannot_be_planted_any_more_is_told() -> None:
    stale = Mutation(
        name="stale", where="gristmill_meter.release:_release", old="no such text", new="", seed=1
    )
    with pytest.raises(ValueError, match="no such text"), plant(stale):
        pass
