"""Ranks that each hold a part of every layer give what one process with all of it gives."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gristmill_testing.shard_trial import STEPS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, llama_dir: Path) -> list[dict[str, Any]]:
    """What two ranks saw that trained on sharded blocks, by rank."""
    folder = tmp_path_factory.mktemp("trial")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", "2",
        "-m", "gristmill_testing.shard_trial", str(llama_dir), str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_on_sharded_blocks_gradient_and_update_are_those_of_one_process(
    found: list[dict[str, Any]],
) -> None:
    """The last request is one datum: a rank without work gathers with the other all the same."""
    for rank in found:
        assert len(rank["gradients"]) == STEPS + 1
        assert max(rank["gradients"]) <= 1e-6
        assert max(rank["updates"]) <= 1e-6
        assert max(rank["losses"]) <= 1e-6


def test_each_rank_holds_its_part_of_the_blocks_alone(found: list[dict[str, Any]]) -> None:
    assert sum(rank["held"] for rank in found) == found[0]["whole"]
    for rank in found:
        assert rank["held"] <= 0.51 * rank["whole"]
        assert not rank["gathered_after"]
