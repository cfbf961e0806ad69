"""Budgets at the meter: reserved before dispatch, to the token; what cannot be afforded waits, and goes on."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gristmill_contracts import limits
from gristmill_contracts import operations as ops
from gristmill_contracts.budgets import TOKENS, Hold, Lease, ReturnLease
from gristmill_contracts.errors import BudgetExhaustedError
from gristmill_contracts.http import StreamChunk
from gristmill_contracts.usage import Counts
from gristmill_meter.bank import Bank
from gristmill_meter.intake import submit_operation
from gristmill_meter.wallet import Wallet
from gristmill_testing.hand_clock import HandClock
from gristmill_testing.meter_world import (
    UID,
    World,
    forward_backward,
    make_submit,
    optim_step,
    sample,
)

MakeWorld = Callable[..., World]


@pytest.fixture
async def bounded(make_world: MakeWorld) -> Callable[..., Any]:
    """A started world with a budget of so many tokens."""

    async def start(limit: int, **changes: Any) -> World:
        world = make_world()
        for name, value in changes.items():
            setattr(world.ledger.budgets, name, value)
        world.ledger.budgets.limit = limit
        return await world.start()

    return start


async def blocked(world: World) -> None:
    await world.until(lambda: world.session.service == "Blocked", "the session was blocked")


def beats(world: World) -> int:
    return world.ledger.calls["post_heartbeats"]


async def more_beats(world: World, more: int = 3) -> None:
    before = beats(world)
    await world.until(lambda: beats(world) >= before + more)


def never_overspent(world: World) -> None:
    budgets = world.ledger.budgets
    assert budgets.limit is not None
    assert budgets.late == 0, "everything was posted under a lease"
    assert max(budgets.reserved_max, budgets.posted + budgets.reserved) <= budgets.limit


async def test_f46_training_uses_the_budget_to_the_token_and_waits_for_more(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(20)
    for number in (1, 2):
        assert (await world.train(number, forward_backward(8, number))).state == "Completed"
    await world.submit(3, forward_backward(5, 3))
    await world.submit(4, optim_step())
    await blocked(world)
    view = world.session.view()
    assert view.error is not None
    assert (view.error.code, view.error.retryable) == ("budget_exhausted", True)
    assert "4 left" in view.error.message
    assert [(await world.poll("train", n, wait_s=0)).state for n in (3, 4)] == ["Pending"] * 2
    assert world.worker.runs == {f"{UID}/train/1": 1, f"{UID}/train/2": 1}
    await world.until(lambda: world.ledger.heartbeats[UID].view.state == "Blocked")
    world.ledger.budgets.raise_to(21)
    assert (await world.poll("train", 4)).state == "Completed"
    await world.settled()
    assert (world.session.service, world.session.view().error) == ("Serving", None)
    assert world.ledger.budgets.posted == 21
    never_overspent(world)


async def test_what_own_leases_have_left_counts_with_what_the_ledger_has(
    bounded: Callable[..., Any],
) -> None:
    """A lease of 50 with 5 left and 50 more at the ledger: 55 are affordable, not 50."""
    world: World = await bounded(100, share=2)
    assert (await world.train(1, forward_backward(45, 1))).state == "Completed"
    assert (await world.train(2, forward_backward(55, 2))).state == "Completed"
    await world.settled()
    assert world.ledger.budgets.posted == 100
    never_overspent(world)


async def test_a_stream_uses_what_own_leases_have_left_too(bounded: Callable[..., Any]) -> None:
    world: World = await bounded(100, share=2)
    assert (await world.train(1, forward_backward(45, 1))).state == "Completed"
    assert tokens_of(await world.read_stream(sample(prompt=5, tokens=1000))) == 50
    never_overspent(world)


async def test_a_blocked_session_loses_nothing_in_a_crash_and_goes_on(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(10)
    await world.train(1, forward_backward(8, 1))
    for number in (2, 3):
        await world.submit(number, forward_backward(8, number))
    await blocked(world)
    await world.crash()
    await blocked(world)
    world.ledger.budgets.raise_to(24)
    assert (await world.poll("train", 3)).state == "Completed"
    await world.settled()
    assert world.ledger.budgets.posted == 24
    never_overspent(world)


async def test_what_runs_when_the_meter_dies_is_reserved_anew_and_the_old_lease_is_returned(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(100)
    gate = asyncio.Event()
    world.worker.before = lambda op_id, operation: gate.wait()
    await world.submit(1, forward_backward(60, 1))
    await world.until(lambda: world.worker.at_once == 1)
    await world.crash(worker=True)
    gate.set()
    assert (await world.poll("train", 1)).state == "Completed"
    await world.settled()
    (event,) = world.ledger.events
    assert event.lease == "lease-2"
    assert "lease-1" not in world.ledger.budgets.held
    never_overspent(world)


async def test_a_result_that_nobody_fetched_keeps_its_part_of_the_lease_over_a_crash(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(100)
    number = (await world.submit(None, sample(10, 20))).number
    await world.until(lambda: world.session.state.records["log", number].terminal)
    await world.session.log.durable(world.session.log.appended_number)
    await world.crash()
    await more_beats(world)
    assert world.ledger.budgets.held["lease-1"].rest >= 30
    assert (await world.poll("log", number)).state == "Completed"
    await world.settled()
    await world.until(lambda: "lease-1" not in world.ledger.budgets.held, "it was returned")
    assert [event.lease for event in world.ledger.events] == ["lease-1"]
    assert world.ledger.budgets.posted == 30
    never_overspent(world)


async def test_every_event_names_its_lease_and_a_hundred_operations_need_few_round_trips(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(10**9, share=100)
    for number in range(1, 301):
        await world.submit(number, forward_backward(3, number))
    await world.poll("train", 300)
    await world.settled()
    assert all(event.lease for event in world.ledger.events)
    trips = world.ledger.calls["take_lease"] + world.ledger.calls["return_lease"]
    assert trips <= 3
    never_overspent(world)


async def test_samples_reserve_their_worst_case_and_give_the_rest_back(
    bounded: Callable[..., Any],
) -> None:
    """3 at once would need 3 x 30; one after the other they fit."""
    world: World = await bounded(60)
    numbers = [(await world.submit(None, sample(5, 25))).number for _ in range(3)]
    await world.until(lambda: world.session.state.records["log", numbers[0]].terminal)
    running = world.worker.at_once_max
    for number in numbers[:2]:
        assert (await world.poll("log", number)).state == "Completed"
    assert running <= 2
    await blocked(world)
    assert (await world.poll("log", numbers[2], wait_s=0)).state == "Pending"
    never_overspent(world)


async def test_a_key_that_may_spend_nothing_does_not_hold_back_the_others(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(100)
    poor = make_submit(None, sample(50, 60))
    poor.key = "poor"
    await submit_operation(world.session, poor, _encoded(poor.operation))
    await blocked(world)
    assert (await world.sample(sample(5, 5))).state == "Completed"
    assert world.session.service == "Blocked"


def _encoded(operation: ops.Operation) -> bytes:
    import msgspec

    return msgspec.msgpack.encode(operation)


async def test_what_may_not_wait_fails_at_once_and_costs_nothing(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(10)
    submit = make_submit(None, sample(5, 25))
    submit.may_wait = False
    number = (await submit_operation(world.session, submit, _encoded(submit.operation))).number
    view = await world.poll("log", number)
    assert view.state == "Failed"
    assert view.error is not None
    assert view.error.code == "budget_exhausted"
    assert world.worker.runs == {}
    assert world.session.service == "Serving"
    assert (await world.train(1, forward_backward(10))).state == "Completed"


# --- money ---------------------------------------------------------------------------------------


async def test_a_budget_in_money_is_reserved_at_the_prices_of_the_lease(
    bounded: Callable[..., Any],
) -> None:
    prices = {"prefill": 2, "cached_prefill": 1, "sample": 10, "train": 5}
    world: World = await bounded(100, unit="USD", prices=prices)
    assert (await world.train(1, forward_backward(12))).state == "Completed"
    await world.submit(2, forward_backward(9, 2))
    await blocked(world)
    world.ledger.budgets.raise_to(105)
    assert (await world.poll("train", 2)).state == "Completed"
    await world.settled()
    assert world.ledger.budgets.posted == 105
    never_overspent(world)


# --- time ----------------------------------------------------------------------------------------


async def test_a_lease_is_spent_until_its_time_is_over_and_the_ledger_is_away(
    make_world: MakeWorld,
) -> None:
    """f44: with the ledger away only what is leased is spent, then operations wait."""
    world = make_world()
    clock = HandClock()
    world.boottime_us = lambda: int(clock() * 1e6)
    world.ledger.clock_us = world.boottime_us
    world.ledger.budgets.limit, world.ledger.budgets.expires_in_s = 1000, 20.0
    await world.start()
    await world.train(1, forward_backward(8, 1))
    await more_beats(world)
    world.ledger.away = True
    await more_beats(world, 2)
    clock.pass_s(19.9)
    assert (await world.train(2, forward_backward(8, 2))).state == "Completed"
    clock.pass_s(0.1)
    await world.submit(3, forward_backward(8, 3))
    assert (await world.poll("train", 3, wait_s=0.1)).state == "Pending"
    world.ledger.away = False
    assert (await world.poll("train", 3)).state == "Completed"
    await world.settled()
    assert world.ledger.budgets.posted == 24
    never_overspent(world)


async def test_f44_a_lease_that_is_used_up_while_the_ledger_is_away_lets_the_rest_wait(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(1000, share=50)
    await world.train(1, forward_backward(5, 1))
    await world.settled()
    held = world.ledger.budgets.reserved
    world.ledger.away = True
    await more_beats(world, 2)
    afforded = held // 5
    for number in range(2, afforded + 3):
        await world.submit(number, forward_backward(5, number))
    assert (await world.poll("train", afforded + 1)).state == "Completed"
    assert (await world.poll("train", afforded + 2, wait_s=0.1)).state == "Pending"
    world.ledger.away = False
    assert (await world.poll("train", afforded + 2)).state == "Completed"
    await world.settled()
    never_overspent(world)


async def test_a_budget_that_only_tells_does_not_wait_for_a_ledger_that_is_away(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(10, mode="soft")
    assert (await world.train(1, forward_backward(8, 1))).state == "Completed"
    assert (await world.train(2, forward_backward(8, 2))).state == "Completed"
    world.ledger.away = True
    world.session.wallet.close_all()
    assert (await world.train(3, forward_backward(8, 3))).state == "Completed"
    world.ledger.away = False
    await world.settled()
    assert world.ledger.events[2].lease == ""


async def test_a_lease_whose_answer_was_lost_is_found_again(bounded: Callable[..., Any]) -> None:
    world: World = await bounded(10)
    world.ledger.lose_leases = 2
    assert (await world.train(1, forward_backward(10))).state == "Completed"
    assert world.ledger.calls["take_lease"] >= 3
    assert len(world.ledger.budgets.granted) == 1
    await world.settled()
    never_overspent(world)


async def test_a_budget_that_is_made_later_binds_from_the_next_heartbeat_on(world: World) -> None:
    await world.train(1, forward_backward(50, 1))
    await world.settled()
    world.ledger.budgets.raise_to(10)
    await more_beats(world)
    await world.submit(2, forward_backward(11, 2))
    await blocked(world)
    world.ledger.budgets.raise_to(None)
    assert (await world.poll("train", 2)).state == "Completed"


# --- giving back ---------------------------------------------------------------------------------


async def test_the_end_of_a_session_returns_what_is_left(bounded: Callable[..., Any]) -> None:
    world: World = await bounded(1000)
    await world.train(1, forward_backward(8, 1))
    world.assign(desired="stop")
    await world.until(lambda: world.session.service == "Closed")
    budgets = world.ledger.budgets
    assert (budgets.posted, budgets.reserved) == (8, 0)


async def test_the_end_of_the_process_returns_all_but_what_may_be_posted(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(1000)
    await world.train(1, forward_backward(8, 1))
    number = (await world.submit(None, sample(10, 20))).number
    await world.until(lambda: world.session.state.records["log", number].terminal)
    await world.settled()
    assert world.meter is not None
    await world.meter.close()
    budgets = world.ledger.budgets
    assert (budgets.posted, budgets.reserved) == (8, 30)


@dataclass(slots=True)
class PostsMeanwhile:
    """A ledger that acknowledges the usage of operation 1 while it hears of the return of its lease."""

    wallet: Wallet
    kept: list[dict[str, int]] = field(default_factory=list)

    async def return_lease(self, _lease: str, request: ReturnLease) -> None:
        self.kept.append(request.keep)
        self.wallet.posted(("train", 1))


async def test_usage_that_is_posted_while_its_lease_goes_back_leaves_nothing_held(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(1000)
    whole = Hold(budget="acme/a", period_start_us=0, unit=TOKENS, amount=100, floor=0)
    wallet = Wallet()
    wallet.add(Lease(id="l", expires_in_s=60, prices={}, holds=[whole], version=0), "", 0, 0)
    assert wallet.reserve(("train", 1), "", Counts(train=40), 1)
    wallet.close("l")
    ledger: Any = PostsMeanwhile(wallet=wallet)
    await Bank(session=world.session, ledger=ledger, wallet=wallet).give_back()
    assert ledger.kept == [{"acme/a": 40}, {}]


async def test_an_idle_session_holds_nothing(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_meter.bank.LEASE_IDLE_S", 0.05)
    world = make_world()
    world.ledger.budgets.limit = 1000
    await world.start()
    await world.train(1, forward_backward(8, 1))
    await world.until(lambda: world.ledger.budgets.reserved == 0, "it was given back")
    assert (await world.train(2, forward_backward(8, 2))).state == "Completed"


async def test_a_newer_attempt_returns_the_leases_of_the_older_one(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(1000)
    await world.train(1, forward_backward(8, 1))
    await world.settled()
    assert world.ledger.budgets.reserved > 0
    world.assign(attempt=2)
    await world.crash()
    await world.until(lambda: world.ledger.budgets.reserved == 0, "they were returned")


# --- streams -------------------------------------------------------------------------------------


def tokens_of(chunks: list[StreamChunk]) -> int:
    return sum(len(chunk.tokens) for chunk in chunks)


async def test_f46_a_stream_is_cut_at_the_last_affordable_token_and_says_why(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(100)
    chunks = await world.read_stream(sample(prompt=30, tokens=1000))
    last = chunks[-1]
    assert (last.final, last.error) == ("length", None)
    assert last.budget is not None
    assert last.budget.code == "budget_exhausted"
    assert tokens_of(chunks) == 70
    await world.settled()
    (event,) = world.ledger.events
    assert (event.outcome, event.counts) == ("completed", Counts(prefill=30, sample=70))
    assert world.ledger.budgets.posted == 100
    never_overspent(world)


async def test_f12_one_request_of_more_tokens_than_the_limit_waits(
    bounded: Callable[..., Any],
) -> None:
    """The limit counts tokens and not requests: 30, and one pass of 150."""
    world: World = await bounded(30)
    await world.submit(1, forward_backward(150))
    await blocked(world)
    await more_beats(world)
    assert (world.worker.runs, world.ledger.events, world.ledger.budgets.posted) == ({}, [], 0)


async def test_f12_one_stream_of_more_tokens_than_the_limit_is_cut_there(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(30)
    chunks = await world.read_stream(sample(prompt=10, tokens=140))
    assert (tokens_of(chunks), chunks[-1].final) == (20, "length")
    await world.settled()
    assert [event.counts for event in world.ledger.events] == [Counts(prefill=10, sample=20)]
    assert world.ledger.budgets.posted == 30
    never_overspent(world)


async def test_a_stream_that_the_budget_affords_says_nothing_of_it(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(100)
    chunks = await world.read_stream(sample(prompt=30, tokens=70))
    assert (chunks[-1].final, chunks[-1].budget) == ("length", None)


async def test_a_stream_without_a_single_affordable_token_fails_before_it_begins(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(30)
    (chunk,) = await world.read_stream(sample(prompt=30, tokens=10))
    assert chunk.error is not None
    assert (chunk.error.code, chunk.tokens) == (BudgetExhaustedError.code, [])
    assert world.session.service == "Serving"
    await world.settled()
    assert world.ledger.events == []
    assert (await world.train(1, forward_backward(30))).state == "Completed"


async def test_streams_at_once_never_overspend_together(bounded: Callable[..., Any]) -> None:
    world: World = await bounded(200, share=10)
    streams = [world.read_stream(sample(prompt=10, tokens=50, seed=n)) for n in range(8)]
    ended = await asyncio.gather(*streams)
    await world.settled()
    spent = sum(tokens_of(chunks) + 10 for chunks in ended if tokens_of(chunks))
    assert spent == world.ledger.budgets.posted
    assert spent > 150
    never_overspent(world)


async def test_a_stream_that_is_cut_by_a_crash_is_posted_under_its_lease(
    bounded: Callable[..., Any],
) -> None:
    world: World = await bounded(1000)

    async def crash(chunks: int) -> None:
        if chunks == 2:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        await world.read_stream(sample(prompt=10, tokens=400), crash)
    await world.crash()
    await world.settled()
    (event,) = world.ledger.events
    assert (event.outcome, event.lease) == ("aborted", "lease-1")
    await world.until(lambda: "lease-1" not in world.ledger.budgets.held)
    never_overspent(world)


def test_a_lease_outlives_some_heartbeats() -> None:
    assert limits.BUDGET_LEASE_S > 5 * limits.HEARTBEAT_S
