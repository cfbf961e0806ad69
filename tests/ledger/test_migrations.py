"""The migrations make what `schema.py` says, and carry the rows of every earlier version over."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import column, insert, inspect, table, text
from sqlalchemy.exc import DBAPIError

from gristmill_contracts import limits
from gristmill_contracts.chain.notes import new_key_pem, read_key_pem
from gristmill_ledger import schema
from gristmill_ledger.chain.heads import sign_heads
from gristmill_ledger.database import Database, open_engine
from gristmill_ledger.migrate import migrate
from gristmill_testing import budget_store as budgets
from gristmill_testing.ledger import START_US, make_event
from gristmill_testing.ledger_store import NOW_US, post, rate_all, stored_rows

SEEDED = {"counter", "price", "price_book", "reservation_open"}
"""Tables that have rows in a ledger that was never used, and one that the database fills itself."""
REVISIONS = (
    "0001",
    "0002",
    "0003",
    "0004",
    "0005",
    "0006",
    "0007",
    "0008",
    "0009",
    "0010",
    "0011",
    "0012",
)


HOLDS = ("reservation", "reservation_resolution")


def holds_in(rows: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(row["lease"], row["budget"]) for row in rows}


def open_unmigrated(url: str) -> Database:
    return Database(
        open_engine(url, busy_timeout_s=30, connections=2), readers=1, writes_pending_max=1
    )


def test_the_list_of_revisions_above_is_whole() -> None:
    config = Config()
    config.set_main_option("script_location", "gristmill_ledger:migrations")
    scripts = ScriptDirectory.from_config(config)
    found = [script.revision for script in scripts.walk_revisions()]
    assert tuple(reversed(found)) == REVISIONS


def test_the_migrated_database_is_what_the_schema_says(database: Database) -> None:
    """Nothing to add, remove or alter, types and nullability included (indices are migrations')."""

    def tables_only(_name: str | None, kind: str, *_rest: object) -> bool:
        return kind in ("table", "column", "schema")

    with database.engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "include_name": tables_only}
        )
        found = [
            difference
            for difference in compare_metadata(context, schema.metadata)
            if not (isinstance(difference, tuple) and "constraint" in difference[0])
        ]
    assert found == []


def test_sqlite_tables_are_strict(database: Database) -> None:
    if database.engine.dialect.name != "sqlite":
        pytest.skip("STRICT is SQLite's")
    with database.engine.connect() as connection:
        rows = connection.execute(text("PRAGMA table_list")).all()
    ours = {row.name: row.strict for row in rows if row.name in schema.metadata.tables}
    assert ours == dict.fromkeys(schema.metadata.tables, 1)


