"""The service around the store: metrics, readiness, back-pressure, an absent database, all routes."""

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import Connection

from gristmill_contracts.errors import ConflictError, NotFoundError, OverloadedError
from gristmill_contracts.http import (
    Checkpoint,
    CheckpointGroup,
    CheckpointPage,
    CreateGroup,
    Empty,
    RegisterCheckpoint,
    RegisterSession,
    TenantAccount,
)
from gristmill_contracts.ids import CheckpointId, SessionUid, TenantName
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger.database import Database
from gristmill_testing.ledger import START_US, LedgerClient, make_event, running_ledger
from gristmill_testing.postgres import (
    PostgresMissingError,
    create_database,
    running_postgres,
    stop_postgres,
)  # fmt: skip

Answer = TypeVar("Answer")


async def metric(client: LedgerClient, name: str) -> float:
    status, body = await client.call("GET", "/metrics")
    assert status == 200
    (line,) = [line for line in body.decode().splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


async def test_metrics_count_what_became_of_events(tmp_path: Path) -> None:
    async with running_ledger(tmp_path) as client:
        await client.register("p")
        await client.post("p", [make_event(1), make_event(2)])
        await client.post("p", [make_event(2), make_event(3)])
        await client.post("p", [make_event(1, producer_seq=4, counts=Counts())])
        found = {
            result: await metric(client, f'gristmill_ledger_events_total{{result="{result}"}}')
            for result in ("inserted", "duplicate", "conflict")
        }
        assert found == {"inserted": 3, "duplicate": 1, "conflict": 1}
        assert await metric(client, "gristmill_ledger_producers") == 1
        assert await metric(client, "gristmill_ledger_commit_seconds_count") >= 4
        assert await metric(client, "gristmill_ledger_quarantined_events_total") == 3
        assert await metric(client, "gristmill_ledger_heartbeat_age_seconds") == -1


def tenant_facts() -> list[tuple[str, str, object]]:
    session = RegisterSession(
        uid=SessionUid("s-1"), tenant=TenantName("acme"), project="rl", name="first", model="tiny",
        rank=8, created_us=START_US,
    )  # fmt: skip
    prices = [Price(model="tiny", token_type=name, micros_per_mtok=2) for name in TOKEN_TYPES]
    book = PriceBook(name="default", currency="USD", effective_from_us=5, prices=prices)
    return [("POST", "/v1/sessions", session), ("PUT", "/v1/price-books/default", book)]


CHECKPOINT = RegisterCheckpoint(
    id=CheckpointId("c-1"), tenant=TenantName("acme"), session=SessionUid("s-1"), group="g",
    kind="weights", path="a/b c", model="tiny", rank=8, alpha=16, size_bytes=5,
    manifest_sha256="ab", description="", created_us=START_US,
)  # fmt: skip


async def walk_every_route(client: LedgerClient) -> None:
    """One visit to each route of the contract, with what the next one needs."""
    for method, path, message in tenant_facts():
        for _ in range(2):
            await client.ask(Empty, method, path, message)
    account = await client.ask(TenantAccount, "PUT", "/v1/tenants/acme")
    assert account == await client.ask(TenantAccount, "PUT", "/v1/tenants/acme")
    assert (account.tenant, account.account_id) == ("acme", "100000000001")
    assert (await client.register("p")).acked_seq == 0
    assert (await client.post("p", [make_event(1), make_event(2)])).acked_seq == 2
    (row,) = (await client.usage(group_by="session", bucket="day"))["rows"]
    assert (row["session_name"], row["total"], row["cost_pico"]) == ("first", 70, 140)
    page = await client.ask(dict, "GET", "/v1/events", session="s-1", limit=1)
    assert ([event["seq"] for event in page["events"]], page["next_after"]) == ([1], 1)
    page = await client.ask(dict, "GET", "/v1/events", session="s-1", tenant="acme", after=1)
    assert ([event["number"] for event in page["events"]], page["next_after"]) == ([2], None)
    group = CreateGroup(tenant=TenantName("acme"), name="g", description="kept")
    await client.ask(CheckpointGroup, "POST", "/v1/checkpoint-groups", group)
    with pytest.raises(ConflictError):
        await client.ask(CheckpointGroup, "POST", "/v1/checkpoint-groups", group)
    found = await client.ask(CheckpointGroup, "GET", "/v1/checkpoint-groups/acme/g")
    assert found.description == "kept"
    saved = await client.ask(Checkpoint, "POST", "/v1/checkpoints", CHECKPOINT)
    assert saved == await client.ask(Checkpoint, "GET", "/v1/checkpoints/acme/g/1")
    listed = await client.ask(CheckpointPage, "GET", "/v1/checkpoints", tenant="acme", order="desc")
    assert listed.checkpoints == [saved]
    await client.ask(Empty, "DELETE", "/v1/checkpoints/acme/g/1")
    with pytest.raises(NotFoundError):
        await client.ask(Checkpoint, "GET", "/v1/checkpoints/acme/g/1")


async def test_every_route_answers_as_the_contract_says(tmp_path: Path, database_url: str) -> None:
    async with running_ledger(tmp_path, database_url=database_url) as client:
        await walk_every_route(client)


class Gate:
    """A unit of work that holds the writer until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, _connection: Connection) -> None:
        self.entered.set()
        assert self.opened.wait(30)


async def test_reads_and_health_do_not_wait_for_a_slow_write(tmp_path: Path) -> None:
    async with running_ledger(tmp_path) as client:
        gate = Gate()
        slow = asyncio.create_task(client.ledger.database.write(gate))
        await asyncio.to_thread(gate.entered.wait, 10)
        async with asyncio.timeout(10):
            assert (await client.call("GET", "/healthz"))[0] == 200
            assert (await client.call("GET", "/readyz"))[0] == 200
            assert (await client.usage())["rows"] == []
        assert not slow.done()
        gate.opened.set()
        await slow


async def once_taken(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """The ledger's own tasks write too, now and then, where there is room for a single write."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await ask()
            except OverloadedError:
                await asyncio.sleep(0.01)


async def test_past_the_bound_of_waiting_writes_the_answer_is_429(tmp_path: Path) -> None:
    async with running_ledger(tmp_path, writes_pending_max=1) as client:
        gate = Gate()
        slow = asyncio.create_task(once_taken(lambda: client.ledger.database.write(gate)))
        await asyncio.to_thread(gate.entered.wait, 10)
        status, _body = await client.call("PUT", "/v1/tenants/acme")
        assert status == 429
        with pytest.raises(OverloadedError):
            await client.register("p")
        gate.opened.set()
        await slow
        assert (await once_taken(lambda: client.register("p"))).acked_seq == 0


async def test_a_database_locked_by_another_process_answers_503_and_recovers(
    tmp_path: Path,
) -> None:
    async with running_ledger(tmp_path, busy_timeout_s=0.05) as client:
        await client.register("p")
        with sqlite3.connect(tmp_path / "ledger.sqlite3", isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            status, body = await client.call("PUT", "/v1/tenants/acme")
            assert (status, b"unavailable" in body) == (503, True)
            other.execute("ROLLBACK")
        other.close()
        assert (await client.post("p", [make_event(1)])).acked_seq == 1


async def test_an_absent_postgresql_is_named_in_readyz_and_answers_503_until_it_is_back(
    tmp_path: Path,
) -> None:
    try:
        with running_postgres() as server:
            url = create_database(server, "ledger")
            async with running_ledger(tmp_path, database_url=url) as client:
                await client.register("p")
                await client.post("p", [make_event(1)])
                stop_postgres(server)
                status, body = await client.call("GET", "/readyz")
                assert (status, b"database" in body) == (503, True)
                assert (await client.call("GET", "/healthz"))[0] == 200
                assert (await client.call("PUT", "/v1/tenants/acme"))[0] == 503
                stop_postgres(server, start=True)
                assert (await client.call("GET", "/readyz"))[0] == 200
                assert (await client.post("p", [make_event(1), make_event(2)])).acked_seq == 2
                assert (await client.usage())["rows"][0]["operations"] == 2
    except PostgresMissingError as error:
        pytest.skip(f"PostgreSQL: {error}")


def test_a_write_that_races_another_for_a_lock_is_run_again(database: Database) -> None:
    """PostgreSQL ends one of two deadlocked transactions; its work is simply done again."""
    if database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer and no deadlocks")
    tries = 0

    def work(connection: Connection) -> int:
        nonlocal tries
        tries += 1
        if tries < 3:
            connection.exec_driver_sql(
                "DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$"
            )
        return tries

    assert database.write_now(work) == 3
