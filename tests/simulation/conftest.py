"""All runs of the simulator share one process beside the tests."""

from collections.abc import Iterator

import pytest

from gristmill_testing.simulation.run import leave


@pytest.fixture(scope="session", autouse=True)
def elsewhere() -> Iterator[None]:
    yield
    leave()
