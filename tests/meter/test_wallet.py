"""What a session may spend: never more than its leases hold, and what is not used comes back."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_contracts import operations as ops
from gristmill_contracts.budgets import TOKENS, Hold, Lease
from gristmill_contracts.operations import ChatMessage
from gristmill_contracts.usage import Counts
from gristmill_meter.records import Key
from gristmill_meter.wallet import Wallet
from gristmill_meter.worst import stream_prompt, worst_counts
from gristmill_testing.meter_world import forward_backward, optim_step, sample

SECOND = 1_000_000
PRICES = {"prefill": 2, "cached_prefill": 1, "sample": 10, "train": 5}


def hold(amount: int, budget: str = "acme/a", **changes: Any) -> Hold:
    fields: dict[str, Any] = {
        "budget": budget, "period_start_us": 0, "unit": TOKENS, "amount": amount, "floor": 0
    }  # fmt: skip
    return Hold(**(fields | changes))


def lease(*holds: Hold, name: str = "l", version: int = 0) -> Lease:
    return Lease(
        id=name if holds else "", expires_in_s=60, prices=PRICES, holds=[*holds], version=version
    )


def wallet_with(*leases: Lease) -> Wallet:
    wallet = Wallet()
    for each in leases:
        wallet.add(each, "", 0, 0)
    return wallet


def train(number: int) -> Key:
    return ("train", number)


def reserve(wallet: Wallet, number: int, tokens: int, now_us: int = 1) -> bool:
    return wallet.reserve(train(number), "", Counts(train=tokens), now_us)


def test_nothing_is_covered_without_a_lease_but_what_costs_nothing() -> None:
    wallet = Wallet()
    assert not reserve(wallet, 1, 1)
    assert reserve(wallet, 2, 0)


def test_the_last_token_is_spent_and_not_one_more() -> None:
    wallet = wallet_with(lease(hold(10)))
    assert reserve(wallet, 1, 4)
    assert not reserve(wallet, 2, 7)
    assert reserve(wallet, 3, 6)
    assert not reserve(wallet, 4, 1)
    assert reserve(wallet, 3, 6), "asked again it is covered already"


def test_the_tightest_of_several_budgets_decides_in_its_own_unit() -> None:
    in_money = hold(100, "acme/money", unit="USD")
    wallet = wallet_with(lease(hold(1000), in_money))
    assert reserve(wallet, 1, 15)
    assert not reserve(wallet, 2, 6), "5 each: 25 are left"
    assert reserve(wallet, 3, 5)


def test_a_soft_budget_only_tells() -> None:
    wallet = wallet_with(lease(hold(0, "acme/soft", mode="soft"), hold(10)))
    assert reserve(wallet, 1, 10)
    assert not reserve(wallet, 2, 1)
    assert wallet.soft == {"": False}


def test_what_was_not_used_comes_back_and_what_was_used_stays_until_posted() -> None:
    wallet = wallet_with(lease(hold(100)))
    operation: Key = ("log", 1)
    assert wallet.reserve(operation, "", Counts(prefill=10, sample=90), 1)
    assert wallet.lease_of(operation) == "l"
    wallet.settle(operation, Counts(prefill=10, sample=5))
    assert reserve(wallet, 1, 85)
    wallet.void(train(1))
    wallet.close("l")
    assert wallet.to_return() == [("l", {"acme/a": 15})]
    wallet.returned("l", {"acme/a": 15})
    assert wallet.to_return() == []
    wallet.posted(operation)
    assert wallet.to_return() == [("l", {})]
    wallet.returned("l", {})
    assert wallet.purses == {}


def test_what_was_posted_while_its_return_was_under_way_is_returned_too() -> None:
    """The ledger keeps what it was told to keep: usage that it had by then would stay held beside it."""
    wallet = wallet_with(lease(hold(100)))
    assert reserve(wallet, 1, 40)
    wallet.close("l")
    assert wallet.to_return() == [("l", {"acme/a": 40})]
    wallet.posted(train(1))
    wallet.returned("l", {"acme/a": 40})
    assert wallet.to_return() == [("l", {})]
    wallet.returned("l", {})
    assert wallet.purses == {}


def test_two_returns_of_a_lease_at_once_are_no_harm() -> None:
    wallet = wallet_with(lease(hold(100)))
    wallet.close("l")
    wallet.returned("l", {})
    wallet.returned("l", {})
    assert wallet.to_return() == []


def test_a_lease_is_spent_no_longer_than_it_lasts() -> None:
    wallet = wallet_with(lease(hold(100)))
    assert reserve(wallet, 1, 1, 60 * SECOND - 1)
    assert not reserve(wallet, 2, 1, 60 * SECOND)
    wallet.renew("l", 90 * SECOND)
    assert reserve(wallet, 2, 1, 60 * SECOND)
    wallet.renew("l", 70 * SECOND)
    assert reserve(wallet, 3, 1, 80 * SECOND), "an older answer shortens nothing"


def test_a_lease_of_another_key_is_not_spent() -> None:
    wallet = wallet_with(lease(hold(100)))
    assert not wallet.reserve(train(1), "other", Counts(train=1), 1)


def test_changed_budgets_end_what_was_said_before() -> None:
    wallet = wallet_with(lease(hold(100), version=3))
    wallet.add(lease(version=3), "free", 0, 0)
    wallet.supersede(3, 99 * SECOND)
    assert reserve(wallet, 1, 1)
    assert wallet.is_unbounded("free", 98 * SECOND)
    wallet.supersede(4, 99 * SECOND)
    assert not reserve(wallet, 2, 1)
    assert not wallet.is_unbounded("free", 1)


def test_a_lease_that_is_too_small_is_given_back_once_another_serves() -> None:
    wallet = wallet_with(lease(hold(10)), lease(hold(100), name="m"))
    assert reserve(wallet, 1, 50)
    assert wallet.lease_of(train(1)) == "m"
    assert wallet.to_return() == [("l", {})]


def test_more_is_asked_for_before_the_last_lease_is_used_up() -> None:
    wallet = wallet_with(lease(hold(100)))
    assert reserve(wallet, 1, 75)
    assert not wallet.needs_more("", 1)
    assert reserve(wallet, 2, 1)
    assert wallet.needs_more("", 1)
    wallet.add(lease(hold(100), name="m"), "", 0, 0)
    assert not wallet.needs_more("", 1)


def test_idle_leases_are_given_back() -> None:
    wallet = wallet_with(lease(hold(100)))
    assert reserve(wallet, 1, 1, 5)
    wallet.close_idle(5, 6)
    assert wallet.to_return() == []
    wallet.close_idle(6, 7)
    assert wallet.to_return() == [("l", {"acme/a": 1})]


class TestStreams:
    def part(self, wallet: Wallet, prompt: int, most: int) -> int | None:
        return wallet.reserve_part(("log", 1), "", Counts(prefill=prompt), most, 1)

    def test_a_stream_takes_what_is_left_to_the_token(self) -> None:
        wallet = wallet_with(lease(hold(100)))
        assert self.part(wallet, 30, 1000) == 70
        assert not reserve(wallet, 1, 1)

    def test_a_stream_in_money_takes_what_its_prices_afford(self) -> None:
        wallet = wallet_with(lease(hold(100, unit="USD"), hold(50, "acme/b")))
        assert self.part(wallet, 5, 1000) == 9, "(100 - 5 x 2) / 10"

    @pytest.mark.parametrize("prompt", [99, 100, 101, 10_000])
    def test_a_stream_without_room_for_one_token_takes_nothing(self, prompt: int) -> None:
        wallet = wallet_with(lease(hold(100)))
        expected = 1 if prompt == 99 else None
        assert self.part(wallet, prompt, 1000) == expected

    def test_a_prompt_that_turns_out_longer_is_not_covered(self) -> None:
        wallet = wallet_with(lease(hold(100)))
        self.part(wallet, 30, 10)
        assert wallet.covers(("log", 1), Counts(prefill=30, sample=10))
        assert wallet.covers(("log", 1), Counts(prefill=35, sample=5))
        assert not wallet.covers(("log", 1), Counts(prefill=41))


class TestWorstCase:
    def test_training_is_exact_and_steps_cost_nothing(self) -> None:
        assert worst_counts(forward_backward(7), 100) == Counts(train=7)
        assert worst_counts(optim_step(), 100) == Counts()

    def test_a_sample_is_its_prompt_and_all_that_it_may_draw(self) -> None:
        operation = sample(6, 8, 3)
        assert worst_counts(operation, 100) == Counts(prefill=6, cached_prefill=12, sample=24)
        assert worst_counts(sample(6, 500, 1), 100).sample == 100
        assert worst_counts(sample(6, 500, 1), 0).sample == 500

    def test_a_prompt_of_messages_is_the_whole_context_but_for_a_stream(self) -> None:
        messages = [ChatMessage("user", "hällo")]
        operation = ops.Sample(
            **{name: getattr(sample(), name) for name in ops.Sample.__struct_fields__}
            | {"prompt": None, "messages": messages}
        )
        worst = worst_counts(operation, 4096)
        assert worst.prefill == 4096
        assert stream_prompt(operation, worst) == Counts(prefill=6 + 16 + 64)
        assert stream_prompt(operation, worst_counts(operation, 50)) == Counts(prefill=50)
        assert stream_prompt(sample(6), worst_counts(sample(6), 50)) == Counts(prefill=6)


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=150)
def test_no_schedule_spends_more_than_was_granted(seed: int) -> None:  # noqa: C901 - one step, many kinds
    """posted + what may still be posted never passes the sum of all leases; at the end all is returned."""
    chance = random.Random(seed)
    wallet, granted, posted = Wallet(), 0, 0
    running: dict[Key, int] = {}
    ended: dict[Key, int] = {}
    now_us = number = 0
    for _ in range(120):
        now_us += chance.randrange(SECOND)
        pick = chance.random()
        if pick < 0.15:
            amount = chance.randrange(1, 50)
            granted += amount
            wallet.add(lease(hold(amount), name=f"l{granted}"), "", now_us, now_us)
        elif pick < 0.55:
            number += 1
            tokens = chance.randrange(1, 20)
            if reserve(wallet, number, tokens, now_us):
                running[train(number)] = tokens
        elif pick < 0.75 and running:
            operation = chance.choice(sorted(running))
            worst = running.pop(operation)
            if chance.random() < 0.2:
                wallet.void(operation)
            else:
                ended[operation] = chance.randint(1, worst)
                wallet.settle(operation, Counts(train=ended[operation]))
        elif pick < 0.9 and ended:
            operation = chance.choice(sorted(ended))
            posted += ended.pop(operation)
            wallet.posted(operation)
        else:
            wallet.close_idle(now_us - 20 * SECOND, now_us)
            for name, keep in wallet.to_return():
                wallet.returned(name, keep)
        assert posted + sum(running.values()) + sum(ended.values()) <= granted
        free = sum(sum(purse.free.values()) for purse in wallet.purses.values())
        held = sum(sum(purse.keep.values()) for purse in wallet.purses.values())
        assert held == sum(running.values()) + sum(ended.values())
        assert posted + held + free <= granted
    for operation in [*running, *ended]:
        wallet.posted(operation)
    wallet.close_all()
    for name, keep in wallet.to_return():
        assert keep == {}
        wallet.returned(name, keep)
    assert wallet.purses == {}
