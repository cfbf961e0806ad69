"""A data folder of its own for each test."""

from pathlib import Path

import pytest

from gristmill_testing.cli import Commands


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path / "data")
