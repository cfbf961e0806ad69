"""How the tests are shared out when several processes run them, and what hypothesis does.

A file stays together, for its fixtures; tests/e2e stays together, for the one Gristmill they share and
for the record of what of the SDK was used, but for its two campaigns of kills. `--dist loadgroup` would
say the same, but its marks do not reach pytest 9.2's node ids.
"""

from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# What is generated is the same in every run, and no clock judges it: a test that fails says something of the code, not
# of the machine. `--hypothesis-profile explore` draws anew (`make fuzz` does).
NO_CLOCK = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("steady", deadline=None, suppress_health_check=NO_CLOCK, derandomize=True)
settings.register_profile("explore", deadline=None, suppress_health_check=NO_CLOCK)
settings.load_profile("steady")

pytest_plugins = ["gristmill_testing.cluster_fixtures"]


CAMPAIGNS: Final = ("tests/e2e/test_crash.py", "tests/e2e/test_crash_rounds.py")
LONG: Final = (
    "tests/e2e",
    *CAMPAIGNS,
    "tests/simulation/test_seeds_low.py",
    "tests/simulation/test_seeds_high.py",
    "tests/simulation/test_planted_bugs.py",
    "tests/recipes/test_rl_learns.py",
)
"""Units that take minutes. They go first, so that no process is left alone with one at the end."""


class PlaceScheduling(LoadScopeScheduling):
    """One unit of work is one file, or one folder that shares a running instance."""

    def _split_scope(self, nodeid: str) -> str:
        place = nodeid.split("::", 1)[0]
        return "tests/e2e" if place.startswith("tests/e2e/") and place not in CAMPAIGNS else place

    def _assign_work_unit(self, node: Any) -> None:
        for place in reversed(LONG):
            if place in self.workqueue:
                self.workqueue.move_to_end(place, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> PlaceScheduling:
    return PlaceScheduling(config, log)
