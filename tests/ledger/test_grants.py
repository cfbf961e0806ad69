"""On PostgreSQL the ledger serves as a role that may change no fact, and everything works with it."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ProgrammingError

from gristmill_contracts.chain.notes import new_key_pem, read_key_pem
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger import migrate, schema
from gristmill_ledger.chain.heads import sign_heads
from gristmill_ledger.database import Database, open_engine
from gristmill_ledger.grants import grant
from gristmill_ledger.prices import put_price_book
from gristmill_testing.ledger import make_event, running_ledger
from gristmill_testing.ledger_store import NOW_US, post, register, stored_rows

pytestmark = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
ROLE = "gristmill_serves"


@pytest.fixture
def serving_url(migrated_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of the same database for a role that was granted by the migration's own command."""
    with psycopg.connect(migrated_url, autocommit=True) as connection:
        connection.execute(
            f"DO $$ BEGIN CREATE ROLE {ROLE} LOGIN; "
            "EXCEPTION WHEN duplicate_object THEN NULL; END $$".encode()
        )
    monkeypatch.setenv("GRISTMILL_LEDGER_DATABASE_URL", migrated_url)
    assert migrate.main(["--grant-to", ROLE]) == 0
    return make_url(migrated_url).set(username=ROLE).render_as_string(hide_password=False)


@pytest.fixture
def serving(serving_url: str) -> Iterator[Database]:
    opened = Database(
        open_engine(serving_url, busy_timeout_s=30, connections=3), readers=2, writes_pending_max=8
    )
    yield opened
    opened.close()


def test_the_role_stores_what_a_ledger_stores(serving: Database) -> None:
    register(serving)
    post(serving, [make_event(1), make_event(2)])
    key = read_key_pem(new_key_pem(), "test")
    assert len(serving.write_now(lambda c: sign_heads(c, key, at_us=NOW_US, slot="1"))) == 1
    prices = [Price(model="*", token_type=name, micros_per_mtok=1) for name in TOKEN_TYPES]
    for start_us in (1, 2):
        book = PriceBook(name="b", currency="USD", effective_from_us=start_us, prices=prices)
        serving.write_now(lambda c, book=book: put_price_book(c, "b", book))  # type: ignore[misc]
    assert len(stored_rows(serving)) == 2


@pytest.mark.parametrize("change", ["UPDATE", "DELETE", "TRUNCATE"])
def test_no_fact_is_the_roles_to_change(serving: Database, change: str) -> None:
    """By rights, before any trigger: `permission denied`."""
    for table in schema.FACT_TABLES:
        column = next(iter(schema.metadata.tables[table].columns)).name
        statement = {
            "UPDATE": f"UPDATE {table} SET {column} = {column}",
            "DELETE": f"DELETE FROM {table}",
            "TRUNCATE": f"TRUNCATE {table}",
        }[change]
        with (
            pytest.raises(ProgrammingError, match="permission denied"),
            serving.engine.begin() as connection,
        ):
            connection.execute(text(statement))


@pytest.mark.parametrize("statement", ["ALTER TABLE usage_event DISABLE TRIGGER ALL", "DROP TRIGGER usage_event_append_only ON usage_event", "DROP TABLE usage_event", "ALTER TABLE usage_event DROP COLUMN hash", "DROP FUNCTION refuse_change() CASCADE", "SET session_replication_role = replica"])  # fmt: skip
def test_what_keeps_facts_is_not_the_roles_to_remove(serving: Database, statement: str) -> None:
    with (
        pytest.raises(ProgrammingError, match=r"must be owner|permission denied"),
        serving.engine.begin() as connection,
    ):
        connection.execute(text(statement))


def test_a_locked_facts_column_is_kept_by_its_trigger(serving: Database) -> None:
    with pytest.raises(Exception, match="append-only"), serving.engine.begin() as connection:
        connection.execute(text("UPDATE price_book SET written_by = 'me'"))


async def test_a_whole_ledger_serves_as_the_role(serving_url: str, tmp_path: Path) -> None:
    async with running_ledger(tmp_path, database_url=serving_url) as client:
        await client.register("p")
        assert (await client.post("p", [make_event(1)])).acked_seq == 1
        await client.ledger.follower.catch_up()
        await client.ledger.keeper.verify()
        rows = (await client.usage())["rows"]
        assert rows[0]["operations"] == 1


def test_sqlite_has_no_roles(tmp_path: Path, backend: str) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'x'}", busy_timeout_s=1, connections=1)
    with pytest.raises(ValueError, match=backend.replace("postgresql", "PostgreSQL")):
        grant(engine, ROLE)
    engine.dispose()
