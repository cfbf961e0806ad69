"""The train stream at a meter: order, failures, gaps, saves, and a worker that dies."""

import asyncio
import logging
from collections.abc import Callable

import msgspec
import pytest

from gristmill_contracts import operations as ops
from gristmill_contracts.errors import ConflictError, InvalidRequestError, NotFoundError
from gristmill_contracts.http import Problem
from gristmill_contracts.usage import Counts
from gristmill_meter import execution
from gristmill_meter.intake import submit_operation
from gristmill_meter.release import poll_operation
from gristmill_testing.meter_world import (
    UID,
    World,
    forward,
    forward_backward,
    load_state,
    make_submit,
    optim_step,
    sample,
    save_state,
    save_weights,
)

OOM = Problem(code="out_of_memory", message="no room for 9 GiB")


def op(number: int) -> str:
    return f"{UID}/train/{number}"


async def test_operations_run_one_at_a_time_in_number_order(world: World) -> None:
    for number in (3, 1, 4, 2):
        await world.submit(number, forward_backward(3, number))
    for number in range(1, 5):
        assert (await world.poll("train", number)).state == "Completed"
    assert world.worker.order == [op(number) for number in range(1, 5)]
    assert world.worker.at_once_max == 1


async def test_a_lost_answer_to_a_submit_makes_one_run(world: World) -> None:
    first = await world.submit(1, forward_backward())
    again = await world.submit(1, forward_backward())
    assert (first.duplicate, again.duplicate, again.number) == (False, True, 1)
    await world.poll("train", 1)
    last = await world.submit(1, forward_backward())
    assert (last.duplicate, last.state) == (True, "Completed")
    await world.settled()
    assert world.worker.runs[op(1)] == 1
    assert len(world.ledger.events) == 1


async def test_out_of_memory_in_chunk_2_of_3_leaves_the_gradient_alone_and_skips_the_rest(
    make_world: Callable[..., World],
) -> None:
    world = make_world()
    gate = asyncio.Event()
    world.worker.before = lambda op_id, operation: gate.wait()
    world.worker.fail[op(2)] = [OOM]
    await world.start()
    for number in (1, 2, 3):
        await world.submit(number, forward_backward(5, number))
    await world.submit(4, optim_step())
    gate.set()
    views = [await world.poll("train", number) for number in (1, 2, 3, 4)]
    assert [view.state for view in views] == ["Completed", "Failed", "Skipped", "Skipped"]
    assert views[1].error is not None
    assert views[1].error.code == "out_of_memory"
    assert views[1].counts is None
    gradient = world.worker.sessions[UID].state.gradient
    assert gradient != 0
    assert world.worker.sessions[UID].state.steps == 0
    assert (await world.train(5, optim_step())).state == "Completed"
    await world.settled()
    assert world.ledger.billed() == Counts(train=5)
    assert sorted(event.number for event in world.ledger.events) == [1, 5]
    assert world.session.service == "Serving"


async def test_what_failed_is_not_run_in_a_replay_even_if_it_would_succeed_now(
    world: World,
) -> None:
    world.worker.fail[op(2)] = [OOM]
    await world.train(1, forward_backward(3))
    await world.train(2, forward_backward(4))
    before = await world.train(3, optim_step())
    state = world.worker.sessions[UID].state
    world.worker.kill()
    await world.until(lambda: UID in world.worker.sessions and world.session.worker_ready)
    assert world.worker.sessions[UID].state == state
    assert await world.poll("train", 3) == before


async def test_a_gap_blocks_the_session_until_it_is_filled(world: World) -> None:
    await world.submit(1, forward_backward())
    await world.submit(3, optim_step())
    await world.poll("train", 1)
    view = world.session.view()
    assert (view.state, view.missing_number, view.next_number) == ("Blocked", 2, 2)
    assert view.last_received_number == 3
    await world.until(lambda: world.ledger.states[-1:] == ["Blocked"], "Blocked was told at once")
    assert (await world.poll("train", 3, wait_s=0.01)).state == "Pending"
    await world.submit(2, forward_backward())
    assert (await world.poll("train", 3)).state == "Completed"
    assert world.session.view().state == "Serving"


