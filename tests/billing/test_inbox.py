"""Meter and ledger together, over HTTP: what was accepted without a meter runs once and is billed once."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts import operations as ops
from gristmill_contracts.errors import FencedError, GristmillError, ServedError
from gristmill_contracts.http import OperationView, RegisterSession
from gristmill_contracts.ids import TenantName
from gristmill_contracts.secrets import producer_secret
from gristmill_meter.drain import Drain
from gristmill_meter.ledger_client import LedgerClient as MeterLedger
from gristmill_testing.fake_disk import FakeDisk
from gristmill_testing.inbox_calls import InboxCalls
from gristmill_testing.ledger import START_US, LedgerClient, free_port, running_ledger
from gristmill_testing.meter_world import UID, World, forward_backward, optim_step, sample

KEY = bytes(range(32))
COUNT = 16
KILLS = 8


class Both:
    """A ledger of a cluster, a gateway's calls to its inbox, and meters of one session."""

    def __init__(self, folder: Path, client: LedgerClient) -> None:
        self.folder = folder
        self.client = client.as_service(KEY, "gateway")
        self.inbox = InboxCalls(client=self.client, uid=UID)
        self.world = World(folder / "pod")
        self.world.registers_first = True
        self.links: list[MeterLedger] = []

    async def start(self, attempt: int = 1, disk: FakeDisk | None = None) -> World:
        link = MeterLedger(self.client.url, producer_secret(KEY, UID, attempt))
        link.open()
        self.links.append(link)
        self.world.ledger = link  # type: ignore[assignment]
        self.world.disk = disk or self.world.disk
        self.world.assign(attempt=attempt)
        await self.world.start()
        return self.world

    async def serving(self) -> None:
        await self.world.until(lambda: self.world.session.serves, "the inbox was emptied")

    async def rows(self) -> list[tuple[str, int]]:
        answer = await self.client.ask(dict[str, Any], "GET", "/v1/events", session=UID)
        return sorted((row["stream"], row["number"]) for row in answer["events"])

    async def ended(self, stream: Any, number: int) -> OperationView:
        """Polled at the ledger until the archive tells its end."""
        async with asyncio.timeout(30):
            while (view := await self.inbox.poll(stream, number)).state in (
                "Pending",
                "InProgress",
            ):
                await asyncio.sleep(0.02)
        return view

    async def stop(self) -> None:
        attempt = self.world.session.assignment.attempt
        self.world.assign(attempt=attempt, desired="stop")
        await self.world.until(lambda: self.world.session.shipped, "everything was shipped")


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Both]:
    (tmp_path / "key").write_bytes(KEY)
    async with running_ledger(
        tmp_path / "ledger", listen_port=free_port(), cluster_key_file=tmp_path / "key",
        artifacts_dir=tmp_path / "store",
    ) as client:  # fmt: skip
        made = Both(tmp_path, client)
        session = RegisterSession(
            uid=UID, tenant=TenantName("acme"), project="", name="run", model="fake", rank=8,
            created_us=START_US,
        )  # fmt: skip
        await made.client.ask(object, "POST", "/v1/sessions", session)
        yield made
        await made.world.close()
        for link in made.links:
            await link.close()


async def test_what_was_accepted_without_a_meter_runs_once_in_order(both: Both) -> None:
    await both.inbox.submit(1, forward_backward(9000))
    await both.inbox.submit(2, optim_step())
    keyless = await both.inbox.submit(None, sample(prompt=4, tokens=8))
    pod = await both.start()
    await both.serving()
    for number in (1, 2):
        assert (await pod.poll("train", number)).state == "Completed"
    assert (await pod.poll("log", keyless.number)).state == "Completed"
    await pod.settled()
    assert await both.rows() == [("log", keyless.number), ("train", 1), ("train", 2)]
    (row,) = (await both.client.usage(session=UID))["rows"]
    assert (row["train"], row["prefill"], row["sample"]) == (9000, 4, 8)
    with pytest.raises(ServedError):
        await both.inbox.submit(3)
    assert (await both.inbox.submit(1, forward_backward(9000))).duplicate


