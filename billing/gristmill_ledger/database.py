"""The database connection: one writer thread, a few readers, and what each database needs.

Blocking work never runs on the event loop. A unit of work is a function of a connection, run in one
transaction: SQLite's begins IMMEDIATE for writers, PostgreSQL's is READ COMMITTED with row locks.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sqlite3 import Connection as SqliteConnection
from sqlite3 import OperationalError as SqliteOperationalError
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine, Table, create_engine, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError, OverloadedError, UnavailableError
from gristmill_ledger.driver import is_postgresql

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Work = Callable[[Connection], Answer]

RETRYABLE_SQLSTATES: Final = frozenset({"40001", "40P01"})
STANDBY_SQLSTATE: Final = "25006"
"""Nothing is written there: the server is the standby of another one, or was told so."""
AWAY_SQLSTATES: Final = frozenset({STANDBY_SQLSTATE, "25P03", "25P04"})
"""Of the server's state and not of a statement, although the driver has no OperationalError of them. The others:
a transaction ended by its timeouts."""
SWITCH_PAUSE_S: Final = 0.02
READ_ONLY: Final = "gristmill_read_only"
BUSY_S: Final = 0.2
"""How long after a write the next one is expected."""


def open_engine(url: str, *, busy_timeout_s: float, connections: int) -> Engine:
    """An engine for SQLite or PostgreSQL. Connects to nothing yet; makes SQLite's folder."""
    parsed = _with_driver(make_url(url))
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed, busy_timeout_s, connections)
    timeout_ms = int(busy_timeout_s * 1000)
    return create_engine(
        parsed,
        pool_size=connections,
        max_overflow=0,
        pool_pre_ping=True,
        connect_args={"options": f"-c lock_timeout={timeout_ms}", "connect_timeout": 10},
    )


def _with_driver(url: URL) -> URL:
    backend = url.get_backend_name()
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ValueError(f"database {backend!r} is not supported; use a sqlite or postgresql URL")
    if not url.database or url.database == ":memory:":
        raise ValueError("the ledger needs a SQLite file; write sqlite:////absolute/path")
    return url


def _sqlite_engine(url: URL, busy_timeout_s: float, connections: int) -> Engine:
    Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, pool_size=connections, max_overflow=0)

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: SqliteConnection, _record: object) -> None:
        # The driver must not begin transactions by itself: `begin` below says how.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={int(busy_timeout_s * 1000)}")
        _switch_to_wal(connection, time.monotonic() + busy_timeout_s)
        # NORMAL may lose acknowledged commits at a power cut.
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        # Without it INSERT OR REPLACE would delete a row past the append-only trigger.
        connection.execute("PRAGMA recursive_triggers=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _switch_to_wal(connection: SqliteConnection, deadline: float) -> None:
    """Several processes may open a new file at once, and SQLite does not wait for this lock."""
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except SqliteOperationalError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(SWITCH_PAUSE_S)
        else:
            return


def insert_or_skip(connection: Connection, table: Table, **values: object) -> bool:
    """Insert a row unless one with its key exists. True if it was inserted."""
    dialect = postgresql if is_postgresql(connection) else sqlite
    statement = dialect.insert(table).values(**values).on_conflict_do_nothing()
    # Without the option psycopg's count is gone by the time that it is asked for.
    statement = statement.execution_options(preserve_rowcount=True)
    return connection.execute(statement).rowcount == 1


class Database:
    """Runs units of work. `open` starts the threads, `close` waits for what runs."""

    def __init__(self, engine: Engine, *, readers: int, writes_pending_max: int) -> None:
        self.engine = engine
        self._readers = ThreadPoolExecutor(readers, "ledger-reader")
        self._writer = ThreadPoolExecutor(1, "ledger-writer")
        self._writes_pending_max = writes_pending_max
        self._writes_pending = 0
        self._asked_at = -math.inf
        self.on_commit: Callable[[float], None] = lambda _seconds: None

    @property
    def writes_pending(self) -> int:
        """Writes that wait or run."""
        return self._writes_pending

    @property
    def busy(self) -> bool:
        """Whether somebody waits for the writer, or will in a moment: between two commits nobody does."""
        return self._writes_pending > 0 or time.monotonic() - self._asked_at < BUSY_S

    async def write(self, work: Work[Answer], *, behind: bool = False) -> Answer:
        """Run `work` in one transaction on the writer thread. behind: nobody waits for it.

        Raises OverloadedError when too many writes wait, UnavailableError when the database is away.
        """
        if self._writes_pending >= self._writes_pending_max:
            raise OverloadedError(
                f"{self._writes_pending} writes wait for the ledger's database, the most it holds; "
                "send the same request again later"
            )
        self._writes_pending += 1
        if not behind:
            self._asked_at = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._writer, self.write_now, work)
        finally:
            self._writes_pending -= 1

    async def read(self, work: Work[Answer]) -> Answer:
        """Run `work` on a reader thread; it sees one snapshot of the database."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self.read_now, work)

    def write_now(self, work: Work[Answer]) -> Answer:
        """`write`, on the calling thread."""
        for tries in range(1, limits.LEDGER_COMMIT_TRIES_MAX + 1):
            try:
                return self._commit(work)
            except DBAPIError as error:
                if _sqlstate(error) == STANDBY_SQLSTATE:
                    # Connections stay with their server. New ones find where the database is by now.
                    self.engine.dispose()
                if tries == limits.LEDGER_COMMIT_TRIES_MAX or not _may_repeat(error):
                    raise _translated(error) from error
            # Two writers that met once must not meet again.
            time.sleep(random.uniform(0, 0.01 * tries))  # noqa: S311
        raise AssertionError("unreachable")

    def _commit(self, work: Work[Answer]) -> Answer:
        started = time.monotonic()
        with self.engine.begin() as connection:
            answer = work(connection)
        self.on_commit(time.monotonic() - started)
        return answer

    def read_now(self, work: Work[Answer]) -> Answer:
        """`read`, on the calling thread."""
        options: dict[str, object] = {READ_ONLY: True}
        if self.engine.dialect.name == "postgresql":
            options = {"isolation_level": "REPEATABLE READ"}
        try:
            with self.engine.connect().execution_options(**options) as connection:
                return work(connection)
        except DBAPIError as error:
            raise _translated(error) from error

    def ping(self) -> None:
        """Raise UnavailableError if the database does not answer."""
        self.read_now(lambda connection: connection.execute(text("SELECT 1")).scalar_one())

    def close(self) -> None:
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        self.engine.dispose()


def _may_repeat(error: DBAPIError) -> bool:
    return _sqlstate(error) in RETRYABLE_SQLSTATES


def _sqlstate(error: DBAPIError) -> str | None:
    """PostgreSQL's code of the error; SQLite has none."""
    return getattr(error.orig, "sqlstate", None)


def _translated(error: DBAPIError) -> GristmillError | DBAPIError:
    """OperationalError (away, locked, full) and what is like it becomes retryable; anything else is our own bug."""
    away = error.connection_invalidated or _sqlstate(error) in AWAY_SQLSTATES
    if away or type(error).__name__ == "OperationalError":
        return UnavailableError(f"the ledger's database cannot take this now ({error.orig}); retry")
    return error
