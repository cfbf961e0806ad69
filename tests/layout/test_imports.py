"""Heavy libraries stay where they belong when a process really starts."""

import subprocess
import sys

import pytest

CONTROL_PLANE = [
    "gristmill_contracts.http",
    "gristmill_sessions.local",
    "gristmill_gateway.app",
    "gristmill_gateway.__main__",
    "gristmill_meter.app",
    "gristmill_meter.__main__",
    "gristmill_ledger.app",
    "gristmill_ledger.__main__",
    "gristmill_cli.__main__",
]


def loaded_after_importing(module: str, heavy: list[str]) -> list[str]:
    """Which of `heavy` a fresh interpreter has loaded after importing `module`."""
    program = f"import sys, {module}; print(*sorted(set({heavy!r}) & set(sys.modules)))"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.split()


@pytest.mark.parametrize("module", CONTROL_PLANE)
def test_the_control_plane_never_loads_the_engine(module: str) -> None:
    assert loaded_after_importing(module, ["torch", "transformers", "peft"]) == []


@pytest.mark.parametrize("module", ["gristmill_contracts.operations", "gristmill_meter.session"])
def test_f10_what_counts_tokens_cannot_wait_for_another_rank(module: str) -> None:
    """Counting is arithmetic on a request and its result; without torch there is no collective to hang in."""
    assert loaded_after_importing(module, ["torch"]) == []


@pytest.mark.parametrize("module", [name for name in CONTROL_PLANE if "ledger" not in name])
def test_only_the_ledger_loads_the_database(module: str) -> None:
    assert loaded_after_importing(module, ["sqlalchemy", "alembic"]) == []


def test_a_loaded_library_would_be_seen() -> None:
    assert loaded_after_importing("json", ["json", "torch"]) == ["json"]
