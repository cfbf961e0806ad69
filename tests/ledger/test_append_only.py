"""Facts can be neither changed nor removed, on either database, by whatever statement."""

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from gristmill_contracts import limits
from gristmill_contracts.chain.notes import new_key_pem, read_key_pem
from gristmill_contracts.cluster_http import UsageGap
from gristmill_contracts.http import RegisterCheckpoint
from gristmill_contracts.ids import CheckpointId, SessionUid, TenantName
from gristmill_contracts.reconciliation import DeviceTime
from gristmill_contracts.usage import Counts
from gristmill_ledger import schema
from gristmill_ledger.chain.heads import sign_heads
from gristmill_ledger.checkpoints import delete_checkpoint, register_checkpoint
from gristmill_ledger.database import Database
from gristmill_ledger.device_times import record_device_times
from gristmill_ledger.gaps import record_gap
from gristmill_ledger.reconcile.compare import Difference
from gristmill_ledger.reconcile.store import Run, decide, record
from gristmill_ledger.registry import put_tenant
from gristmill_ledger.rerating import Rerate, begin_run
from gristmill_testing import budget_store as budgets
from gristmill_testing.ledger import START_US, make_event, make_heartbeat
from gristmill_testing.ledger_store import (
    NOW_US,
    name_session,
    post,
    rate_all,
    register,
    stored_rows,
)  # fmt: skip


def fill(database: Database) -> None:
    """At least one row in every table of facts."""
    register(database)
    name_session(database, "s-1", "first", price_book="default")
    gap = UsageGap(attempt=1, acked_seq=1, head_seq=None, reason="volume_gone", at_us=START_US)
    database.write_now(lambda c: record_gap(c, "s-1", gap))
    post(database, [make_event(1), make_event(1, producer_seq=2, counts=Counts())])
    checkpoint = RegisterCheckpoint(
        id=CheckpointId("c-1"),
        tenant=TenantName("acme"),
        session=SessionUid("s-1"),
        group="g",
        kind="state",
        path="a/b",
        model="tiny",
        rank=8,
        alpha=16,
        size_bytes=1,
        manifest_sha256="0" * 64,
        description="",
        created_us=START_US,
    )
    database.write_now(lambda c: register_checkpoint(c, checkpoint))
    database.write_now(lambda c: delete_checkpoint(c, "acme", "g", 1))
    database.write_now(lambda c: put_tenant(c, "acme"))
    key = read_key_pem(new_key_pem(), "test")
    database.write_now(lambda c: sign_heads(c, key, at_us=NOW_US, slot="hour 1"))
    fill_budgets(database)
    rate_all(database)
    fill_reconciliation(database)
    database.write_now(lambda c: begin_run(c, Rerate(reason="test"), now_us=START_US))


def fill_reconciliation(database: Database) -> None:
    run = Run(
        id="r", slot="hour 1", scope="all", asked_by="", started_us=1, ended_us=2, sessions=1,
        in_flight=0, silent=0, differences=1,
    )  # fmt: skip
    found = Difference(
        pair="meter-ledger", kind="unknown", tenant="acme", session="s-1", subject="x", detail="y"
    )
    database.write_now(lambda c: record(c, run, [found], NOW_US))
    database.write_now(lambda c: decide(c, found.id, by="ann", reason="a test", now_us=NOW_US))
    device = DeviceTime(since_us=1, held_us=2, devices=1, busy_us=1)
    beat = msgspec.structs.replace(make_heartbeat("s-1"), device=device)
    database.write_now(lambda c: record_device_times(c, [beat], NOW_US))


def fill_budgets(database: Database) -> None:
    budgets.put(database, 100)
    lease = budgets.take(database, 1, 100)
    post(database, [make_event(2, producer_seq=3, counts=Counts(train=90), lease=lease.id)])
    budgets.sweep(database, NOW_US + 2 * int(limits.BUDGET_LEASE_S * 1e6))
    budgets.give_back(database, lease.id)


def statements(table: str) -> list[str]:
    column = next(iter(schema.metadata.tables[table].columns)).name
    return [f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}"]


@pytest.mark.parametrize("table", schema.FACT_TABLES)
def test_a_fact_can_be_neither_updated_nor_deleted(database: Database, table: str) -> None:
    fill(database)
    before = stored_rows(database, table)
    assert before
    for statement in statements(table):
        with pytest.raises(DBAPIError, match="append-only"), database.engine.begin() as connection:
            connection.execute(text(statement))
    assert stored_rows(database, table) == before


def test_a_fact_can_not_be_replaced_or_truncated(database: Database) -> None:
    fill(database)
    before = stored_rows(database)
    statement = "TRUNCATE usage_event"
    if database.engine.dialect.name == "sqlite":
        statement = "INSERT OR REPLACE INTO usage_event SELECT * FROM usage_event"
    with pytest.raises(DBAPIError, match="append-only"), database.engine.begin() as connection:
        connection.execute(text(statement))
    assert stored_rows(database) == before


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("prefill", "-1"),
        ("seq", "0"),
        ("kind", "'gift'"),
        ("outcome", "'lost'"),
        ("train", "NULL"),
        ("payload_hash", "payload_hash_short"),
        ("event_id", "event_id"),
    ],
)
def test_the_database_itself_refuses_an_impossible_event(
    database: Database, column: str, value: str
) -> None:
    """Last line of defence, should a check in the program be lost. `event_id`: kept as it is."""
    fill(database)
    names = [c.name for c in schema.usage_event.columns]
    replaced = {"seq": "99", "event_id": "'fresh'", column: value}
    if value == "payload_hash_short":
        replaced[column] = "substr(payload_hash, 1, 8)"
    values = ", ".join(replaced.get(name, name) for name in names)
    statement = f"INSERT INTO usage_event ({', '.join(names)}) SELECT {values} FROM usage_event"
    with pytest.raises(DBAPIError, match=r"(?i)constraint"), database.engine.begin() as connection:
        connection.execute(text(statement))


def test_sqlite_refuses_a_quantity_that_is_no_integer(database: Database) -> None:
    if database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL's columns are typed in any case")
    fill(database)
    names = [c.name for c in schema.usage_event.columns]
    replaced = {"seq": "99", "event_id": "'fresh'", "sample": "'many'"}
    values = ", ".join(replaced.get(name, name) for name in names)
    statement = f"INSERT INTO usage_event ({', '.join(names)}) SELECT {values} FROM usage_event"
    with pytest.raises(DBAPIError, match="INTEGER"), database.engine.begin() as connection:
        connection.execute(text(statement))
