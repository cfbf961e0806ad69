"""The real ledger on SQLite in memory: what is committed survives its process, an open transaction does not."""

import atexit
import functools
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from fastapi import FastAPI
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import StaticPool

from gristmill_contracts import limits
from gristmill_contracts.http import ProducerCursor, Submitted, UsageBatch
from gristmill_ledger import ledger as ledger_module
from gristmill_ledger.app import make_app
from gristmill_ledger.budgets import holds, leases
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.settings import LedgerSettings
from gristmill_testing.ledger_file import migrated_sqlite
from gristmill_testing.simulation.loop import NOBODY, Killed, Process, SimLoop
from gristmill_testing.simulation.network import SimNetwork
from gristmill_testing.simulation.traps import BATCH, INBOX_ACK, PRODUCER

HOST = "ledger"
JOURNAL_MODE = slice(18, 20)
"""Bytes of a SQLite header that ask for a write-ahead log, which memory does not have."""


@functools.cache
def _template() -> bytes:
    """A migrated database with prices, as the bytes of its file."""
    with tempfile.TemporaryDirectory(prefix="sim") as folder:
        path = Path(folder) / "ledger.sqlite3"
        path.write_bytes(migrated_sqlite())
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA journal_mode=DELETE")
        content = bytearray(connection.serialize())
        connection.close()
    content[JOURNAL_MODE] = b"\x01\x01"
    return bytes(content)


class Unclosed(sqlite3.Connection):
    """Outlives whoever closes it: closing is the end of a process, and the database is its disk."""

    def close(self) -> None:
        if self.in_transaction:
            self.execute("ROLLBACK")


@functools.cache
def _store() -> tuple[sqlite3.Connection, Engine]:
    """One connection and one engine for all runs of this process: compiled statements are kept."""
    raw = sqlite3.connect(
        ":memory:", check_same_thread=False, isolation_level=None, factory=Unclosed
    )
    engine = create_engine("sqlite://", creator=lambda: raw, poolclass=StaticPool)

    @event.listens_for(engine, "begin")
    def begin(_: Connection) -> None:
        _STEP[0]("statement")
        raw.execute("BEGIN")  # SQLAlchemy takes ten times as long over it.

    @event.listens_for(engine, "before_cursor_execute")
    def before(*_: Any) -> None:
        _STEP[0]("statement")

    @event.listens_for(engine, "commit")
    def commit(_: Any) -> None:
        _STEP[0]("commit")

    return raw, engine


_OPEN: "list[Books | None]" = [None]
_STEP: list[Callable[[str], None]] = [lambda _what: None]
"""Called before each statement and commit of the run that is on."""


