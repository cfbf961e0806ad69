"""Meter and ledger of a cluster together, over HTTP: secrets, files, directives, fences, restarts."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts import operations as ops
from gristmill_contracts.cluster_http import ArtifactPage, Directive, UsageGap
from gristmill_contracts.errors import UnavailableError
from gristmill_contracts.http import CheckpointPage, Empty, HeartbeatPage, RegisterSession
from gristmill_contracts.ids import TenantName
from gristmill_contracts.secrets import producer_secret
from gristmill_ledger.schema import release_grant
from gristmill_meter.drain import Drain
from gristmill_meter.ledger_client import LedgerClient as MeterLedger
from gristmill_testing.chains import broken_chains
from gristmill_testing.fake_disk import FakeDisk
from gristmill_testing.ledger import START_US, LedgerClient, free_port, running_ledger
from gristmill_testing.meter_world import UID, World, forward_backward, sample, save_weights

KEY = bytes(range(32))


class Cluster:
    """A ledger that can be stopped and started, and pods around it. `close` it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.stack = AsyncExitStack()
        self.worlds: list[World] = []
        self.links: list[MeterLedger] = []
        self.client: LedgerClient
        (folder / "key").write_bytes(KEY)

    async def start_ledger(self) -> None:
        self.client = await self.stack.enter_async_context(
            running_ledger(
                self.folder / "ledger",
                listen_port=self.port,
                cluster_key_file=self.folder / "key",
                artifacts_dir=self.folder / "store",
            )
        )

    async def stop_ledger(self) -> None:
        await self.stack.aclose()
        self.stack = AsyncExitStack()

    @property
    def operator(self) -> LedgerClient:
        return self.client.as_service(KEY, "operator")

    async def register(self) -> None:
        session = RegisterSession(
            uid=UID, tenant=TenantName("acme"), project="", name="run", model="fake", rank=8,
            created_us=START_US,
        )  # fmt: skip
        await self.operator.ask(Empty, "POST", "/v1/sessions", session)

    def link(self, attempt: int) -> MeterLedger:
        """What the meter of an attempt has: the address, and its secret."""
        secret = producer_secret(KEY, UID, attempt)
        made = MeterLedger(f"http://127.0.0.1:{self.port}", secret)
        made.open()
        self.links.append(made)
        return made

    async def pod(self, attempt: int = 1, disk: FakeDisk | None = None, **settings: Any) -> World:
        """A meter of that attempt with a worker and a folder of its own, started and admitted."""
        folder = self.folder / f"pod-{len(self.worlds)}"
        (folder / "artifacts").mkdir(parents=True)
        world = World(folder, artifacts_dir=folder / "artifacts", **settings)
        world.worker.artifacts = folder / "artifacts"
        world.registers_first = True
        world.ledger = self.link(attempt)  # type: ignore[assignment]
        world.disk = disk or world.disk
        self.worlds.append(world)
        await self.let_grants_run_out()
        await world.start(attempt=attempt)
        await world.until(lambda: world.session.serves or world.session.broken is not None)
        return world

    async def let_grants_run_out(self) -> None:
        """As if the attempt before had been silent for half a minute: what is released now is the new one's."""
        update = release_grant.update().values(until_us=0)
        await self.client.ledger.database.write(lambda c: c.execute(update).rowcount)

    async def beat(self) -> Any:
        page = await self.operator.ask(HeartbeatPage, "GET", "/v1/heartbeats")
        return page.heartbeats[0] if page.heartbeats else None

    async def until_state(self, state: str) -> Any:
        async with asyncio.timeout(30):
            while (beat := await self.beat()) is None or beat.view.state != state:
                await asyncio.sleep(0.02)
        return beat

    async def rows(self) -> list[tuple[int, str | None]]:
        """Number and mark of each event, as the ledger has them."""
        answer = await self.operator.ask(dict[str, Any], "GET", "/v1/events", session=UID)
        return [(row["number"], row["quarantined"]) for row in answer["events"]]

    async def close(self) -> None:
        for world in self.worlds:
            await world.close()
        for link in self.links:
            await link.close()
        await self.stack.aclose()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    await made.start_ledger()
    await made.register()
    yield made
    await made.close()


