"""What an operation will need is known before it runs: no less than measured, and not far more."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from gristmill_contracts.errors import InvalidRequestError, OperationFailedError
from gristmill_contracts.operations import (
    ComputeLogprobs,
    Forward,
    ForwardBackward,
    Operation,
    tensor,
)
from gristmill_testing import tiny_models
from gristmill_testing.local_runner import Client, datum, load, make_runner, sample, step
from gristmill_testing.peak_memory import peak_bytes
from gristmill_worker import memory, room
from gristmill_worker.base_model import BaseModel
from gristmill_worker.batch import plan
from gristmill_worker.memory import Batch
from gristmill_worker.optimizer import Spares
from gristmill_worker.room import Room
from gristmill_worker.sizes import Sizes, sizes_of

TOO_MUCH = 4.0
"""An estimate that is so many times what was measured refuses what would have fitted."""
BUDGET = 512


def rows(*lengths: int) -> list[Any]:
    return [datum([1 + (at + j) % 500 for j in range(n)]) for at, n in enumerate(lengths)]


def trains(*lengths: int) -> ForwardBackward:
    return ForwardBackward(loss="cross_entropy", loss_config={}, datums=rows(*lengths))


def scores(*lengths: int) -> Forward:
    return Forward(loss="cross_entropy", loss_config={}, datums=rows(*lengths))


def prompt(length: int) -> list[int]:
    return [1 + at % 500 for at in range(length)]


OPERATIONS: dict[str, Operation] = {
    "training, equal lengths": trains(128, 128, 128, 128),
    "training, ragged": trains(200, 31, 64, 7, 90),
    "training, several passes": trains(300, 300, 300),
    "training, one long datum": trains(900),
    "scoring, equal lengths": scores(128, 128, 128, 128),
    "scoring, one long datum": scores(900),
    "a prompt's logprobs": ComputeLogprobs(
        prompt=tensor("int64", prompt(400)), topk=3, adapter=None
    ),
    "sampling, a long prompt": sample(prompt(400), max_tokens=4),
    "sampling, many rows": sample(prompt(40), num_samples=32, max_tokens=60),
    "sampling, cut": sample(prompt(40), num_samples=8, max_tokens=20, top_k=5, top_p=0.9),
}


@dataclass(slots=True)
class Asked:
    """An operation at a runner, the room that it was checked against, and how much it took."""

    needed: int
    taken: int


def ask(base: BaseModel, folder: Path, operation: Operation) -> Asked:
    runner = make_runner(base, folder / "a", budget=BUDGET)
    client = Client(runner, "u", str(folder / "s"))
    client.open()
    client.run(trains(16))  # whatever is made once is there
    client.step()
    told: list[int] = []
    checked = made_room(base, lambda: None)
    checked._compare = lambda needed, *_: told.append(needed)  # type: ignore[method-assign]
    checked.check(operation, client.rank)
    taken = peak_bytes(lambda: client.run(operation), base.device)
    return Asked(told[0], taken)


def made_room(base: BaseModel, available: Callable[[], int | None]) -> Room:
    return Room(sizes_of(base), budget=BUDGET, packed=base.packed, world=1, available=available)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("path", ["fast", "generic"])
def test_an_operation_takes_what_was_foretold(
    name: str, path: Any, llama_dir: Path, tmp_path: Path
) -> None:
    asked = ask(load(llama_dir, path=path), tmp_path, OPERATIONS[name])
    assert asked.taken <= asked.needed <= TOO_MUCH * asked.taken


@pytest.mark.parametrize(
    "family", ["gpt2", "falcon", "bloom", "mpt", "gemma2", "mistral", "qwen2", "qwen3"]
)
def test_training_every_family_takes_what_was_foretold(
    family: str, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    if family == "qwen3":
        config = Qwen3Config(**tiny_models._llama_like(), head_dim=16)
        tiny_models._build(folder, 0, config)
    else:
        folder = family_dir(family)
    asked = ask(load(folder), tmp_path, trains(128, 128, 100))
    assert asked.taken <= asked.needed <= TOO_MUCH * asked.taken


def test_a_step_takes_what_was_foretold(llama: BaseModel, tmp_path: Path) -> None:
    client = Client(make_runner(llama, tmp_path / "a"), "u", str(tmp_path / "s"))
    client.open()
    client.run(trains(16))
    llama.spares = Spares()  # the first step of a process finds none
    needed = memory.step_bytes(sizes_of(llama), client.rank)
    taken = peak_bytes(client.step, llama.device)
    assert taken <= needed <= TOO_MUCH * taken


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_merged_export_takes_what_was_foretold(
    family: str, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    base = load(family_dir(family))
    client = Client(make_runner(base, tmp_path / "a"), "u", str(tmp_path / "s"))
    client.open()
    client.save_weights(merge=True)  # what is made once, by imports
    needed = memory.merge_bytes(sizes_of(base), client.rank)
    taken = peak_bytes(lambda: client.save_weights(merge=True), base.device)
    assert taken <= needed <= TOO_MUCH * taken


# --- refusal ---------------------------------------------------------------------------------------


@pytest.fixture
def tight(llama: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A session whose worker has 1 MB left."""
    monkeypatch.setattr(room, "NEVER_REFUSED_BYTES", 0)
    runner = make_runner(llama, tmp_path / "a", budget=BUDGET)
    runner.room = made_room(llama, lambda: 1_000_000)
    client = Client(runner, "u", str(tmp_path / "s"))
    client.open()
    return client