async def test_a_gap_that_stays_fails_the_session_and_names_the_number(
    make_world: Callable[..., World],
) -> None:
    world = await make_world(gap_timeout_s=0.1).start()
    await world.submit(1, forward_backward())
    await world.submit(3, optim_step())
    view = await world.poll("train", 3)
    assert view.state == "Skipped"
    shown = world.session.view()
    assert shown.state == "Failed"
    assert shown.error is not None
    assert "sequence number 2 did not arrive" in shown.error.message
    assert (await world.poll("train", 1)).state == "Completed"
    with pytest.raises(ConflictError, match="sequence number 2"):
        await world.submit(2, forward_backward())
    await world.crash()
    assert world.session.view().state == "Failed"
    assert (await world.poll("train", 3)).state == "Skipped"


async def test_a_refused_number_runs_nothing_counts_nothing_and_leaves_no_gap(
    world: World,
) -> None:
    await world.train(1, forward_backward(5))
    refused = await world.refuse(2, breaks_accumulation=True)
    assert refused.state == "Refused"
    assert (await world.poll("train", 2)).state == "Refused"
    assert (await world.train(3, optim_step())).state == "Skipped"
    assert (await world.train(4, forward_backward(5))).state == "Completed"
    await world.settled()
    assert world.ledger.billed() == Counts(train=10)
    assert world.session.view().state == "Serving"


async def test_a_refusal_that_was_answered_outlives_a_power_cut(world: World) -> None:
    """The client never sends the number again: forgotten, it would be a gap."""
    await world.refuse(1)
    await world.crash()
    assert (await world.poll("train", 1)).state == "Refused"
    assert (await world.train(2, forward_backward())).state == "Completed"


async def test_a_save_is_registered_before_its_result_and_names_its_version(world: World) -> None:
    world.ledger.away = True
    await world.submit(1, save_weights())
    await world.until(lambda: world.ledger.calls["register_checkpoint"] >= 3, "three tries")
    assert (await world.poll("train", 1, wait_s=0.01)).state == "InProgress"
    world.ledger.away = False
    view = await world.poll("train", 1)
    assert isinstance(view.result, ops.SaveResult)
    assert (view.result.group, view.result.version) == ("checkpoints", 1)
    (known,) = world.ledger.checkpoints.values()
    assert (known.description, known.path) == ("mine", view.result.path)
    assert world.worker.runs[op(1)] == 1


async def test_a_save_that_the_ledger_refuses_fails(world: World) -> None:
    world.ledger.checkpoint_error = NotFoundError("no group 'checkpoints'; create it")
    view = await world.train(1, save_weights())
    assert view.state == "Failed"
    assert view.error is not None
    assert "no group" in view.error.message
    assert (await world.train(2, forward_backward())).state == "Completed"


async def test_saves_loads_and_choices_make_the_default_of_samples_in_order_of_completion(
    world: World,
) -> None:
    seen: list[str | None] = []

    def note(op_id: str, operation: ops.Operation) -> None:
        if isinstance(operation, ops.Sample):
            seen.append(operation.adapter.id if operation.adapter else None)

    world.worker.before = note
    await world.sample(sample())
    saved = (await world.train(1, save_weights())).result
    assert isinstance(saved, ops.SaveResult)
    await world.sample(sample())
    state = (await world.train(2, save_state())).result
    assert isinstance(state, ops.SaveResult)
    await world.sample(sample())
    first = ops.CheckpointRef(id=saved.checkpoint_id, path=saved.path, name="arn:1")
    await world.sample(ops.LoadWeightsForSampling(adapter=first))
    await world.sample(sample())
    second = ops.CheckpointRef(id=state.checkpoint_id, path=state.path, name="arn:2")
    await world.train(3, load_state(second))
    await world.crash()
    await world.sample(sample())
    await world.sample(sample(adapter="named"))
    assert seen == [None, first.id, second.id, first.id, second.id, "named"]


