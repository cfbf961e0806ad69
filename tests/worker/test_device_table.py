"""The table that `make test-gpu` prints, made on the CPU with a tiny model: every row has both sides."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill_testing.device_checks import CPU

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks/device_table.py"


@pytest.fixture
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("device_table", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# PEFT reads attributes that transformers has renamed.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_kind_of_work_is_measured_on_both_sides(
    benchmark: Any, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "NEW", 4)
    monkeypatch.setattr(benchmark, "PROMPT", 8)
    lines = benchmark.table(llama_dir, tmp_path, CPU, torch.float32, turns=1, gemm=32)
    rows = {line[:28].strip(): line[28:].split() for line in lines[3:]}
    assert list(rows) == [
        "training 4x256", "training ragged", "training 1x32", "sampling, 1 rows",
        "sampling, 8 rows", "sampling, 32 rows",
    ]  # fmt: skip
    assert all(len(list(map(float, figures))) == 3 for figures in rows.values())
    assert "device=cpu" in lines[0]


def test_without_a_device_it_says_that_it_was_skipped(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["device_table.py"])
    benchmark.main()
    assert capsys.readouterr().out == "skipped: no CUDA device on this machine\n"