def test_what_cannot_fit_is_refused_with_the_numbers_and_changes_nothing(tight: Client) -> None:
    tight.train(rows(4))
    before = tight.session.gradient.clone()
    with pytest.raises(InvalidRequestError) as refused:
        tight.train(rows(8, 500))
    found = refused.value.message
    assert "1000000 are available" in found
    needed = memory.batch_bytes(
        sizes_of(tight.runner.base),
        Batch(
            lengths=(8, 500), targets=1, budget=BUDGET, packed=True, world=1, rank=8, trains=True
        ),
    )
    assert f"about {needed} bytes" in found
    assert "datum 1 has 500 tokens" in found
    assert torch.equal(tight.session.gradient, before)
    assert tight.session.counters.accumulated == 1
    tight.train(rows(4))


@pytest.mark.parametrize(
    ("operation", "remedy"),
    [
        (trains(500), r"datum 0 has 500 tokens, and about \d+ fit"),
        (trains(*[2] * 250), "GRISTMILL_WORKER_TOKEN_BUDGET"),
        (sample(prompt(9), num_samples=40, max_tokens=99), "lower max_tokens or num_samples"),
        (
            ComputeLogprobs(prompt=tensor("int64", prompt(900)), topk=0, adapter=None),
            "the prompt has 900 tokens",
        ),
    ],
)
def test_a_refusal_says_what_would_help(tight: Client, operation: Operation, remedy: str) -> None:
    with pytest.raises(InvalidRequestError, match=remedy):
        tight.run(operation)


def test_a_merged_export_is_held_against_the_hosts_memory(tight: Client) -> None:
    assert tight.runner.room is not None
    tight.runner.room.host = lambda: 100_000
    with pytest.raises(InvalidRequestError, match=r"100000 are available.* without merge"):
        tight.save_weights(merge=True)
    tight.save_weights()


def test_a_step_that_does_not_fit_can_be_sent_again(tight: Client) -> None:
    tight.train(rows(4))
    assert tight.runner.room is not None
    tight.runner.room.available = lambda: 1000
    with pytest.raises(InvalidRequestError, match="use a lower rank"):
        tight.step()
    tight.runner.room.available = lambda: None
    assert tight.step()["step"] == 1


def test_a_replay_is_never_refused(tight: Client) -> None:
    """It fitted once; refused now, the session would diverge from its log."""
    executed = tight.executed(trains(500), replay=True)
    assert executed.error is None


def test_where_nobody_knows_what_is_there_nothing_is_refused(tight: Client) -> None:
    assert tight.runner.room is not None
    tight.runner.room.available = lambda: None
    tight.run(trains(500))


