"""A worker that was killed and started again gives the same bits: fingerprint, checksums, results."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gristmill_contracts.http import Executed
from gristmill_contracts.operations import Forward, ForwardBackward, Operation
from gristmill_testing.bare_worker import running_worker
from gristmill_testing.local_runner import datum, step
from gristmill_worker.base_model import BaseModel
from gristmill_worker.fingerprint import fingerprint

DATA = [datum(list(range(5, 45))), datum([9, 8, 7, 6]), datum([3])]


def backward(*rows: int) -> ForwardBackward:
    datums = [DATA[row] for row in rows]
    return ForwardBackward(loss="cross_entropy", loss_config={}, datums=datums)


OPERATIONS: list[Operation] = [
    backward(0, 1), step(), backward(1, 2), backward(0), step(3e-3, weight_decay=0.1), backward(2),
    step(), Forward(loss="cross_entropy", loss_config={}, datums=DATA),
]  # fmt: skip
SNAPSHOT_BEHIND = 3
"""Operations: a gradient that no step has used yet is part of it."""


@pytest.mark.timeout(600)  # two processes load torch
def test_a_replay_in_another_process_is_bitwise_the_first_run(
    tmp_path: Path, llama_dir: Path
) -> None:
    first: list[Executed] = []
    with running_worker(tmp_path, llama_dir, dtype="float32", threads=1) as session:
        session.open(rank=8, alpha=16)
        before = session.status().fingerprint
        for number, operation in enumerate(OPERATIONS):
            if number == SNAPSHOT_BEHIND:
                assert session.snapshot().applied == SNAPSHOT_BEHIND
            first.append(session.executed(operation))
        os.kill(session.pid, signal.SIGKILL)
    session.hang_up()
    with running_worker(tmp_path, llama_dir, dtype="float32", threads=1) as other:
        other.hang_up()
        session.open(rank=8, alpha=16)
        assert session.applied == SNAPSHOT_BEHIND
        assert session.status().fingerprint == before
        again = [
            session.executed(
                operation, replay=True, expected_checksum=executed.checksum,
                expected_fingerprint=executed.fingerprint,
            )
            for operation, executed in zip(
                OPERATIONS[SNAPSHOT_BEHIND:], first[SNAPSHOT_BEHIND:], strict=True
            )
        ]  # fmt: skip
        session.executed(backward(1))
        wrong = session.executed(
            step(), replay=True, expected_checksum=1, expected_fingerprint=before
        )
        session.close()
    assert [each.error for each in again] == [None] * len(again)
    assert [each.checksum for each in again] == [each.checksum for each in first[SNAPSHOT_BEHIND:]]
    assert sum(each.checksum is not None for each in again) == 2
    for second, executed in zip(again, first[SNAPSHOT_BEHIND:], strict=True):
        assert second.result == executed.result
    assert wrong.error is not None
    assert wrong.error.code == "replay_diverged"


def test_a_fingerprint_is_a_function_of_what_it_names(llama: BaseModel) -> None:
    assert fingerprint(llama, 512) == fingerprint(llama, 512)
    assert fingerprint(llama, 512) != fingerprint(llama, 1024)
    assert fingerprint(llama, 512) != fingerprint(llama, 512, world=2)


def test_attention_without_an_order_is_never_held_to_its_bits(
    llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, where a model runs transformers' own attention: no two processes have one fingerprint."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some device")

    def on_cuda(*, packed: bool) -> object:
        return SimpleNamespace(
            device=torch.device("cuda"), dtype=llama.dtype, packed=packed, path="generic", mode="",
            facts=llama.facts, invariant=False,
        )  # fmt: skip

    unordered, ordered = on_cuda(packed=False), on_cuda(packed=True)
    assert fingerprint(ordered, 512) == fingerprint(ordered, 512)  # type: ignore[arg-type]
    assert fingerprint(unordered, 512) != fingerprint(unordered, 512)  # type: ignore[arg-type]