@functools.cache
def _settings() -> LedgerSettings:
    folder = tempfile.mkdtemp(prefix="sim", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return LedgerSettings(data_dir=Path(folder))


_APP: list[FastAPI] = []


def _app_of(ledger: Ledger) -> FastAPI:
    """One application for all runs of this process: each new one works out its routes again.

    It outlives the run; what it serves must not.
    """
    if not _APP:
        _APP.append(make_app(ledger))
    _APP[0].state.ledger = weakref.proxy(ledger)
    return _APP[0]


class Books:
    """The ledger's database, and the process that serves it. `statements_left`: it dies before that one."""

    def __init__(self, loop: SimLoop, net: SimNetwork) -> None:
        self.loop = loop
        self.net = net
        self.raw, self.engine = _store()
        self.load(_template())
        self.process: Process | None = None
        self.ledger: Ledger | None = None
        self.statements_left: int | None = None
        self.volatile: bytes | None = None
        """Where a planted bug answers before it commits: what a crash leaves."""
        self.newest: dict[str, int] = {}
        """Session -> the newest attempt whose registration was answered."""
        self.on_unfenced: Callable[[str, int], None] = lambda _uid, _attempt: None
        self.on_batch: Callable[[str, UsageBatch], None] = lambda _uid, _batch: None
        """A meter's usage has arrived."""
        self.on_moment: Callable[[str, str], bool] = lambda _moment, _uid: False
        """See `Traps.spring`."""
        self.on_commit: Callable[[], None] = lambda: None
        """Before each commit, with what it will have made."""
        self.inboxed: set[tuple[str, str, int]] = set()
        """Operations that the inbox was the first to take: session, stream, number."""
        self.restored = False
        self.lives = 0
        self.backup: bytes | None = None
        _STEP[0], _OPEN[0] = self._step, self
        shutil.rmtree(_settings().data_dir, ignore_errors=True)
        _settings().data_dir.mkdir()

    def load(self, content: bytes) -> None:
        """Page by page, for SQLite does not survive another database under its prepared statements."""
        if self.raw.in_transaction:
            self.raw.execute("ROLLBACK")
        other = sqlite3.connect(":memory:")
        other.deserialize(content)
        other.backup(self.raw)
        other.close()
        self.raw.execute("PRAGMA foreign_keys=ON")
        self.raw.execute("PRAGMA recursive_triggers=ON")
        self.raw.execute("PRAGMA synchronous=OFF")

    def save(self) -> bytes:
        return self.raw.serialize()

    def _step(self, what: str) -> None:
        if what == "commit":
            self.on_commit()
        if self.statements_left is None or self.process is None or self.process.dead:
            return
        if self.statements_left > 0:
            self.statements_left -= 1
            return
        self.statements_left = None
        self.loop.note("ledger_dies", what)
        raise Killed

    def start(self) -> None:
        """A new process on what is committed."""
        self.lives += 1
        process = self.process = Process(self.loop, f"ledger-{self.lives}", HOST)
        self.statements_left = None
        process.on_death.append(self._died)
        process.spawn(self._serve(process), "ledger")

    def _died(self) -> None:
        if self.volatile is not None:
            self.load(self.volatile)
            self.volatile = None

    async def _serve(self, process: Process) -> None:
        ledger = Ledger(_settings())
        with (
            patch.object(ledger_module, "open_engine", lambda *_args, **_more: self.engine),
            patch.object(ledger_module, "migrate", lambda _engine: None),
        ):
            await ledger.open()
        self.ledger = ledger
        self.net.serve(HOST, process, self._watched(_app_of(ledger)))

    def _watched(self, app: Any) -> Any:
        """Tells what arrives, and what was answered."""

        async def watch(scope: Any, receive: Any, send: Any) -> None:
            headers = dict(scope["headers"])
            uid = headers.get(b"x-gristmill-session", b"").decode()
            attempt = int(headers.get(b"x-gristmill-attempt", b"0"))
            path, over = scope["path"], attempt < self.newest.get(uid, 0)
            if path.endswith("/inbox/ack") and self.on_moment(INBOX_ACK, uid):
                return
            if path == BATCH:
                body = await receive()
                receive = _once(body, receive)
                self.on_batch(uid, msgspec.msgpack.decode(body["body"], type=UsageBatch))
            status = 0

            async def sending(message: dict[str, Any]) -> None:
                nonlocal status
                status = message.get("status", status)
                if status == 200 and message.get("body") and path in (BATCH, PRODUCER):
                    self._look_at_cursor(uid, attempt, over=over, path=path, body=message["body"])
                await send(message)
                if status == 200 and message.get("body") and scope["method"] == "POST":
                    if path.endswith("/inbox"):
                        kept = msgspec.msgpack.decode(message["body"], type=Submitted)
                        self.inboxed.add((path.split("/")[3], kept.stream, kept.number))
                    self.on_moment(path, uid)

            await app(scope, receive, sending)

        return watch

    def _look_at_cursor(
        self, uid: str, attempt: int, *, over: bool, path: str, body: bytes
    ) -> None:
        """Which attempt has registered, and which one posted usage and was not told to stop."""
        cursor = msgspec.msgpack.decode(body, type=ProducerCursor)
        if path == PRODUCER:
            self.newest[uid] = max(attempt, self.newest.get(uid, 0))
        elif over and not cursor.fenced:
            self.on_unfenced(uid, attempt)

    @contextmanager
    def look(self) -> Iterator[Connection]:
        """Read what is committed, from outside of the run."""
        kept, _STEP[0] = _STEP[0], lambda _what: None
        try:
            with self.engine.connect() as connection:
                yield connection
        finally:
            _STEP[0] = kept

    def rows(self, table: str) -> list[dict[str, Any]]:
        with self.look() as connection:
            found = connection.exec_driver_sql(f"SELECT * FROM {table} ORDER BY 1, 2")
            return [dict(row._mapping) for row in found]


def _once(message: dict[str, Any], receive: Any) -> Any:
    """As `receive`, from which that message was taken."""
    waiting = [message]

    async def again() -> Any:
        return waiting.pop() if waiting else await receive()

    return again


@contextmanager
def short_leases(lease_s: float) -> Iterator[None]:
    """Leases of budgets run out after that long, and the ledger looks for them as often as it must."""
    lease_us = int(lease_s * 1_000_000)
    with (
        patch.object(holds, "LEASE_US", lease_us),
        patch.object(leases, "LEASE_US", lease_us),
        patch.object(limits, "BUDGET_SWEEP_S", min(limits.BUDGET_SWEEP_S, lease_s / 4)),
    ):
        yield


EARLY_S = 0.05
"""How long a commit is open after its answer, where that bug is planted."""


def answer_early() -> None:
    """For a planted bug: until EARLY_S from now, a crash of the ledger undoes what follows."""
    books = _OPEN[0]
    if books is None or books.volatile is not None or books.raw.in_transaction:
        return
    books.volatile = books.save()

    def committed() -> None:
        books.volatile = None

    books.loop.call_later(EARLY_S, committed, context=NOBODY)
