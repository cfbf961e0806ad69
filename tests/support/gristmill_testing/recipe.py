"""Recipes as modules, for their pure parts, and as their users run them."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "recipes"


@cache
def load_recipe(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"recipe_{name}", FOLDER / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Dataclasses look their module up.
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def run_recipe(
    name: str, environment: Mapping[str, str], folder: Path, *arguments: str, timeout_s: float = 280
) -> tuple[Any, str]:
    """Run a recipe to its end: (its summary, its output). Its curve must have been drawn."""
    summary = folder / f"{name}.json"
    picture = folder / f"{name}.png"
    shown = run_program(
        [str(FOLDER / f"{name}.py"), "--summary", str(summary), "--png", str(picture), *arguments],
        environment,
        timeout_s,
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    return json.loads(summary.read_text()), shown


def run_program(command: list[str], environment: Mapping[str, str], timeout_s: float = 280) -> str:
    """Output of a Python program with nothing but `gristmill env` around it."""
    kept = {name: os.environ[name] for name in ("HOME", "OMP_NUM_THREADS") if name in os.environ}
    # The `gristmill` of this very environment comes first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    answer = subprocess.run(
        [sys.executable, *command],
        env={**kept, "PATH": path, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout
