"""How the tests are shared out when several processes run them.

A file stays together, for its fixtures; tests/e2e stays together, for the one Gristmill they share and
for the record of what of the SDK was used. `--dist loadgroup` would say the same, but its marks do not
reach pytest 9.2's node ids.
"""

from typing import Any

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


class PlaceScheduling(LoadScopeScheduling):
    """One unit of work is one file, or one folder that shares a running instance."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/e2e" if nodeid.startswith("tests/e2e/") else nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> PlaceScheduling:
    return PlaceScheduling(config, log)
