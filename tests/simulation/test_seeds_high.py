"""Seeds 251 to 500 of the simulator: no promise is broken. `make simulate` runs on."""

import pytest

from gristmill_testing.simulation.run import run_apart

pytestmark = pytest.mark.slow
BLOCK = 25


@pytest.mark.parametrize("first", range(251, 500 + 1, BLOCK))
def test_no_promise_is_broken_under(first: int) -> None:
    """A seed that fails prints its last events and the command that runs it again."""
    outcomes = run_apart(range(first, first + BLOCK))
    failed = [outcome.report for outcome in outcomes if outcome.violations]
    assert not failed, "\n".join(failed)
