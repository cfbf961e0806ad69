"""Snapshots survive what a power cut leaves, and a replay after one gives the same bits."""

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from gristmill_contracts.errors import ConflictError, GristmillError, UnavailableError
from gristmill_contracts.http import Executed, Snapshotted
from gristmill_contracts.operations import ForwardBackward, Operation
from gristmill_testing.local_runner import Client, datum, load, make_runner, step
from gristmill_testing.lossy_disk import Crash, HeldDisk, LossyDisk
from gristmill_testing.tiny_models import build_tiny_llama
from gristmill_worker.base_model import BaseModel

UID = "22222222-2222-2222-2222-222222222222"
STATE = "/state/22"


def backward(*rows: list[int]) -> ForwardBackward:
    return ForwardBackward(
        loss="cross_entropy", loss_config={}, datums=[datum(row) for row in rows]
    )


OPERATIONS: list[Operation] = [
    backward([5, 6, 7], [8, 9]), step(), backward([10, 11, 12]), backward([5, 9]), step(),
    backward([40, 41, 42, 43]), step(), backward([3, 4]),
]  # fmt: skip


def opened(
    base: BaseModel, disk: LossyDisk, tmp_path: Path, applied_max: int | None = None
) -> Client:
    client = Client(make_runner(base, tmp_path / "a", disk=disk), UID, STATE)
    client.open(applied_max)
    return client


def buffers(client: Client) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in client.session.buffers().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("at", [0, 1, 3, 5, 8])
def test_a_replay_after_a_snapshot_is_bitwise_the_first_run(
    llama: BaseModel, tmp_path: Path, at: int
) -> None:
    """Also with gradients that no step has used yet, and with nothing but the fresh adapter."""
    disk = LossyDisk()
    client = opened(llama, disk, tmp_path)
    executed: list[Executed] = []
    for number, operation in enumerate(OPERATIONS):
        if number == at:
            client.snapshot()
        executed.append(client.executed(operation))
    if at == len(OPERATIONS):
        client.snapshot()
    expected = buffers(client)
    counters = client.session.counters

    disk.crash()
    again = opened(llama, disk, tmp_path)
    assert again.applied == at
    for operation, first in zip(OPERATIONS[at:], executed[at:], strict=True):
        second = again.executed(
            operation, replay=True, expected_checksum=first.checksum,
            expected_fingerprint=first.fingerprint,
        )  # fmt: skip
        assert second.error is None
        assert second.result == first.result
    assert same(buffers(again), expected)
    assert again.session.counters == counters


def test_a_crash_at_any_call_leaves_the_old_snapshot_or_the_new_one(
    llama: BaseModel, tmp_path: Path
) -> None:
    outcomes: set[int] = set()
    call = 0
    while True:
        disk = LossyDisk()
        client = opened(llama, disk, tmp_path)
        client.run(OPERATIONS[0])
        client.snapshot()
        states = {1: buffers(client)}
        client.run(OPERATIONS[1])
        states[2] = buffers(client)
        disk.calls_left = call
        try:
            client.snapshot()
        except Crash:
            crashed = True
        else:
            crashed = False
        disk.crash()
        again = opened(llama, disk, tmp_path)
        assert same(buffers(again), states[again.applied]), call
        outcomes.add(again.applied)
        again.snapshot()  # what was left half written is in nobody's way
        if not crashed:
            assert again.applied == 2
            break
        call += 1
    assert outcomes == {1, 2}
    assert call >= 8