async def test_a_session_from_its_first_operation_to_closed(cluster: Cluster) -> None:
    pod = await cluster.pod()
    await pod.train(1, forward_backward(5))
    saved = (await pod.train(2, save_weights())).result
    assert isinstance(saved, ops.SaveResult)
    assert (await pod.sample(sample(prompt=4, tokens=8))).state == "Completed"
    listed = await cluster.operator.ask(ArtifactPage, "GET", "/v1/artifacts/acme")
    prefix = saved.path.removeprefix("acme/")
    assert [a.path for a in listed.artifacts] == [
        f"{prefix}/{name}" for name in ("manifest.json", "merged/model", "weights")
    ]
    page = await cluster.operator.ask(CheckpointPage, "GET", "/v1/checkpoints", tenant="acme")
    assert [c.id for c in page.checkpoints] == [saved.checkpoint_id]
    directive = Directive(attempt=1, desired="stop")
    await cluster.operator.ask(Empty, "PUT", f"/v1/sessions/{UID}/directive", directive)
    beat = await cluster.until_state("Closed")
    assert (beat.acked_seq, beat.head_seq) == (3, 3)
    (row,) = (await cluster.operator.usage(session=UID))["rows"]
    assert (row["train"], row["prefill"], row["sample"]) == (5, 4, 8)


async def test_the_next_attempt_samples_from_what_the_first_one_saved(cluster: Cluster) -> None:
    first = await cluster.pod()
    saved = (await first.train(1, save_weights())).result
    assert isinstance(saved, ops.SaveResult)
    await first.settled()
    disk = first.disk.crash()
    await first.power_off()
    second = await cluster.pod(attempt=2, disk=disk)
    view = await second.sample(sample())
    assert view.state == "Completed", view.error
    assert second.worker.read == [
        (first.folder / "artifacts" / saved.path / "weights").read_bytes()
    ]


async def test_two_meters_on_copies_of_one_log_bill_each_operation_once(cluster: Cluster) -> None:
    old = await cluster.pod()
    await old.train(1, forward_backward(5))
    await old.settled()
    copy = old.disk.crash()
    new = await cluster.pod(attempt=2, disk=copy)
    await old.until(lambda: old.session.fenced, "the older one was fenced")
    await cluster.let_grants_run_out()
    assert (await new.train(2, forward_backward(7))).state == "Completed"
    await new.settled()
    assert await cluster.rows() == [(1, None), (2, None)]
    (row,) = (await cluster.operator.usage(session=UID))["rows"]
    assert row["train"] == 12


async def test_what_a_cut_off_attempt_released_reaches_the_ledger_in_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await cluster.pod()
    await old.train(1, forward_backward(5))
    await old.settled()
    copy = old.disk.crash()
    address = old.ledger.base_url  # type: ignore[attr-defined]
    old.ledger.base_url = "http://127.0.0.1:1"  # type: ignore[attr-defined]
    assert (await old.train(2, forward_backward(7))).state == "Completed"
    new = await cluster.pod(attempt=2, disk=copy)
    old.ledger.base_url = address  # type: ignore[attr-defined]
    await old.until(lambda: old.driver.poster.handed_in, "handed in")
    assert await cluster.rows() == [(1, None), (2, "fenced_attempt")]
    assert (await new.train(2, forward_backward(9))).state == "Completed"
    await new.settled()
    (row,) = (await cluster.operator.usage(session=UID))["rows"]
    assert (row["train"], row["operations"], row["operations_quarantined"]) == (12, 2, 1)


async def test_a_restarted_ledger_hears_of_everything_without_help(cluster: Cluster) -> None:
    pod = await cluster.pod()
    await pod.train(1, forward_backward(5))
    await pod.settled()
    await cluster.stop_ledger()
    for number in (2, 3):
        assert (await pod.train(number, forward_backward(5, number))).state == "Completed"
    await pod.submit(4, save_weights())
    assert (await pod.poll("train", 4, wait_s=0.1)).state == "InProgress"
    await cluster.start_ledger()
    assert (await pod.poll("train", 4)).state == "Completed"
    await pod.settled()
    assert [number for number, _ in await cluster.rows()] == [1, 2, 3, 4]
    at_us = (await cluster.beat()).at_us
    async with asyncio.timeout(20):
        while (await cluster.beat()).at_us == at_us:
            await asyncio.sleep(0.02)