async def test_results_are_told_after_the_stop_and_what_waits_then_is_skipped(both: Both) -> None:
    pod = await both.start()
    await both.serving()
    small = await pod.train(1, forward_backward(5))
    large = await pod.train(2, forward_backward(9000))
    sampled = await pod.sample(sample())
    await both.stop()
    await pod.close()
    for told in (small, large, sampled):
        assert await both.inbox.poll(told.stream, told.number) == told
    with pytest.raises(GristmillError, match="over"):
        await both.inbox.submit(3)


async def test_a_drain_of_a_dead_pod_skips_what_waits_and_archives_what_ended(
    both: Both, tmp_path: Path
) -> None:
    pod = await both.start()
    await both.serving()
    told = await pod.train(1, forward_backward(5))
    await pod.settled()
    disk = pod.disk.crash()
    await pod.power_off()
    going = InboxCalls(client=both.client.as_meter(KEY, UID), uid=UID)
    await going.beat(state="Draining", received=1)
    await both.inbox.submit(2, forward_backward(7))
    drain = Drain(settings=pod.settings, disk=disk, ledger=both.links[0], timeout_s=30)
    assert await drain.run() == 0
    assert await both.inbox.poll("train", 1) == told
    assert (await both.inbox.poll("train", 2)).state == "Skipped"
    assert await both.rows() == [("train", 1)]


async def test_a_fenced_attempt_cannot_take_what_waits(both: Both) -> None:
    await both.start()
    await both.serving()
    other = InboxCalls(client=both.client.as_meter(KEY, UID, attempt=2), uid=UID)
    await other.client.register(UID, session=UID, attempt=2, epoch=both.world.session.log.epoch + 1)
    await both.inbox.submit(1, forward_backward(5))
    await both.world.until(lambda: both.world.session.fenced, "it was fenced")
    assert both.world.session.state.records == {}
    fenced = InboxCalls(client=both.client.as_meter(KEY, UID, attempt=1), uid=UID)
    with pytest.raises(FencedError):
        await fenced.claim(attempt=1)
    assert [entry.number for entry in (await other.claim(attempt=2)).entries] == [1]


class Client:
    """Submits to whoever takes it, meter or inbox, and sends again what was not answered."""

    def __init__(self, both: Both, dice: random.Random) -> None:
        self.both = both
        self.dice = dice
        self.keyless: list[int] = []

    async def run(self, operations: list[ops.Operation]) -> None:
        for number, operation in enumerate(operations, 1):
            while not await self._taken(number, operation):
                await asyncio.sleep(0.01)
            if number % 4 == 0:
                await self._sample(number)
            await asyncio.sleep(0.03)

    async def _taken(self, number: int, operation: ops.Operation) -> bool:
        both = self.both
        try:
            if both.world.meter is not None and self.dice.random() < 0.5:
                await both.world.submit(number, operation)
            else:
                await both.inbox.submit(number, operation)
        except GristmillError:
            return False
        return True

    async def _sample(self, seed: int) -> None:
        with suppress(ServedError):
            self.keyless.append((await self.both.inbox.submit(None, sample(seed=seed))).number)


@pytest.mark.parametrize("seed", range(3))
async def test_kills_at_any_moment_lose_nothing_and_run_nothing_twice(
    both: Both, seed: int
) -> None:
    dice = random.Random(seed)
    operations: list[ops.Operation] = [
        optim_step() if n % 4 == 0 else forward_backward(n if n % 3 else 5000, n)
        for n in range(1, COUNT + 1)
    ]
    client = Client(both, dice)
    await both.start()
    running = asyncio.create_task(client.run(operations))
    for _ in range(KILLS):
        await asyncio.sleep(dice.random() * 0.2)
        await both.world.crash(dice, worker=dice.random() < 0.3)
    async with asyncio.timeout(60):
        await running
    await both.serving()
    for number in range(1, COUNT + 1):
        assert (await both.world.poll("train", number)).state == "Completed"
    for number in client.keyless:
        assert (await both.world.poll("log", number)).state == "Completed"
    await both.world.settled()
    trained = [("train", number) for number in range(1, COUNT + 1)]
    assert await both.rows() == sorted([("log", number) for number in client.keyless] + trained)
    (row,) = (await both.client.usage(session=UID))["rows"]
    assert row["train"] == sum(ops.count_before(operation).train for operation in operations)
    await both.stop()
    assert (await both.inbox.poll("train", COUNT)).state == "Completed"