def test_a_snapshot_that_does_not_fit_leaves_the_session_as_it_was(
    llama: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = LossyDisk()
    client = opened(llama, disk, tmp_path)
    client.run(OPERATIONS[0])
    client.snapshot()
    client.run(OPERATIONS[1])
    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync_file", no_space)
        with pytest.raises(UnavailableError, match="No space left"):
            client.snapshot()
    assert disk.names(Path(STATE) / "snapshots") == ["1"]
    client.run(OPERATIONS[2])
    assert client.snapshot().applied == 3


def test_the_engine_goes_on_while_a_snapshot_is_written(llama: BaseModel, tmp_path: Path) -> None:
    """It is of the moment when it was asked for, and does not exist before it is durable."""
    disk = HeldDisk()
    client = opened(llama, disk, tmp_path)
    client.run(OPERATIONS[0])
    expected = buffers(client)
    snapshot = client.runner.snapshot(UID)
    assert disk.writing.wait(120)
    for operation in OPERATIONS[1:3]:  # a step, which changes weights and moments, and a gradient
        client.run(operation)
    assert not snapshot.done()
    assert disk.names(Path(STATE) / "snapshots") in ([], [".writing-1"])

    disk.go.set()
    assert snapshot.result(120).applied == 1
    assert client.session.counters.applied == 3
    disk.crash()
    again = opened(llama, disk, tmp_path)
    assert again.applied == 1
    assert same(buffers(again), expected)


def test_snapshots_are_written_one_after_the_other(llama: BaseModel, tmp_path: Path) -> None:
    disk = HeldDisk()
    client = opened(llama, disk, tmp_path)
    order: list[int] = []
    taken: list[Future[Snapshotted]] = []
    for operation in OPERATIONS[:3]:
        client.run(operation)
        taken.append(client.runner.snapshot(UID))
        taken[-1].add_done_callback(lambda done: order.append(done.result().applied))
    disk.go.set()
    for each in taken:
        each.result(120)
    client.runner.writer.wait()
    assert order == [1, 2, 3]
    assert disk.names(Path(STATE) / "snapshots") == ["2", "3"]


def test_a_failed_snapshot_does_not_stop_the_next_one(
    llama: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HeldDisk()
    client = opened(llama, disk, tmp_path)
    client.run(OPERATIONS[0])
    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync_file", no_space)
        failed = client.runner.snapshot(UID)
        disk.go.set()
        with pytest.raises(UnavailableError, match="No space left"):
            failed.result(120)
    assert client.snapshot().applied == 1


@pytest.mark.parametrize("act", ["open", "close", "stop"])
def test_opening_closing_and_stopping_wait_for_what_is_being_written(
    llama: BaseModel, tmp_path: Path, act: str
) -> None:
    """And what is written then is found: by the roll back, by the next process."""
    disk = HeldDisk()
    client = opened(llama, disk, tmp_path)
    client.run(OPERATIONS[0])
    first = client.runner.snapshot(UID)
    assert disk.writing.wait(120)
    client.run(OPERATIONS[1])
    acts = {
        "open": lambda: client.open(applied_max=1),
        "close": lambda: client.runner.close(UID),
        "stop": client.runner.snapshot_all,
    }
    waiting = threading.Thread(target=acts[act])
    waiting.start()
    assert not first.done()
    disk.go.set()
    waiting.join(120)
    assert first.result(0).applied == 1
    disk.crash()
    again = opened(llama, disk, tmp_path)
    assert again.applied == (2 if act == "stop" else 1)


def no_space(_path: Path) -> None:
    raise OSError(28, "No space left on device")


def test_two_snapshots_are_kept(llama: BaseModel, tmp_path: Path) -> None:
    disk = LossyDisk()
    client = opened(llama, disk, tmp_path)
    for operation in OPERATIONS[:5]:
        client.run(operation)
        client.snapshot()
    assert disk.names(Path(STATE) / "snapshots") == ["4", "5"]


def test_a_damaged_snapshot_gives_way_to_the_older_one(llama: BaseModel, tmp_path: Path) -> None:
    disk = LossyDisk()
    client = opened(llama, disk, tmp_path)
    client.run(OPERATIONS[0])
    client.snapshot()
    older = buffers(client)
    client.run(OPERATIONS[1])
    client.snapshot()
    disk.damage(Path(STATE) / "snapshots" / "2" / "buffers.safetensors")
    again = opened(llama, disk, tmp_path)
    assert again.applied == 1
    assert same(buffers(again), older)


def test_a_snapshot_of_another_base_model_is_refused(llama: BaseModel, tmp_path: Path) -> None:
    disk = LossyDisk()
    opened(llama, disk, tmp_path).snapshot()
    other = load(build_tiny_llama(tmp_path / "m", seed=9))
    with pytest.raises(ConflictError) as caught:
        opened(other, disk, tmp_path)
    assert llama.facts.revision in caught.value.message
    assert other.facts.revision in caught.value.message


def test_a_state_ahead_of_the_log_is_rolled_back(llama: BaseModel, tmp_path: Path) -> None:
    """The answer of operation 3 was lost: the log holds two, and goes on with another third one."""
    disk = LossyDisk()
    client = opened(llama, disk, tmp_path)
    client.run(OPERATIONS[0])
    client.snapshot()
    client.run(OPERATIONS[1])
    expected = buffers(client)
    client.run(OPERATIONS[2])
    client.snapshot()

    assert client.open(applied_max=2).applied == 1  # the newest snapshot that the log holds
    assert disk.names(Path(STATE) / "snapshots") == ["1"]
    client.run(OPERATIONS[1], replay=True)
    assert same(buffers(client), expected)
    assert client.open(applied_max=2).applied == 2  # live and not ahead: it stays


def test_without_a_snapshot_a_roll_back_starts_over(llama: BaseModel, tmp_path: Path) -> None:
    client = opened(llama, LossyDisk(), tmp_path)
    fresh = buffers(client)
    client.run(OPERATIONS[0])
    assert client.open(applied_max=0).applied == 0
    assert same(buffers(client), fresh)


def test_opening_again_keeps_the_live_session(llama: BaseModel, tmp_path: Path) -> None:
    client = opened(llama, LossyDisk(), tmp_path)
    client.run(OPERATIONS[0])
    before = buffers(client)
    answer = client.open()
    assert (answer.applied, answer.rank, answer.alpha) == (1, 8, 16)
    assert same(buffers(client), before)
    assert answer.checksum == client.session.checksum()


def test_another_checksum_on_the_same_fingerprint_is_divergence(
    llama: BaseModel, tmp_path: Path
) -> None:
    client = opened(llama, LossyDisk(), tmp_path)
    client.run(OPERATIONS[0])
    executed = client.executed(
        step(), replay=True, expected_checksum=1, expected_fingerprint=client.runner.fingerprint
    )
    assert executed.error is not None
    assert executed.error.code == "replay_diverged"


def test_on_another_fingerprint_a_checksum_is_not_compared(
    llama: BaseModel, tmp_path: Path
) -> None:
    client = opened(llama, LossyDisk(), tmp_path)
    client.run(OPERATIONS[0])
    executed = client.executed(
        step(), replay=True, expected_checksum=1, expected_fingerprint="another machine"
    )
    assert executed.error is None
    assert executed.checksum == client.session.checksum()


def test_only_steps_and_loads_carry_a_checksum(llama: BaseModel, tmp_path: Path) -> None:
    client = opened(llama, LossyDisk(), tmp_path)
    assert client.executed(OPERATIONS[0]).checksum is None
    assert client.executed(OPERATIONS[1]).checksum == client.session.checksum()


def test_a_skipped_operation_consumes_its_index_and_does_nothing(
    llama: BaseModel, tmp_path: Path
) -> None:
    client = opened(llama, LossyDisk(), tmp_path)
    before = buffers(client)
    executed = client.executed(OPERATIONS[0], replay=True, skip=True)
    assert (executed.result, executed.error) == (None, None)
    assert client.session.counters.applied == 1
    assert same(buffers(client), before)


def test_an_index_out_of_turn_is_a_conflict_that_consumes_nothing(
    llama: BaseModel, tmp_path: Path
) -> None:
    client = opened(llama, LossyDisk(), tmp_path)
    client.run(OPERATIONS[0])
    for wrong in (1, 3):
        client.applied = wrong - 1
        with pytest.raises(ConflictError, match=f"index {wrong} was sent but 2 is next"):
            client.run(OPERATIONS[1])
    client.applied = 1
    client.run(OPERATIONS[1])


def test_a_failed_operation_consumes_its_index(llama: BaseModel, tmp_path: Path) -> None:
    client = opened(llama, LossyDisk(), tmp_path)
    with pytest.raises(GristmillError):
        client.run(step())
    client.run(OPERATIONS[0])
    assert client.session.counters.applied == 2


def test_a_session_that_is_closed_comes_back_from_its_snapshot(
    llama: BaseModel, tmp_path: Path
) -> None:
    disk = LossyDisk()
    client = opened(llama, disk, tmp_path)
    client.run(OPERATIONS[0])
    client.snapshot()
    client.runner.close(UID)
    client.runner.close(UID)
    with pytest.raises(GristmillError, match="not open"):
        client.run(OPERATIONS[1])
    assert client.open().applied == 1