async def test_a_worker_that_dies_idle_is_brought_back_without_being_asked(world: World) -> None:
    await world.train(1, forward_backward())
    await world.train(2, optim_step())
    state = world.worker.sessions[UID].state
    world.worker.kill()
    await world.until(lambda: UID in world.worker.sessions and world.session.worker_ready)
    assert world.worker.sessions[UID].state == state
    assert world.worker.replays == {op(1): 1, op(2): 1}
    await world.settled()
    assert len(world.ledger.events) == 2


async def test_a_worker_that_is_away_is_waited_for_and_operations_stay_in_progress(
    make_world: Callable[..., World],
) -> None:
    world = make_world()
    world.worker.down = True
    await world.start()
    await world.submit(1, forward_backward())
    assert world.session.view().state == "Recovering"
    await world.until(lambda: world.worker.calls["open_session"] >= 3, "tried again")
    assert (await world.poll("train", 1, wait_s=0.02)).state == "Pending"
    world.worker.down = False
    assert (await world.poll("train", 1)).state == "Completed"


async def test_a_worker_killed_during_an_operation_runs_it_again_and_bills_it_once(
    world: World,
) -> None:
    await world.train(1, forward_backward(3))
    killed: list[int] = []

    def kill_twice(op_id: str, operation: ops.Operation) -> None:
        if op_id == op(2) and len(killed) < 2:
            killed.append(1)
            world.worker.kill()

    world.worker.after = kill_twice
    view = await world.train(2, forward_backward(4))
    assert view.state == "Completed"
    assert world.worker.runs[op(2)] == 3
    await world.settled()
    assert world.ledger.billed() == Counts(train=7)


async def test_an_operation_that_kills_the_worker_every_time_is_given_up(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "WORKER_DEATHS_MAX", 3)
    world = await make_world().start()

    def kill(op_id: str, operation: ops.Operation) -> None:
        if op_id == op(1):
            world.worker.kill()

    world.worker.before = kill
    view = await world.train(1, forward_backward())
    assert view.state == "Failed"
    assert view.error is not None
    assert "lost 3 times" in view.error.message
    assert (await world.train(2, forward_backward())).state == "Completed"


async def test_an_operation_that_the_worker_refuses_fails_and_consumes_no_index(
    world: World,
) -> None:
    def refuse(op_id: str, operation: ops.Operation) -> None:
        if op_id == op(1):
            raise InvalidRequestError("datum 0: token 99999 is outside the vocabulary")

    world.worker.before = refuse
    view = await world.train(1, forward_backward())
    assert view.state == "Failed"
    assert (await world.train(2, forward_backward())).state == "Completed"
    assert world.session.state.executed == [2]


