"""Meter and ledger together: mixed traffic with crashes leaves no difference, and every planted one is found."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill_contracts.errors import ConflictError, NotFoundError, error_from
from gristmill_contracts.http import Problem
from gristmill_contracts.reconciliation import SessionTallies, Tally, worker_differences
from gristmill_testing.cli import Commands
from gristmill_testing.ledger import LedgerClient
from gristmill_testing.meter_world import (
    UID,
    World,
    forward_backward,
)
from gristmill_testing.metered import metered, mix


class Pair:
    """A ledger, and a meter that speaks to it."""

    def __init__(self, client: LedgerClient, world: World) -> None:
        self.client = client
        self.world = world

    async def told(self) -> None:
        """Wait until the ledger knows what the worker ran, and all usage."""
        await self.world.settled()
        witness = self.world.session.witness

        def compared() -> bool:
            point = witness.point
            return witness.under_way == 0 and point is not None and point.logged == witness.logged

        await self.world.until(compared, "the worker was asked")
        assert self.world.meter is not None
        await self.world.meter.beat()

    async def ask(self, method: str, path: str = "/v1/reconcile", **asked: str) -> Any:
        status, body = await self.client.call(method, path, **asked)
        if status != 200:
            problem = msgspec.json.decode(body, type=Problem)
            raise error_from(problem.code, problem.message)
        return msgspec.json.decode(body)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with metered(tmp_path) as (client, world):
        await world.start()
        yield Pair(client, world)


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path / "data")


async def test_mixed_traffic_and_crashes_leave_no_difference(pair: Pair) -> None:
    number = await mix(pair.world, 1)
    await pair.world.crash()
    number = await mix(pair.world, number)
    pair.world.worker.kill()
    await mix(pair.world, number)
    await pair.told()
    answer = await pair.ask("POST")
    assert answer["differences"] == []
    assert answer["run"] | {"id": "", "started_us": 0, "ended_us": 0} == {
        "id": "", "scope": "all", "sessions": 1, "in_flight": 0, "silent": 0, "differences": 0,
        "started_us": 0, "ended_us": 0,
    }  # fmt: skip
    usage = await pair.client.usage(group_by="operation")
    assert sum(row["operations"] for row in usage["rows"]) == 30


async def test_a_worker_that_counts_otherwise_is_found_aged_and_decided_on(
    pair: Pair, commands: Commands
) -> None:
    world = pair.world
    await world.train(1, forward_backward(5))
    book = world.worker.book
    known = book.told()[UID]
    book._sessions[UID] = SessionTallies(
        opening=known.opening, ran={"forward_backward": Tally(2, train=11)}
    )
    witness = world.session.witness
    await world.until(
        lambda: witness.point is not None and bool(worker_differences(witness.point)), "it was told"
    )
    await pair.told()
    shown = await asyncio.to_thread(
        commands.run, "reconcile", "--ledger-url", pair.client.url, "--session", UID
    )
    assert shown.exit_code == 2
    assert "worker-meter  missing" in shown.stdout
    assert "train -6" in shown.stdout
    (found,) = (await pair.ask("GET"))["differences"]
    assert (found["operations"], found["tokens"]["train"], found["decision"]) == (-1, -6, None)
    metrics = (await pair.client.call("GET", "/metrics"))[1].decode()
    assert 'gristmill_recon_diff_tokens{kind="missing",pair="worker-meter"} 6.0' in metrics
    assert 'gristmill_recon_diffs{kind="missing",pair="worker-meter"} 1.0' in metrics
    await asyncio.to_thread(
        commands.ok, "reconcile", "resolve", found["id"], "--reason", "a test of ours",
        "--ledger-url", pair.client.url,
    )  # fmt: skip
    even = await asyncio.to_thread(
        commands.json, "reconcile", "--ledger-url", pair.client.url, "--tenant", "acme"
    )
    assert (even["differences"], even["run"]["differences"]) == ([], 1)
    (kept,) = (await pair.ask("GET", all="true"))["differences"]
    assert kept["decision"]["reason"] == "a test of ours"
    listed = await asyncio.to_thread(
        commands.ok, "reconcile", "list", "--all", "--ledger-url", pair.client.url
    )
    assert "a test of ours" in listed
    metrics = (await pair.client.call("GET", "/metrics"))[1].decode()
    assert 'gristmill_recon_diffs{kind="missing",pair="worker-meter"} 0.0' in metrics
    with pytest.raises(ConflictError, match="final"):
        await pair.ask("POST", "/v1/reconcile/decisions", difference=found["id"], reason="another")


async def test_a_decision_needs_a_difference_and_a_reason(pair: Pair) -> None:
    with pytest.raises(NotFoundError, match="there is no difference 'x'"):
        await pair.ask("POST", "/v1/reconcile/decisions", difference="x", reason="y")
    for asked in ({"difference": "x"}, {"reason": "y"}, {"difference": "x", "reason": ""}):
        status, _ = await pair.client.call("POST", "/v1/reconcile/decisions", **asked)
        assert status == 400