async def test_a_ledger_restored_from_last_nights_backup_converges(cluster: Cluster) -> None:
    """What came after the backup is sent again from the log, each event once, and the chain is whole."""
    pod = await cluster.pod()
    for number in (1, 2):
        await pod.train(number, forward_backward(5, number))
    await pod.settled()
    await cluster.stop_ledger()
    books, backup = cluster.folder / "ledger/ledger.sqlite3", cluster.folder / "backup.sqlite3"
    shutil.copy(books, backup)
    await cluster.start_ledger()
    await pod.train(3, forward_backward(7, 3))
    assert (await pod.sample(sample(prompt=4, tokens=8))).state == "Completed"
    await pod.settled()
    assert len(await cluster.rows()) == 4
    await cluster.stop_ledger()
    for left in books.parent.glob("ledger.sqlite3*"):
        left.unlink()
    shutil.copy(backup, books)
    await cluster.start_ledger()
    assert (await pod.train(4, forward_backward(9, 4))).state == "Completed"
    await pod.settled()
    assert sorted(await cluster.rows()) == [(1, None), (1, None), (2, None), (3, None), (4, None)]
    (row,) = (await cluster.operator.usage(session=UID))["rows"]
    assert (row["train"], row["prefill"], row["sample"]) == (5 + 5 + 7 + 9, 4, 8)
    assert await cluster.client.ledger.database.read(broken_chains) == []


async def test_a_drain_ships_what_a_lost_pod_left(cluster: Cluster) -> None:
    pod = await cluster.pod()
    await pod.train(1, forward_backward(5))
    await pod.settled()
    await cluster.stop_ledger()
    await pod.train(2, forward_backward(7))
    disk = pod.disk.crash()
    await pod.power_off()
    draining = asyncio.create_task(
        Drain(settings=pod.settings, disk=disk, ledger=cluster.link(1), timeout_s=30).run()
    )
    await cluster.start_ledger()
    assert await draining == 0
    beat = await cluster.until_state("Closed")
    assert (beat.acked_seq, beat.head_seq) == (2, 2)
    assert await cluster.rows() == [(1, None), (2, None)]


async def test_a_volume_that_is_gone_leaves_a_gap_on_record(cluster: Cluster) -> None:
    pod = await cluster.pod()
    await pod.train(1, forward_backward(5))
    await pod.settled()
    await pod.power_off()
    second = await cluster.pod(attempt=2, disk=FakeDisk())
    await second.until(lambda: second.session.broken is not None, "the loss was noticed")
    beat = await cluster.until_state("Failed")
    assert beat.view.error.code == "log_lost"
    path = f"/v1/sessions/{UID}/gaps"
    (gap,) = await cluster.operator.ask(list[UsageGap], "GET", path)
    assert (gap.attempt, gap.acked_seq, gap.head_seq, gap.reason) == (2, 1, 0, "log_lost")
    answer = await cluster.operator.usage(session=UID)
    assert answer["lost_count"] == 1
    assert answer["rows"][0]["train"] == 5


@pytest.mark.parametrize("secret", ["", "guess", producer_secret(KEY, UID, 2)])
async def test_a_meter_with_a_wrong_secret_serves_nothing_and_goes_on_asking(
    cluster: Cluster, secret: str
) -> None:
    world = World(cluster.folder / "wrong")
    world.registers_first = True
    made = MeterLedger(f"http://127.0.0.1:{cluster.port}", secret)
    made.open()
    cluster.links.append(made)
    world.ledger = made  # type: ignore[assignment]
    cluster.worlds.append(world)
    await world.start()
    assert world.meter is not None
    meter = world.meter
    await world.until(lambda: meter.worker_status is not None, "the worker is there")
    with pytest.raises(UnavailableError, match="waits for the ledger"):
        await world.submit(1, forward_backward())
    assert (world.session.service, world.worker.sessions) == ("Recovering", {})
    made.secret = producer_secret(KEY, UID, 1)
    await world.until(lambda: world.session.service == "Serving", "admitted with the right one")
