"""Fixtures of the meter's tests."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill_testing.meter_world import World


@pytest.fixture
async def make_world(tmp_path: Path) -> AsyncIterator[Callable[..., World]]:
    """Worlds with settings of their own; all are closed at the end. They are not started."""
    worlds: list[World] = []

    def make(**settings: Any) -> World:
        worlds.append(World(tmp_path / str(len(worlds)), **settings))
        return worlds[-1]

    yield make
    for world in worlds:
        await world.close()


@pytest.fixture
async def world(make_world: Callable[..., World]) -> World:
    """A started world with the usual settings."""
    return await make_world().start()