class TestSnapshots:
    async def test_are_taken_when_replay_would_take_too_long(
        self, make_world: Callable[..., World]
    ) -> None:
        world = await make_world(snapshot_replay_s=0.003).start()
        for number in range(1, 8):
            await world.train(number, forward_backward(3, number))
        await world.until(lambda: world.session.state.snapshots[1] >= 3, "a snapshot was taken")
        older, newer = world.session.state.snapshots
        world.worker.kill()
        await world.until(lambda: world.session.worker_ready and UID in world.worker.sessions)
        assert sum(world.worker.replays.values()) == 7 - newer <= 4
        assert older < newer

    async def test_are_taken_when_what_to_feed_again_grows_too_large(
        self, make_world: Callable[..., World]
    ) -> None:
        world = await make_world(snapshot_payload_bytes=1).start()
        await world.train(1, forward_backward())
        await world.until(lambda: world.session.state.snapshots == (0, 1), "a snapshot was taken")

    async def test_are_taken_after_a_load(self, world: World) -> None:
        saved = (await world.train(1, save_state())).result
        assert isinstance(saved, ops.SaveResult)
        ref = ops.CheckpointRef(id=saved.checkpoint_id, path=saved.path, name="arn")
        await world.train(2, load_state(ref))
        await world.until(lambda: world.session.state.snapshots[1] == 2, "a snapshot was taken")

    async def test_never_hold_more_than_the_durable_log(
        self, make_world: Callable[..., World]
    ) -> None:
        world = await make_world(snapshot_payload_bytes=1).start()
        ahead: list[int] = []

        def look() -> None:
            state, log = world.session.state, world.session.log
            last = state.record_of_index(len(state.executed))
            if last.settled_frame > log.durable_number:
                ahead.append(last.number)

        world.worker.on_snapshot = look
        for number in range(1, 6):
            await world.submit(number, forward_backward(3, number))
        await world.poll("train", 5)
        await world.until(lambda: world.session.state.snapshots[1] == 5, "the last was taken")
        assert ahead == []

    async def test_that_fail_do_not_stop_training(self, make_world: Callable[..., World]) -> None:
        world = make_world(snapshot_replay_s=0)
        world.worker.refuse_snapshots = True
        await world.start()
        for number in range(1, 4):
            assert (await world.train(number, forward_backward())).state == "Completed"

    async def test_free_the_payloads_below_the_older_one(
        self, make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gristmill_meter.driver.SWEEP_S", 0.0)
        world = await make_world(snapshot_payload_bytes=1, claim_timeout_s=0.1).start()
        for number in range(1, 5):
            await world.train(number, forward_backward(4000, number))
        blobs = f"{UID}/blobs"
        await world.until(
            lambda: [n for n in world.disk.list(blobs) if n.endswith(".op")] == ["train-4.op"],
            "only what lies above the older snapshot is kept",
        )
        assert world.session.state.snapshots == (3, 4)
        await world.crash(worker=True)
        assert (await world.train(5, optim_step())).state == "Completed"


class TestDivergence:
    async def test_on_the_same_fingerprint_fails_the_session(self, world: World) -> None:
        await world.train(1, forward_backward())
        await world.train(2, optim_step())
        await world.submit(4, optim_step())
        world.worker.replay_noise = 1
        world.worker.kill()
        view = await world.poll("train", 4)
        assert view.state == "Skipped"
        error = world.session.view().error
        assert error is not None
        assert error.code == "replay_diverged"
        await world.settled()
        assert len(world.ledger.events) == 2

    async def test_on_another_fingerprint_the_session_goes_on_and_both_are_told(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        await world.train(1, forward_backward())
        await world.train(2, optim_step())
        world.worker.replay_noise = 1
        world.worker.fingerprint = "fake-2"
        with caplog.at_level(logging.WARNING, "gristmill_meter"):
            world.worker.kill()
            assert (await world.train(3, forward())).state == "Completed"
        told = [each for each in caplog.records if each.message == "replay_approximate"]
        assert [(each.first, each.now, each.operations) for each in told] == [
            ("fake-1", "fake-2", 2)
        ]

    async def test_a_replay_on_the_same_fingerprint_tells_nothing(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        await world.train(1, forward_backward())
        await world.train(2, optim_step())
        world.worker.kill()
        assert (await world.train(3, forward())).state == "Completed"
        assert world.worker.replays
        assert "replay_approximate" not in caplog.text

    async def test_a_worker_ahead_of_the_log_is_rolled_back(self, world: World) -> None:
        await world.train(1, forward_backward())
        state = world.worker.sessions[UID].state
        live = world.worker.sessions[UID]
        live.state = type(state)(weights=99, applied=5)
        world.worker.boot += 1
        await world.until(lambda: world.worker.sessions[UID].state == state, "rolled back")
        assert (await world.train(2, forward())).state == "Completed"


async def test_many_sessions_in_one_process_do_not_mix(world: World) -> None:
    other = type(UID)("99999999-2222-4333-8444-555555555555")
    world.assign(other, tenant="umbrella")
    assert world.meter is not None
    meter = world.meter
    await world.until(lambda: other in meter.drivers, "the second session is served")
    first = await world.train(1, forward_backward(3))
    world_session = world.session
    second = meter.drivers[other].session
    submit = make_submit(1, forward_backward(3))
    await submit_operation(second, submit, msgspec.msgpack.encode(submit.operation))
    view = await poll_operation(second, ("train", 1), 5)
    assert view.state == first.state == "Completed"
    await world.until(lambda: len(world.ledger.events) == 2, "both are posted")
    assert {(e.tenant, e.session) for e in world.ledger.events} == {
        ("acme", UID),
        ("umbrella", other),
    }
    assert world_session.state.counts == second.state.counts == Counts(train=3)
