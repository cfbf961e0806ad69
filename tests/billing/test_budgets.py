"""Meter and ledger together: a budget is used to the token, blocks, and lets go when it is raised."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gristmill_contracts.budgets import BudgetView, PutBudget
from gristmill_testing.ledger import LedgerClient
from gristmill_testing.meter_world import World, forward_backward, sample
from gristmill_testing.metered import metered


class Pair:
    """A ledger, and a meter that speaks to it."""

    def __init__(self, client: LedgerClient, world: World) -> None:
        self.client = client
        self.world = world

    async def put(self, limit: int) -> None:
        message = PutBudget(scope_type="tenant", scope="acme", unit="tokens", limit=limit)
        await self.client.ask(BudgetView, "PUT", "/v1/budgets/acme/all", message)

    async def budget(self) -> BudgetView:
        return await self.client.ask(BudgetView, "GET", "/v1/budgets/acme/all")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with metered(tmp_path) as (client, world):
        yield Pair(client, world)


async def test_a_budget_is_used_to_the_token_and_raising_it_resumes(pair: Pair) -> None:
    world = pair.world
    await pair.put(100)
    await world.start()
    for number in range(1, 10):
        assert (await world.train(number, forward_backward(10, number))).state == "Completed"
    await world.submit(10, forward_backward(11, 10))
    await world.until(lambda: world.session.service == "Blocked", "the session was blocked")
    error = world.session.view().error
    assert error is not None
    assert (error.code, "acme/all" in error.message) == ("budget_exhausted", True)
    await pair.put(101)
    assert (await world.poll("train", 10)).state == "Completed"
    await world.settled()
    period = (await pair.budget()).period
    assert (period.posted, period.late_posted, period.available) == (101, 0, 0)


async def test_a_stream_is_cut_at_the_last_affordable_token(pair: Pair) -> None:
    world = pair.world
    await pair.put(50)
    await world.start()
    chunks = await world.read_stream(sample(prompt=10, tokens=400))
    assert sum(len(chunk.tokens) for chunk in chunks) == 40
    assert chunks[-1].budget is not None
    await world.settled()
    assert (await pair.budget()).period.posted == 50


async def test_the_end_of_a_session_frees_what_it_did_not_use(pair: Pair) -> None:
    world = pair.world
    await pair.put(10_000)
    await world.start()
    await world.train(1, forward_backward(10))
    await world.sample(sample(5, 5))
    world.assign(desired="stop")
    await world.until(lambda: world.session.service == "Closed")
    period = (await pair.budget()).period
    assert (period.posted, period.late_posted) == (20, 0)
    assert (period.reserved, period.suspense, period.available) == (0, 0, 9980)


async def test_a_crash_frees_the_lease_that_nothing_names_any_more(pair: Pair) -> None:
    world = pair.world
    await pair.put(10_000)
    await world.start()
    await world.train(1, forward_backward(10))
    await world.settled()
    await world.crash()
    await world.train(2, forward_backward(10, 2))
    await world.settled()
    period = (await pair.budget()).period
    assert (period.posted, period.late_posted, period.suspense) == (20, 0, 0)
    world.assign(desired="stop")
    await world.until(lambda: world.session.service == "Closed")
    assert (await pair.budget()).period.reserved == 0


async def test_without_a_budget_nothing_is_reserved(pair: Pair) -> None:
    await pair.world.start()
    assert (await pair.world.train(1, forward_backward(10))).state == "Completed"
    assert pair.world.session.wallet.purses == {}
