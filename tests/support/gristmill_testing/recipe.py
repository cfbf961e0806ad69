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
    """Run it as a program with nothing but `gristmill env` around it: (its summary, its output)."""
    summary = folder / f"{name}.json"
    kept = {
        key: os.environ[key] for key in ("PATH", "HOME", "OMP_NUM_THREADS") if key in os.environ
    }
    command = [
        sys.executable, str(FOLDER / f"{name}.py"), "--summary", str(summary),
        "--png", str(folder / f"{name}.png"), *arguments,
    ]  # fmt: skip
    answer = subprocess.run(
        command,
        env={**kept, "HF_HUB_OFFLINE": "1", "PATH": _path(kept), **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads(summary.read_text()), answer.stdout


def _path(kept: Mapping[str, str]) -> str:
    """With the `gristmill` of this very environment first."""
    return os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