def test_small_operations_are_not_looked_at(llama: BaseModel) -> None:
    def nobody_asks() -> int:
        raise AssertionError("asked")

    made_room(llama, nobody_asks).check(trains(8), 8)


def test_an_error_of_memory_still_fails_the_one_operation(
    tight: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate leaves out what kernels take: what it missed is caught as before."""

    def full(*_: object) -> None:
        raise MemoryError("no detail")

    with monkeypatch.context() as patched:
        patched.setattr(tight.runner.base, "hidden_packed", full)
        with pytest.raises(OperationFailedError, match="ran out of memory"):
            tight.train(rows(4))
    tight.train(rows(4))
    tight.run(step())


# --- pure ------------------------------------------------------------------------------------------

SMOLLM2 = Sizes(
    path="fast", item_bytes=2, layers=30, hidden=576, heads=9, kv_heads=3, head_size=64, inner=1536,
    vocabulary=49_152, context=8192, linears=((576, 576), (192, 576), (192, 576), (576, 576),
    (1536, 576), (1536, 576), (576, 1536)) * 30, windows=(None,) * 30, qk_norm=False,
    parameters=134_515_008,
)  # fmt: skip


def batch(*lengths: int, budget: int = 2048) -> Batch:
    return Batch(
        lengths=lengths, targets=1, budget=budget, packed=True, world=1, rank=16, trains=True
    )


def test_the_135m_model_at_its_benchmark_needs_what_was_measured_there() -> None:
    """4 x 256 in bf16 took 2.1 to 3.5 GB in all, of which 0.4 GB are imports and 0.5 GB the base (facts B3)."""
    assert 0.7e9 < memory.batch_bytes(SMOLLM2, batch(256, 256, 256, 256)) < 3.0e9


@settings(deadline=None)
@given(st.integers(16, 8000), st.integers(1, 3000))
def test_a_longer_datum_never_needs_less(length: int, more: int) -> None:
    """Below 16 tokens a pass is filled up; behind MATMUL_LENGTH_MAX another kernel keeps less."""
    first, second = (memory.batch_bytes(SMOLLM2, batch(n)) for n in (length, length + more))
    assert first <= second or length <= memory.MATMUL_LENGTH_MAX < length + more


@settings(deadline=None)
@given(st.integers(1, 8192), st.integers(10**6, 10**11))
def test_the_longest_that_fits_fits(length: int, available: int) -> None:
    fits = memory.longest_fitting(SMOLLM2, batch(length), available)
    assert 0 <= fits <= length
    if fits:
        assert memory.batch_bytes(SMOLLM2, batch(fits)) <= available


def test_a_request_of_many_passes_needs_one_of_them(llama: BaseModel) -> None:
    sizes = sizes_of(llama)
    one, many = batch(*[100] * 5, budget=512), batch(*[100] * 50, budget=512)
    results = sum(many.lengths) * memory.WIDE - sum(one.lengths) * memory.WIDE
    assert len(plan(list(many.lengths), 512, packed=True)) == 10
    assert memory.batch_bytes(sizes, many) == memory.batch_bytes(sizes, one) + results


# --- what there is ---------------------------------------------------------------------------------


def test_the_smaller_of_machine_and_control_group_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:   4000 kB\n")
    group = tmp_path / "group"
    group.mkdir()
    assert room.on_host(meminfo, group) == 4000 * 1024
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.current").write_text("2500000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 400000\n")
    assert room.on_host(meminfo, group) == 900_000
    (group / "memory.max").write_text("max\n")
    assert room.on_host(meminfo, group) == 4000 * 1024


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    group = tmp_path / "memory"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("5000\n")
    (group / "memory.usage_in_bytes").write_text("6000\n")
    (group / "memory.stat").write_text("total_inactive_file 500\n")
    assert room.left_in_cgroup(tmp_path) == 0
    assert room.on_host(tmp_path / "none", tmp_path) == 0
    assert room.on_host(tmp_path / "none", tmp_path / "none") is None


def test_this_machine_tells_what_it_has() -> None:
    found = room.on_host()
    assert found is None or found >= 0
