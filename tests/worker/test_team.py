"""Several ranks are one worker: same results and same update as one process, or the whole team ends."""

import http.client
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts.errors import OperationFailedError
from gristmill_contracts.operations import (
    ComputeLogprobs,
    ComputeLogprobsResult,
    Forward,
    ForwardBackward,
    ForwardResult,
    LoadState,
    OptimStepResult,
    SampleResult,
    SaveResult,
    SaveState,
    SaveWeights,
    tensor,
)
from gristmill_testing.bare_worker import BareWorker
from gristmill_testing.local_runner import (
    Client,
    datum,
    load,
    logprobs,
    make_runner,
    ref,
    sample,
    step,
)
from gristmill_testing.worker_team import TeamProcesses
from gristmill_worker.engine import TEAM_LOST
from gristmill_worker.shares import shares

ROWS = [
    datum([1, 5, 9, 13, 17, 21, 25, 29]),
    datum([2, 4, 6]),
    datum([3, 6, 9, 12, 15]),
    datum([7, 8]),
    datum([11, 12, 13, 14, 15, 16, 17]),
]


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 8))
def test_every_datum_has_one_rank_and_no_rank_is_needlessly_full(
    lengths: list[int], world: int
) -> None:
    given_out = shares(lengths, world)
    assert sorted(index for part in given_out for index in part) == list(range(len(lengths)))
    held = [sum(lengths[index] for index in part) for part in given_out]
    assert max(held) - min(held) <= max(lengths, default=0)


@pytest.fixture(scope="module", params=["replicated", "sharded"])
def team(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, llama_dir: Path
) -> Iterator[TeamProcesses]:
    """Each rank with the whole base, then with its part of every layer."""
    folder = tmp_path_factory.mktemp("team")
    processes = TeamProcesses(folder, llama_dir, world=2, base_weights=request.param)
    processes.start(1)  # rank 0 comes last: the others wait for it
    processes.start(0)
    try:
        yield processes
    finally:
        statuses = processes.end()
    assert set(statuses.values()) <= {0, 1, 143}, processes.logs()


@pytest.fixture
def session(team: TeamProcesses, tmp_path: Path) -> Iterator[BareWorker]:
    opened = team.session(tmp_path.name)
    opened.open(rank=8, alpha=16)
    yield opened
    opened.close()


@pytest.fixture
def alone(llama_dir: Path, tmp_path: Path) -> Client:
    """The same session in one process."""
    runner = make_runner(load(llama_dir), tmp_path / "artifacts")
    client = Client(runner, "alone", str(tmp_path / "alone"), seed=1)
    client.open()
    return client


def train(session: BareWorker, rows: list[object] = ROWS) -> ForwardResult:  # type: ignore[assignment]
    result = session.execute(
        ForwardBackward(loss="cross_entropy", loss_config={}, datums=list(rows))  # type: ignore[arg-type]
    )
    assert isinstance(result, ForwardResult)
    return result


def test_two_ranks_train_as_one_process_does(
    team: TeamProcesses, session: BareWorker, alone: Client
) -> None:
    for _ in range(3):
        together, single = train(session), alone.train(ROWS)
        assert np.allclose(
            np.concatenate(logprobs(together)), np.concatenate(logprobs(single)), atol=1e-5
        )
        assert together.metrics["loss_sum"] == pytest.approx(single.metrics["loss_sum"], rel=1e-6)
        assert together.metrics["tokens"] == single.metrics["tokens"] == 25
        stepped = session.execute(step(1e-4))
        assert isinstance(stepped, OptimStepResult)
        expected = alone.step(1e-4)
        assert stepped.metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
        assert stepped.metrics["update_norm"] == pytest.approx(expected["update_norm"], rel=1e-5)
    saved = session.execute(SaveState(location="acme/bucket", description=""))
    assert isinstance(saved, SaveResult)
    alone.runner.checkpoints.root = team.folder / "artifacts"
    before = alone.session.adapter.weights.clone()
    alone.load_state(saved)
    assert float((alone.session.adapter.weights - before).abs().max()) <= 1e-6


def test_pairs_that_lie_on_two_ranks_train_as_in_one_process(
    session: BareWorker, alone: Client
) -> None:
    """dpo couples two datums; here the first pair's lie on different ranks."""
    rows = [
        datum(row.tokens.tolist(), weights=[1.0] * row.tokens.size,
              ref_log_prob=[-6.0 - 0.1 * at] * row.tokens.size)
        for at, row in enumerate(ROWS[:4])
    ]  # fmt: skip
    first, second = shares([row.tokens.size for row in rows], 2)
    assert 0 in first
    assert 1 in second
    op = ForwardBackward(loss="dpo", loss_config={"beta": 0.1}, datums=rows)
    for _ in range(2):
        together, single = session.execute(op), alone.run(op)
        assert isinstance(together, ForwardResult)
        assert isinstance(single, ForwardResult)
        assert together.metrics == pytest.approx(single.metrics, rel=1e-3, abs=1e-5)
        stepped = session.execute(step(1e-4))
        assert isinstance(stepped, OptimStepResult)
        assert stepped.metrics["grad_norm"] == pytest.approx(
            alone.step(1e-4)["grad_norm"], rel=1e-5
        )