def rows_of_before(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What a ledger may hold, by table: usage, budgets with holds that ended and one that is in suspense,
    rated rows and sums, signed heads."""
    database = open_unmigrated(f"sqlite:///{folder / 'source.sqlite3'}")
    try:
        migrate(database.engine)
        budgets.session(database)
        budgets.put(database, 10_000, now_us=START_US)
        ended = budgets.take(database, 1, 100)
        budgets.take(database, 2, 50)
        post(database, [make_event(n) for n in range(1, 6)], "s-1")
        budgets.give_back(database, ended.id)
        budgets.sweep(database, NOW_US + 2 * int(limits.BUDGET_LEASE_S * 1e6))
        rate_all(database)
        key = read_key_pem(new_key_pem(), "test")
        database.write_now(lambda c: sign_heads(c, key, at_us=NOW_US, slot="hour 1"))
        return {
            each.name: stored_rows(database, each.name) for each in schema.metadata.sorted_tables
        }
    finally:
        database.close()


def insert_what_there_was(
    database: Database, rows: dict[str, list[dict[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """The rows of the tables that the database's version has, as far as it has their columns; those that a
    migration fills itself are left as they are. Returns what was inserted."""
    inserted = {}
    with database.engine.begin() as connection:
        there = set(inspect(connection).get_table_names()) - SEEDED
        for name in (name for name in rows if name in there and rows[name]):
            known = {column["name"] for column in inspect(connection).get_columns(name)}
            old = [{key: row[key] for key in row.keys() & known} for row in rows[name]]
            types = schema.metadata.tables[name].c
            columns = [column(key, types[key].type) for key in sorted(known)]
            connection.execute(insert(table(name, *columns)), old)
            inserted[name] = rows[name]
    return inserted


@pytest.mark.parametrize("start", REVISIONS)
def test_rows_of_every_version_survive_the_way_to_the_newest(
    database_url: str, start: str, tmp_path: Path
) -> None:
    database = open_unmigrated(database_url)
    try:
        migrate(database.engine, start)
        before = insert_what_there_was(database, rows_of_before(tmp_path))
        assert before.keys() >= {"producer", "session", "tenant_head", "usage_event"}
        migrate(database.engine)
        # The rows are chained as if the newest version had stored them.
        assert {name: stored_rows(database, name) for name in before} == before
        taken, ended = (holds_in(before.get(each, [])) for each in HOLDS)
        assert holds_in(stored_rows(database, "reservation_open")) == taken - ended
        post(database, [make_event(6)], "s-1")
        assert [row["seq"] for row in stored_rows(database)] == [1, 2, 3, 4, 5, 6]
        with pytest.raises(DBAPIError, match="append-only"), database.engine.begin() as connection:
            connection.execute(text("DELETE FROM usage_event"))
        indices = inspect(database.engine).get_indexes("usage_event")
        assert {index["name"] for index in indices} >= {"usage_event_by_session"}
    finally:
        database.close()


def test_totals_are_made_of_the_sums_that_there_are(database_url: str, tmp_path: Path) -> None:
    """As they would be had they been kept all the time."""
    database, kept = open_unmigrated(database_url), open_unmigrated(f"sqlite:///{tmp_path}/kept")
    totals = ("usage_total_daily", "usage_total_monthly")
    try:
        migrate(kept.engine)
        budgets.session(kept)
        post(kept, [
            make_event(n, operation=("sample", "forward")[n % 2], op_start_us=at_us)
            for n, at_us in enumerate(
                (-limits.QUANTITY_MAX, -1, 0, *(START_US + hour * 3_600_000_000 for hour in range(60))), 1
            )
        ], "s-1")  # fmt: skip
        rate_all(kept)
        rows = {each.name: stored_rows(kept, each.name) for each in schema.metadata.sorted_tables}
        migrate(database.engine, "0010")
        assert insert_what_there_was(database, rows).keys().isdisjoint(totals)
        migrate(database.engine)
        for name in totals:
            found = stored_rows(database, name)
            assert sorted(map(repr, found)) == sorted(map(repr, rows[name]))
            assert len(found) >= 4
    finally:
        database.close()
        kept.close()


def test_migrating_again_changes_nothing(database: Database) -> None:
    prices = stored_rows(database, "price")
    migrate(database.engine)
    assert stored_rows(database, "price") == prices


def test_processes_that_start_together_migrate_once(database_url: str) -> None:
    databases = [open_unmigrated(database_url) for _ in range(4)]
    barrier = threading.Barrier(len(databases))

    def start(database: Database) -> None:
        barrier.wait(timeout=30)
        migrate(database.engine)

    try:
        with ThreadPoolExecutor(len(databases)) as pool:
            for job in [pool.submit(start, database) for database in databases]:
                job.result()
        assert len(stored_rows(databases[0], "price")) == 4
    finally:
        for database in databases:
            database.close()


def test_a_database_of_a_newer_version_is_refused(database: Database) -> None:
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(CommandError, match="start the version that made it"):
        migrate(database.engine)


@pytest.mark.parametrize("url", ["mysql://u@h/d", "sqlite://", "sqlite:///:memory:"])
def test_a_database_that_cannot_keep_a_ledger_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"not supported|SQLite file"):
        open_engine(url, busy_timeout_s=1, connections=1)
