"""Ranks that each hold a part of every layer give what one process with all of it gives."""

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.operations import Forward, ForwardBackward, ForwardResult
from gristmill_testing.local_runner import (
    Client,
    datum,
    load,
    logprobs,
    make_runner,
    sample,
    step,
)
from gristmill_testing.shard_trial import STEPS
from gristmill_testing.worker_team import TeamProcesses
from gristmill_worker.engine import TEAM_LOST
from gristmill_worker.fast.sharded import ShardedBlocks, visits
from gristmill_worker.fast.weights import Block
from gristmill_worker.loading import load_base_model
from gristmill_worker.sharding import Sharding, fits
from gristmill_worker.team import Team, TeamLostError

CPU = torch.device("cpu")
ROWS = [datum([1, 5, 9, 13, 17, 21]), datum([2, 4, 6]), datum([3, 6, 9, 12, 15])]


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


# --- one plan for all ranks ------------------------------------------------------------------------


class Ledger:
    """What one rank asked its team for, in order: blocks by number, "lend" for a pass of rank 0 alone."""

    def __init__(self, layers: int) -> None:
        self.asked: list[int | str] = []
        self.whole: set[int] = set()
        self.lost = False
        shards = [PretendedShard(self, at) for at in range(layers)]
        self.blocks = ShardedBlocks(shards, lambda: self.asked.append("lend"))


class PretendedShard:
    whole_bytes = 100

    def __init__(self, ledger: Ledger, at: int) -> None:
        self.ledger = ledger
        self.at = at

    def gather(self) -> Block:
        if self.ledger.lost:
            raise RuntimeError("connection closed by peer")
        self.ledger.asked.append(self.at)
        self.ledger.whole.add(self.at)
        return self.at  # type: ignore[return-value]  # the plan never looks inside

    def release(self) -> None:
        self.ledger.whole.remove(self.at)


def run_pass(blocks: ShardedBlocks, *, trains: bool, fail_at: int | None = None) -> None:
    """Look at the blocks as a decoder does, some of them twice."""
    there = list(range(len(blocks)))
    for index in [*there, *reversed(there)] if trains else there:
        if index == fail_at:
            raise ValueError("the share failed")
        assert blocks[index] == index  # type: ignore[comparison-overlap]
        assert blocks[index] == index  # type: ignore[comparison-overlap]


@given(
    layers=st.integers(1, 5), passes=st.integers(0, 4), mine=st.integers(0, 4), trains=st.booleans(),
    fail_at=st.none() | st.integers(0, 4),
)  # fmt: skip
def test_a_rank_asks_for_what_the_others_ask_for_whatever_becomes_of_its_share(
    layers: int, passes: int, mine: int, trains: bool, fail_at: int | None
) -> None:
    expected, found = Ledger(layers), Ledger(layers)
    with expected.blocks.together(passes, trains=trains):
        for _ in range(passes):
            run_pass(expected.blocks, trains=trains)
    try:
        with found.blocks.together(passes, trains=trains):
            for _ in range(min(mine, passes)):
                run_pass(found.blocks, trains=trains, fail_at=fail_at)
    except ValueError:
        assert fail_at is not None
    assert found.asked == expected.asked == visits(layers, passes, trains=trains)
    assert found.whole == set()


def test_at_a_turn_the_block_that_is_there_is_not_asked_for_again() -> None:
    assert visits(3, 2, trains=True) == [0, 1, 2, 1, 0, 1, 2, 1, 0]
    assert visits(3, 2, trains=False) == [0, 1, 2, 0, 1, 2]


def test_one_block_is_whole_at_a_time() -> None:
    ledger = Ledger(4)
    with ledger.blocks.together(1, trains=True):
        for index in (0, 1, 2, 3, 2):
            _ = ledger.blocks[index]
            assert ledger.whole == {index}


