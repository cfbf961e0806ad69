"""Keyless operations: a new one for every submit, billed when fetched, an attempt when never fetched."""

import asyncio
import random
from collections.abc import Callable

import pytest

from gristmill_contracts import limits
from gristmill_contracts import operations as ops
from gristmill_contracts.errors import NotFoundError, OverloadedError
from gristmill_contracts.http import Problem
from gristmill_contracts.ids import OpId, event_id
from gristmill_contracts.usage import Counts
from gristmill_meter.release import poll_operation
from gristmill_testing.fake_worker import sample_tokens
from gristmill_testing.meter_world import UID, World, compute_logprobs, forward_backward, sample


async def test_a_lost_answer_to_a_submit_makes_two_runs_and_one_bill(world: World) -> None:
    lost = await world.submit(None, sample(prompt=6, tokens=8))
    again = await world.submit(None, sample(prompt=6, tokens=8))
    assert lost.number != again.number
    view = await world.poll("log", again.number)
    assert view.counts == Counts(prefill=6, sample=8)
    await world.settled()
    assert sum(world.worker.runs.values()) == 2
    assert [event.number for event in world.ledger.events] == [again.number]


async def test_a_result_is_billed_at_its_first_fetch_and_never_again(world: World) -> None:
    number = (await world.submit(None, sample())).number
    await world.until(lambda: world.session.state.records["log", number].terminal)
    await world.settled()
    assert world.ledger.events == []
    assert world.session.view().counts == Counts()
    first = await world.poll("log", number)
    assert await world.poll("log", number) == first
    await world.crash()
    assert await world.poll("log", number) == first
    await world.settled()
    assert len(world.ledger.events) == 1
    assert isinstance(first.result, ops.SampleResult)
    assert first.result.sequences[0].tokens.tolist() == sample_tokens(sample(), 0)


async def test_a_fetch_whose_caller_has_left_claims_nothing(world: World) -> None:
    number = (await world.submit(None, sample())).number
    await world.until(lambda: world.session.state.records["log", number].terminal)

    async def left() -> bool:
        return True

    view = await poll_operation(world.session, ("log", number), 1, left)
    assert (view.state, view.result) == ("InProgress", None)
    assert world.session.state.unclaimed == {number: None}


async def test_a_result_that_nobody_fetches_in_time_becomes_an_attempt(
    make_world: Callable[..., World],
) -> None:
    world = await make_world(claim_timeout_s=0.1).start()
    number = (await world.submit(None, sample(prompt=6, tokens=8))).number
    await world.until(lambda: len(world.ledger.events) == 1, "the attempt was posted")
    (event,) = world.ledger.events
    assert (event.kind, event.n, event.counts) == ("attempt", 1, Counts(prefill=6, sample=8))
    assert event.event_id == event_id(OpId(UID, "log", number), "attempt", 1)
    assert world.ledger.billed() == Counts()
    view = await world.poll("log", number)
    assert (view.state, view.result, view.counts) == ("Failed", None, None)
    assert world.session.view().counts == Counts()


async def test_unclaimed_tokens_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNCLAIMED_TOKENS_MAX", 20)
    numbers = [(await world.submit(None, sample(prompt=6, tokens=8))).number for _ in range(2)]
    await world.until(lambda: len(world.session.state.unclaimed) == 2)
    with pytest.raises(OverloadedError):
        await world.submit(None, sample())
    await world.poll("log", numbers[0])
    assert (await world.sample(sample())).state == "Completed"


async def test_a_failed_sample_counts_nothing_and_disturbs_no_training(world: World) -> None:
    world.worker.fail[f"{UID}/log/1"] = [Problem(code="out_of_memory", message="no room")]
    await world.submit(1, forward_backward(5))
    view = await world.sample(sample())
    assert view.state == "Failed"
    assert view.error is not None
    assert view.error.code == "out_of_memory"
    assert (await world.poll("train", 1)).state == "Completed"
    await world.settled()
    assert world.ledger.billed() == Counts(train=5)
    assert len(world.ledger.events) == 1


