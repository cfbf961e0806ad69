"""`gristmill adjust` against a real ledger: a correction is made, shown and made once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gristmill_contracts.usage import Counts
from gristmill_testing.cli import Commands
from gristmill_testing.ledger import LedgerClient, make_event, running_ledger

EVENT = make_event(1, counts=Counts(train=1_000_000), key="AKIA1")


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[LedgerClient]:
    """A ledger with one charge of session s-1."""
    async with running_ledger(tmp_path / "ledger") as client:
        await client.register("s-1")
        await client.post("s-1", [EVENT])
        yield client


async def test_a_charge_is_adjusted_and_voided_and_explained(
    commands: Commands, ledger: LedgerClient
) -> None:
    where = ("--ledger-url", ledger.url)
    made = await asyncio.to_thread(
        commands.json,
        "adjust",
        EVENT.event_id,
        "--train",
        "-400000",
        "--reason",
        "ran twice",
        *where,
    )
    assert (made["left"]["train"], made["seq"], made["again"]) == (600_000, 2, False)
    again = await asyncio.to_thread(
        commands.run,
        "adjust",
        EVENT.event_id,
        "--train",
        "-400000",
        "--reason",
        "ran twice",
        *where,
    )
    assert "was on record already; train 600,000 is left" in again.output
    shown = await asyncio.to_thread(commands.ok, "explain", made["event_id"], *where)
    assert f"corrects:        {EVENT.event_id}" in shown
    assert "ran twice" in shown
    assert "-400,000" in shown
    charge = await asyncio.to_thread(commands.ok, "explain", EVENT.event_id, *where)
    assert "corrected by row 2" in charge
    assert "train -400,000" in charge
    assert charge.splitlines()[-1].split() == ["with", "these:", "0.360000", "USD"]
    void = await asyncio.to_thread(
        commands.run, "adjust", EVENT.event_id, "--void", "--reason", "never ran", *where
    )
    assert (void.exit_code, "nothing is left" in void.output) == (0, True)
    refused = await asyncio.to_thread(
        commands.refused, "adjust", EVENT.event_id, "--train", "-1", "--reason", "more", *where
    )
    assert "has 0 train tokens left; -1 would make that -1" in refused
    (row,) = (await ledger.usage())["rows"]
    assert (row["train"], row["operations"]) == (0, 1)
