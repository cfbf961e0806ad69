"""What a start does not do, as the first step waits for it: imports, and work done twice."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gristmill_testing.local_runner import load
from gristmill_worker.fast.kernels import EAGER, compiled
from gristmill_worker.fast.rope import frequencies_of

CPU = torch.device("cpu")
INNER = 48
A_STEP_OF_TRAINING = """
import sys, torch
from pathlib import Path
from gristmill_worker import app, engine
torch.set_num_threads(1)
base = engine.load_base_model(Path(sys.argv[1]), dtype=torch.float32, device=torch.device("cpu"))
assert base.path == "fast"
assert engine.fingerprint(base, 64)
base.hidden(torch.arange(8)[None])
print("transformers" in sys.modules)
base.tokenizer
print("transformers" in sys.modules)
"""


def test_training_on_the_fast_path_does_not_import_transformers(llama_dir: Path) -> None:
    """It takes longer to import than a small model to load; only text has a need of it."""
    done = subprocess.run(
        [sys.executable, "-c", A_STEP_OF_TRAINING, str(llama_dir)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["False", "True"]), done.stderr


def test_the_tokenizer_is_read_at_its_first_use_and_kept(llama_dir: Path) -> None:
    base = load(llama_dir)
    assert "tokenizer" not in vars(base)
    expected = AutoTokenizer.from_pretrained(llama_dir, local_files_only=True).encode("one two")
    assert base.tokenizer.encode("one two") == expected
    assert base.tokenizer is base.tokenizer


def test_the_kernel_that_is_tried_at_the_start_is_not_compiled_again() -> None:
    torch._dynamo.reset()
    kernels = compiled(torch.float32, CPU, INNER)
    if kernels is EAGER:
        pytest.skip("no compiler for torch.compile here")
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for rows in (64, 2 * INNER, 257):
            kernels.swiglu_forward(torch.zeros(rows, 2 * INNER))
    assert counters["stats"]["unique_graphs"] == before
    kernels.swiglu_forward(torch.zeros(64, 2 * INNER).double())
    assert counters["stats"]["unique_graphs"] == before + 1  # the count does count


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 32},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 12_345.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 12_345.0, "factor": 2.0}},
        {"rope_parameters": None, "rope_theta": 12_345.0},
        {"rope_parameters": None},
        {"rope_parameters": None, "rope_theta": 12_345.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)  # fmt: skip
def test_rotary_frequencies_are_those_of_transformers(
    llama_dir: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Whether the file says them in plain words, or only transformers knows what it means."""
    given = json.loads((llama_dir / "config.json").read_text()) | changes
    kept = {name: value for name, value in given.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    config = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, size, 2).float() / size
        expected = 1.0 / config.rope_parameters["rope_theta"] ** exponents
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[kind](config, CPU)
    frequencies, scaling = frequencies_of(tmp_path)
    assert torch.equal(frequencies, expected)
    assert scaling == 1.0
