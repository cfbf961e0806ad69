"""`make bench-engine`, on a tiny model: rows that are asked for are measured on both sides and judged."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill_testing import engine_bounds
from gristmill_testing.tiny_models import build_tiny_llama
from gristmill_testing.turns import OURS

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks/engine_vs_peft.py"

# PEFT reads attributes that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("engine_vs_peft", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("bench") / "model")


def run(
    benchmark: Any, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    patch.setattr("sys.argv", ["engine_vs_peft.py", *words, "--quick", "--threads", "1"])
    before = torch.get_num_threads()
    try:
        benchmark.main()
    finally:
        torch.set_num_threads(before)
    return capsys.readouterr().out


def test_rows_of_training_and_sampling_come_out_as_json(
    benchmark: Any, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(
        benchmark, monkeypatch, capsys, str(model), "--rows", "small", "shared", "--output", "json"
    )
    told = json.loads(out)
    assert told["machine"]["threads"] == 1
    assert told["machine"]["gemm_bf16_over_fp32"] > 0
    small, shared = told["rows"]
    [training] = small["measures"]
    assert {side: [turn["tokens"] for turn in turns] for side, turns in training["sides"].items()} == {
        OURS: [32], engine_bounds.PEFT: [32],
    }  # fmt: skip
    assert small["figures"][engine_bounds.PEAK_RSS] > 0.1
    assert [each["name"] for each in shared["measures"]] == [
        engine_bounds.DECODING, engine_bounds.END_TO_END,
    ]  # fmt: skip
    assert shared["figures"][engine_bounds.PROMPT_RUNS] == 1.0
    assert {each["row"] for each in told["verdicts"]} == {small["row"], shared["row"]}


def test_the_table_ends_with_the_floors(
    benchmark: Any, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(benchmark, monkeypatch, capsys, str(model), "--rows", "decode-1")
    assert "matrix products of the model's shapes: bf16" in out
    assert "decode B=1: decode phase" in out
    assert "| decode B=1 | x PEFT, decode phase |" in out
    assert out.splitlines()[-1] == "floors: none missed"


def test_every_bound_has_a_row_that_measures_it(benchmark: Any) -> None:
    """The names of rows are written in two places; a bound whose row nobody finds would never be judged."""
    source = BENCHMARK.read_text()
    for each in engine_bounds.bounds(2.0):
        fixed = each.row.rsplit("=", 1)[0] if each.row.startswith("decode") else each.row
        assert fixed in source, each.row


def test_the_peers_work_is_ours_token_for_token(benchmark: Any) -> None:
    assert (len(benchmark.RAGGED), sum(benchmark.RAGGED)) == (16, 1968)
    assert (min(benchmark.RAGGED), max(benchmark.RAGGED)) == (32, 256)
    assert sum(benchmark.EQUAL) == 1024