async def test_samples_run_at_once_up_to_a_bound_while_training_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DISPATCHED_SAMPLES_MAX", 3)
    gate = asyncio.Event()

    def hold(op_id: str, operation: ops.Operation) -> object:
        return gate.wait() if isinstance(operation, ops.Sample) else None

    world.worker.before = hold
    numbers = [(await world.submit(None, sample(seed=seed))).number for seed in range(8)]
    await world.until(lambda: world.worker.at_once == 3, "three are running")
    assert (await world.train(1, forward_backward())).state == "Completed"
    gate.set()
    for number in numbers:
        assert (await world.poll("log", number)).state == "Completed"
    assert world.worker.at_once_max == 4


async def test_samples_in_flight_run_again_after_the_worker_died_with_the_same_tokens(
    world: World,
) -> None:
    killed: list[str] = []

    def kill_once(op_id: str, operation: ops.Operation) -> None:
        if not killed:
            killed.append(op_id)
            world.worker.kill()

    world.worker.after = kill_once
    view = await world.sample(sample(tokens=12, seed=5))
    assert isinstance(view.result, ops.SampleResult)
    assert view.result.sequences[0].tokens.tolist() == sample_tokens(sample(tokens=12, seed=5), 0)
    await world.settled()
    assert world.ledger.billed() == Counts(prefill=6, sample=12)


async def test_scoring_is_keyless_too(world: World) -> None:
    view = await world.sample(compute_logprobs(prompt=9))
    assert view.counts == Counts(prefill=9)


async def test_more_polls_than_may_be_held_are_answered_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HELD_POLLS_MAX", 1)
    gate = asyncio.Event()
    world.worker.before = lambda op_id, operation: gate.wait()
    number = (await world.submit(None, sample())).number
    held = asyncio.create_task(world.poll("log", number))
    await world.until(lambda: world.session.polls_held == 1 and world.worker.at_once == 1)
    assert (await world.poll("log", number)).state == "InProgress"
    gate.set()
    assert (await held).state == "Completed"


async def test_an_unknown_operation_is_not_found(world: World) -> None:
    with pytest.raises(NotFoundError, match="no operation log/7"):
        await world.poll("log", 7)


async def test_results_are_kept_for_their_retention_and_no_longer(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_meter.driver.SWEEP_S", 0.0)
    world = await make_world(result_retention_s=0.3, claim_timeout_s=0.2).start()
    await world.train(1, forward_backward(tokens=6000))
    blobs = f"{UID}/blobs"
    assert "train-1.result" in world.disk.list(blobs)
    await world.until(
        lambda: "train-1.result" not in world.disk.list(blobs), "the result was removed"
    )
    with pytest.raises(NotFoundError, match="results are kept for"):
        await world.poll("train", 1)
    assert world.ledger.billed() == Counts(train=6000)


async def test_old_small_results_leave_memory_and_are_read_from_the_log(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INLINE_RESULTS_BYTES_MAX", 0)
    monkeypatch.setattr(limits, "SEGMENT_BYTES_MAX", 400)
    world = await make_world(claim_timeout_s=0.5).start()
    before = [await world.train(number, forward_backward(3, number)) for number in range(1, 7)]
    await world.until(lambda: world.session.state.inline_bytes == 0, "memory was let go")
    record = world.session.state.records["train", 1]
    assert record.result is not None
    assert record.result.inline is None
    assert [await world.poll("train", number) for number in range(1, 7)] == before
    await world.crash()
    assert [await world.poll("train", number) for number in range(1, 7)] == before


async def test_two_hundred_mixed_operations_are_counted_to_the_token(world: World) -> None:
    """What the client adds up from its results equals what the ledger holds."""
    chance = random.Random(20)
    number, received = 0, Counts()
    for _ in range(50):
        submitted = []
        for _ in range(4):
            if chance.random() < 0.5:
                number += 1
                operation: ops.Operation = forward_backward(chance.randint(1, 9), number)
                submitted.append(await world.submit(number, operation))
            else:
                operation = sample(
                    chance.randint(1, 9), chance.randint(1, 9), chance.randint(1, 3), number
                )
                submitted.append(await world.submit(None, operation))
        for one in submitted:
            view = await world.poll(one.stream, one.number)
            assert view.counts is not None
            received += view.counts
        if chance.random() < 0.2:
            await world.crash(worker=chance.random() < 0.5)
    await world.settled()
    assert world.ledger.billed() == received == world.session.view().counts
    assert len(world.ledger.events) == 200
