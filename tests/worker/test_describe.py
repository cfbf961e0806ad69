"""The program that tells a model's path without loading torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill_testing.local_runner import load
from gristmill_worker.describe import main


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gpt2", "falcon"])
def test_it_tells_the_path_that_loading_takes(
    family: str, family_dir: object, capsys: pytest.CaptureFixture[str]
) -> None:
    folder: Path = family_dir(family)  # type: ignore[operator]
    assert main([str(folder)]) == 0
    told = json.loads(capsys.readouterr().out)
    base = load(folder)
    assert told == {"path": base.path, "why": base.why}


def test_a_folder_without_a_config_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path} has no config of a model" in capsys.readouterr().err


def test_it_loads_no_torch() -> None:
    code = "import sys, gristmill_worker.describe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
