"""Many sessions over one base model: each as if it were alone."""

from pathlib import Path

import torch

from gristmill_contracts.operations import Result
from gristmill_testing.local_runner import Client, datum, make_runner, ref, step
from gristmill_worker.base_model import BaseModel
from gristmill_worker.runner import Runner

FIRST, SECOND = "33333333-3333-3333-3333-333333333331", "33333333-3333-3333-3333-333333333332"


def moves(client: Client, turn: int) -> list[Result]:
    """What a session does in one turn."""
    base = 5 + 3 * turn if client.uid == FIRST else 200 - 2 * turn
    rows = [datum(list(range(base, base + length))) for length in (9, 4, 9, 17)]
    results: list[Result] = [client.train(rows), client.train(rows[:1])]
    client.step(rate=1e-2 if client.uid == FIRST else 3e-3)
    saved = ref(client.save_weights())
    results.append(client.sample(prompt=[base, 7], seed=turn, num_samples=2, adapter=saved))
    return results


def make(runner: Runner, uid: str, tmp_path: Path) -> Client:
    first = uid == FIRST
    client = Client(
        runner, uid, str(tmp_path / uid), rank=8 if first else 4, alpha=16, seed=1 if first else 2
    )
    client.open()
    return client


def test_two_interleaved_sessions_equal_two_separate_runs(llama: BaseModel, tmp_path: Path) -> None:
    together = make_runner(llama, tmp_path / "together")
    pair = [make(together, uid, tmp_path / "t") for uid in (FIRST, SECOND)]
    interleaved: dict[str, list[Result]] = {FIRST: [], SECOND: []}
    for turn in range(3):
        for client in pair if turn % 2 == 0 else reversed(pair):
            interleaved[client.uid] += moves(client, turn)

    for mixed in pair:
        alone = make(make_runner(llama, tmp_path / mixed.uid), mixed.uid, tmp_path / "alone")
        results = [result for turn in range(3) for result in moves(alone, turn)]
        assert results == interleaved[mixed.uid]
        for name, value in alone.session.buffers().items():
            assert torch.equal(value, mixed.session.buffers()[name]), name
        assert alone.session.checksum() == mixed.session.checksum()


def test_a_session_starts_as_its_seed_says(runner: Runner, tmp_path: Path) -> None:
    first, again = make(runner, FIRST, tmp_path), make(runner, "other", tmp_path)
    again.seed, again.rank = first.seed, first.rank
    again.runner.close("other")
    again.open()
    assert torch.equal(first.session.adapter.weights, again.session.adapter.weights)


def test_counters_count_operations_and_tokens(client: Client) -> None:
    client.train([datum([5, 6, 7])])
    client.sample(prompt=[5, 6], num_samples=3, max_tokens=4)
    client.executed(step(), replay=True)

    def value(name: str, **labels: str) -> float | None:
        return client.runner.metrics.registry.get_sample_value(name, labels)

    tokens = "gristmill_worker_tokens_total"
    assert value(tokens, token_type="train", replay="false") == 3
    assert value(tokens, token_type="prefill", replay="false") == 2
    assert value(tokens, token_type="cached_prefill", replay="false") == 4
    sampled = value(tokens, token_type="sample", replay="false")
    assert sampled is not None
    assert 3 <= sampled <= 12
    operations = "gristmill_worker_operations_total"
    assert value(operations, kind="sample", outcome="completed", replay="false") == 1
    assert value(operations, kind="optim_step", outcome="completed", replay="true") == 1
    assert value("gristmill_worker_sessions") == 1
