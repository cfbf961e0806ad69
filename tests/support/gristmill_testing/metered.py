"""A real meter that speaks to a real ledger over HTTP, and traffic of every kind for it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gristmill_contracts.http import Empty, RegisterSession
from gristmill_contracts.ids import TenantName
from gristmill_meter.ledger_client import LedgerClient as MeterLedger
from gristmill_testing.ledger import START_US, LedgerClient, running_ledger
from gristmill_testing.meter_world import (
    UID,
    World,
    compute_logprobs,
    forward_backward,
    optim_step,
    sample,
    save_weights,
)


@asynccontextmanager
async def metered(folder: Path) -> AsyncIterator[tuple[LedgerClient, World]]:
    """The session is registered at the ledger; its meter is not started yet."""
    async with running_ledger(folder / "ledger") as client:
        session = RegisterSession(
            uid=UID, tenant=TenantName("acme"), project="", name="run", model="fake", rank=8,
            created_us=START_US,
        )  # fmt: skip
        await client.ask(Empty, "POST", "/v1/sessions", session)
        link = MeterLedger(client.url)
        link.open()
        world = World(folder / "pod")
        world.ledger = link  # type: ignore[assignment]
        yield client, world
        await world.close()
        await link.close()


async def mix(world: World, first: int = 1) -> int:
    """Some of everything; returns the next number."""
    for number in range(first, first + 6, 2):
        await world.train(number, forward_backward(5, number))
        await world.train(number + 1, optim_step())
    await world.train(first + 6, save_weights())
    await world.sample(sample(6, 8, samples=3))
    await world.sample(compute_logprobs(7))
    await world.read_stream(sample(5, 9))
    return first + 7
