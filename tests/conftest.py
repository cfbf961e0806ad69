"""How the tests are shared out when several processes run them.

A file stays together, for its fixtures; tests/e2e stays together, for the one Gristmill they share and
for the record of what of the SDK was used.
"""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(config.rootpath)
        group = "tests/e2e" if place.is_relative_to("tests/e2e") else str(place)
        item.add_marker(pytest.mark.xdist_group(group))