def test_each_pass_that_rank_0_runs_alone_is_lent_and_one_that_broke_off_is_ended_first() -> None:
    ledger = Ledger(3)
    run_pass(ledger.blocks, trains=False)
    with pytest.raises(ValueError, match="failed"):
        run_pass(ledger.blocks, trains=False, fail_at=2)
    run_pass(ledger.blocks, trains=False)
    ledger.blocks.settle()
    assert ledger.asked == ["lend", 0, 1, 2, "lend", 0, 1, 2, "lend", 0, 1, 2]
    assert ledger.whole == set()


def test_a_block_out_of_turn_is_refused_and_the_others_do_not_wait_for_ever() -> None:
    ledger = Ledger(3)
    with (
        pytest.raises(RuntimeError, match=r"block 2 was looked at, .* block 0 next"),
        ledger.blocks.together(1, trains=False),
    ):
        _ = ledger.blocks[2]
    assert ledger.asked == [0, 1, 2]


def test_once_a_rank_is_lost_nobody_is_asked_again() -> None:
    ledger = Ledger(3)

    def share() -> None:
        with ledger.blocks.together(2, trains=True):
            _ = ledger.blocks[0]
            ledger.lost = True
            _ = ledger.blocks[1]

    with pytest.raises(TeamLostError, match="connection closed"):
        share()
    assert ledger.asked == [0]


# --- whether a base is sharded ---------------------------------------------------------------------


def test_a_base_that_leaves_no_fourth_of_the_memory_free_does_not_fit() -> None:
    assert fits(75, 100)
    assert not fits(76, 100)
    assert fits(10**15, None), "nobody knows what is free"


def test_a_worker_that_is_alone_never_shards(llama_dir: Path) -> None:
    for choice in ("auto", "replicated", "sharded"):
        sharding = Sharding(Team(), CPU, choice, lambda: 0)
        base = load_base_model(llama_dir, dtype=torch.float32, device=CPU, sharding=sharding)
        assert base.shards is None


def test_a_base_of_the_generic_path_is_refused_where_it_must_be_sharded(gpt2_dir: Path) -> None:
    sharding = Sharding(Team(0, 2), CPU, "sharded", lambda: None)
    with pytest.raises(InvalidRequestError, match=r"cannot be sharded.*BASE_WEIGHTS to replicated"):
        load_base_model(gpt2_dir, dtype=torch.float32, device=CPU, sharding=sharding)


@pytest.fixture
def gpt2_dir(family_dir: Any) -> Path:
    folder: Path = family_dir("gpt2")
    return folder


# --- a lost rank, and worlds of other sizes --------------------------------------------------------


def test_a_rank_lost_while_another_samples_ends_the_team_and_one_process_goes_on(
    tmp_path: Path, llama_dir: Path
) -> None:
    """What rank 0 wrote as it ended is the session's whole state, un-stepped gradient included."""
    team = TeamProcesses(tmp_path, llama_dir, world=2, base_weights="sharded")
    team.start(0)
    team.start(1)
    session = team.session()
    session.open(rank=8, alpha=16)
    train = ForwardBackward(loss="cross_entropy", loss_config={}, datums=ROWS)
    for operation in (train, step(1e-2), train):
        session.execute(operation)
    scored = session.execute(Forward(loss="cross_entropy", loss_config={}, datums=ROWS))
    assert isinstance(scored, ForwardResult)
    os.kill(team.worker_pid(1), signal.SIGKILL)
    with pytest.raises((OSError, http.client.HTTPException)):
        session.execute(sample(max_tokens=64))
    session.hang_up()
    assert all(agent.wait(300) != 0 for agent in team.agents.values())
    assert f"exitcode  : {TEAM_LOST}" in team.logs() or f'"exitcode": {TEAM_LOST}' in team.logs()

    runner = make_runner(load(llama_dir), tmp_path / "artifacts")
    alone = Client(runner, session._uid, str(tmp_path / "state"))
    assert alone.open().applied == 4
    assert np.allclose(
        np.concatenate(alone.score(ROWS)), np.concatenate(logprobs(scored)), rtol=0, atol=1e-5
    )
    assert alone.step(0.0)["tokens"] == 14
