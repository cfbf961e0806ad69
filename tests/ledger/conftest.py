"""Every store test runs on SQLite and, where `initdb` is found, on PostgreSQL."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill_ledger.database import Database, open_engine
from gristmill_ledger.migrate import migrate
from gristmill_testing.postgres import (
    PostgresMissingError,
    create_database,
    drop_database,
    running_postgres,
)  # fmt: skip


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of a private server for the whole run."""
    try:
        with running_postgres() as url:
            yield url
    except PostgresMissingError as error:
        pytest.skip(f"PostgreSQL: {error}")


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
        return
    server = request.getfixturevalue("postgres_url")
    name = f"t{uuid.uuid4().hex}"
    yield create_database(server, name)
    drop_database(server, name)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A migrated database, open."""
    opened = open_database(database_url)
    migrate(opened.engine)
    yield opened
    opened.close()


@pytest.fixture
def another_database(database: Database, database_url: str) -> Iterator[Database]:
    """The same database through its own connections, as another process has them."""
    opened = open_database(database_url)
    yield opened
    opened.close()


def open_database(url: str) -> Database:
    engine = open_engine(url, busy_timeout_s=30, connections=4)
    return Database(engine, readers=2, writes_pending_max=64)
