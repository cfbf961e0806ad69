"""Every store test runs on SQLite and, where `initdb` is found, on PostgreSQL."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill_ledger.database import Database, open_engine
from gristmill_ledger.migrate import migrate
from gristmill_testing.ledger_file import migrated_sqlite
from gristmill_testing.postgres import (
    PostgresMissingError,
    create_database,
    running_postgres,
)  # fmt: skip

TEMPLATE = "migrated"


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of a private server for the whole run; its database `migrated` is a template."""
    try:
        with running_postgres() as url:
            _migrate(create_database(url, TEMPLATE))
            yield url
    except PostgresMissingError as error:
        pytest.skip(f"PostgreSQL: {error}")


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy."""
    path = tmp_path_factory.mktemp("template") / "ledger.sqlite3"
    path.write_bytes(migrated_sqlite())
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def database_url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without a table."""
    if backend == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    return create_database(request.getfixturevalue("postgres_url"), f"t{uuid.uuid4().hex}")


@pytest.fixture
def migrated_url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a migrated database without an event."""
    if backend == "sqlite":
        path = tmp_path / "ledger.sqlite3"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        return f"sqlite:///{path}"
    server = request.getfixturevalue("postgres_url")
    return create_database(server, f"t{uuid.uuid4().hex}", TEMPLATE)


@pytest.fixture
def database(migrated_url: str) -> Iterator[Database]:
    """A migrated database, open."""
    opened = _open(migrated_url)
    yield opened
    opened.close()


@pytest.fixture
def another_database(migrated_url: str) -> Iterator[Database]:
    """The same database through its own connections, as another process has them."""
    opened = _open(migrated_url)
    yield opened
    opened.close()


def _open(url: str) -> Database:
    engine = open_engine(url, busy_timeout_s=30, connections=4)
    return Database(engine, readers=2, writes_pending_max=64)


def _migrate(url: str) -> None:
    engine = open_engine(url, busy_timeout_s=30, connections=1)
    migrate(engine)
    engine.dispose()


@pytest.fixture
def other_ledger(sqlite_template: Path, tmp_path: Path) -> Iterator[Database]:
    """A ledger of its own, empty, on SQLite."""
    path = tmp_path / "other.sqlite3"
    shutil.copy(sqlite_template, path)
    opened = _open(f"sqlite:///{path}")
    yield opened
    opened.close()