def test_an_operation_that_fails_on_one_rank_leaves_nothing_on_any(session: BareWorker) -> None:
    first = train(session)
    broken = datum([2, 4, 6], weights=[1.0, 3e38, 1.0])
    with pytest.raises(OperationFailedError, match="not finite"):
        train(session, [*ROWS, broken])
    session.execute(step(0.0))
    assert logprobs(train(session)) == logprobs(first), "a rate of 0 changes nothing"


def test_a_loaded_state_reaches_every_rank(session: BareWorker) -> None:
    train(session)
    session.execute(step(1e-2))
    saved = session.execute(SaveState(location="acme/bucket", description=""))
    assert isinstance(saved, SaveResult)
    after = score(session)
    for _ in range(2):
        train(session)
        session.execute(step(1e-2))
    assert score(session) != after
    session.execute(LoadState(checkpoint=ref(saved), with_optimizer=True))
    assert score(session) == after
    train(session)
    session.execute(step(1e-2))  # the ranks compare their checksums


def test_a_request_of_one_datum_leaves_the_other_rank_without_work(session: BareWorker) -> None:
    assert len(train(session, [ROWS[0]]).outputs) == 1
    session.execute(step())


def test_samples_and_scores_of_prompts_are_those_of_one_process(
    team: TeamProcesses, session: BareWorker, alone: Client
) -> None:
    """Rank 0 runs them alone; where the base is sharded, the others gather along."""
    train(session)
    session.execute(step(1e-2))
    saved = session.execute(SaveWeights(location="acme/bucket", merge=False, description=""))
    assert isinstance(saved, SaveResult)
    alone.runner.checkpoints.root = team.folder / "artifacts"
    prompt = list(range(3, 40))
    for adapter in (None, ref(saved)):
        asked = sample(
            prompt, adapter=adapter, num_samples=3, max_tokens=6, include_prompt_logprobs=True
        )
        together, single = session.execute(asked), alone.run(asked)
        assert isinstance(together, SampleResult)
        assert isinstance(single, SampleResult)
        assert [each.tokens.tolist() for each in together.sequences] == [
            each.tokens.tolist() for each in single.sequences
        ]
        scored = ComputeLogprobs(prompt=tensor("int64", prompt), topk=0, adapter=adapter)
        mine, theirs = session.execute(scored), alone.run(scored)
        assert isinstance(mine, ComputeLogprobsResult)
        assert isinstance(theirs, ComputeLogprobsResult)
        assert np.allclose(
            mine.logprobs.tolist()[1:], theirs.logprobs.tolist()[1:], rtol=0, atol=1e-5
        )
    train(session)
    session.execute(step(0.0))  # the ranks compare their checksums


def score(session: BareWorker) -> list[list[float]]:
    result = session.execute(Forward(loss="cross_entropy", loss_config={}, datums=ROWS))
    assert isinstance(result, ForwardResult)
    return logprobs(result)


def test_when_a_rank_is_killed_the_whole_team_ends_and_goes_on_where_it_stood(
    tmp_path_factory: pytest.TempPathFactory, llama_dir: Path
) -> None:
    team = TeamProcesses(tmp_path_factory.mktemp("lost"), llama_dir, world=2)
    team.start(0)
    team.start(1)
    session = team.session()
    session.open(rank=8, alpha=16)
    train(session)
    session.execute(step())
    after = score(session)
    os.kill(team.worker_pid(1), signal.SIGKILL)
    with pytest.raises((OSError, http.client.HTTPException)):
        train(session)
    session.hang_up()
    assert team.agents[0].wait(60) != 0
    assert team.agents[1].wait(60) != 0
    assert f"exitcode  : {TEAM_LOST}" in team.logs() or f'"exitcode": {TEAM_LOST}' in team.logs()

    again = TeamProcesses(team.folder, llama_dir, world=2)
    again.start(0)
    again.start(1)
    try:
        restored = again.session()
        restored._uid = session._uid
        restored.open(rank=8, alpha=16)
        assert score(restored) == after, "rank 0 wrote a snapshot before it ended"
        train(restored)
        restored.execute(step())
        restored.hang_up()
    finally:
        again.end()
