"""The resource store of one machine: a single SQLite file with the semantics of the Kubernetes API.

Safe from several processes and threads: every change is one BEGIN IMMEDIATE transaction.
"""

import contextlib
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from gristmill_contracts.errors import ConflictError, NotFoundError, UnavailableError
from gristmill_contracts.resources import Metadata, Resource
from gristmill_contracts.units import now_us

R = TypeVar("R", bound=Resource)

BUSY_TIMEOUT_S: Final = 30.0
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS objects (
  kind TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL, uid TEXT NOT NULL UNIQUE,
  created INTEGER NOT NULL, resource_version INTEGER NOT NULL, body TEXT NOT NULL,
  PRIMARY KEY (kind, namespace, name)) STRICT;
CREATE TABLE IF NOT EXISTS revision (one INTEGER PRIMARY KEY CHECK (one = 1), value INTEGER NOT NULL) STRICT;
INSERT OR IGNORE INTO revision VALUES (1, 0);
"""


class LocalStore:
    """`ResourceStore` on one file. Build it with `open_local_store`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connections = threading.local()

    def create(self, resource: R) -> R:
        meta = resource.metadata
        with self._change() as (database, revision):
            if self._row(database, type(resource), meta.namespace, meta.name) is not None:
                raise ConflictError(
                    f"{resource.kind} {meta.name!r} exists already in namespace {meta.namespace!r}; "
                    "choose another name or update it"
                )
            filled = meta.model_copy(
                update={
                    "uid": str(uuid.uuid4()),
                    "resource_version": revision,
                    "generation": 1,
                    "creation_time_us": now_us(),
                    "deletion_time_us": None,
                }
            )
            stored = resource.model_copy(update={"metadata": filled})
            database.execute(
                "INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    resource.kind,
                    meta.namespace,
                    meta.name,
                    filled.uid,
                    revision,
                    revision,
                    _dump(stored),
                ),
            )
            return stored

    def get(self, kind: type[R], namespace: str, name: str) -> R:
        with self._reporting():
            found = self._row(self._database(), kind, namespace, name)
        if found is None:
            raise _missing(kind, namespace, name)
        return found

    def list(self, kind: type[R], namespace: str | None = None) -> list[R]:
        """All of a kind, in creation order; `namespace=None` = every namespace."""
        with self._reporting():
            rows = (
                self._database()
                .execute(
                    "SELECT body FROM objects WHERE kind = ?1 AND (?2 IS NULL OR namespace = ?2) "
                    "ORDER BY created",
                    (_kind_name(kind), namespace),
                )
                .fetchall()
            )
        return [kind.model_validate_json(body) for (body,) in rows]

    def update(self, resource: R) -> R:
        with self._change() as (database, revision):
            current = self._current(database, resource)
            changed = getattr(resource, "spec", None) != getattr(current, "spec", None)
            meta = resource.metadata.model_copy(
                update={
                    "uid": current.metadata.uid,
                    "creation_time_us": current.metadata.creation_time_us,
                    "deletion_time_us": current.metadata.deletion_time_us,
                    "generation": current.metadata.generation + int(changed),
                    "resource_version": revision,
                }
            )
            values: dict[str, Any] = {"metadata": meta}
            if hasattr(current, "status"):
                values["status"] = current.status
            return self._write(database, resource.model_copy(update=values))

    def update_status(self, resource: R) -> R:
        with self._change() as (database, revision):
            current = self._current(database, resource)
            meta = current.metadata.model_copy(update={"resource_version": revision})
            status = getattr(resource, "status", None)
            return self._write(
                database, current.model_copy(update={"metadata": meta, "status": status})
            )

    def delete(self, kind: type[R], namespace: str, name: str) -> None:
        with self._change() as (database, revision):
            current = self._row(database, kind, namespace, name)
            if current is None:
                raise _missing(kind, namespace, name)
            if not current.metadata.finalizers:
                self._remove(database, current.metadata, _kind_name(kind))
            elif current.metadata.deletion_time_us is None:
                meta = current.metadata.model_copy(
                    update={"deletion_time_us": now_us(), "resource_version": revision}
                )
                self._write(database, current.model_copy(update={"metadata": meta}))

    def revision(self) -> int:
        with self._reporting():
            row = self._database().execute("SELECT value FROM revision").fetchone()
        return int(row[0])

    def _current(self, database: sqlite3.Connection, resource: R) -> R:
        meta = resource.metadata
        current = self._row(database, type(resource), meta.namespace, meta.name)
        if current is None:
            raise _missing(type(resource), meta.namespace, meta.name)
        if current.metadata.resource_version != meta.resource_version:
            raise ConflictError(
                f"{resource.kind} {meta.name!r} is at version {current.metadata.resource_version}, the "
                f"change was made on version {meta.resource_version}; read it again and repeat the change"
            )
        return current

    def _write(self, database: sqlite3.Connection, resource: R) -> R:
        meta = resource.metadata
        if meta.deletion_time_us is not None and not meta.finalizers:
            self._remove(database, meta, resource.kind)
            return resource
        database.execute(
            "UPDATE objects SET resource_version = ?, body = ? WHERE kind = ? AND namespace = ? AND name = ?",
            (meta.resource_version, _dump(resource), resource.kind, meta.namespace, meta.name),
        )
        return resource

    def _remove(self, database: sqlite3.Connection, meta: Metadata, kind: str) -> None:
        database.execute(
            "DELETE FROM objects WHERE kind = ? AND namespace = ? AND name = ?",
            (kind, meta.namespace, meta.name),
        )

    def _row(
        self, database: sqlite3.Connection, kind: type[R], namespace: str, name: str
    ) -> R | None:
        row = database.execute(
            "SELECT body FROM objects WHERE kind = ? AND namespace = ? AND name = ?",
            (_kind_name(kind), namespace, name),
        ).fetchone()
        return None if row is None else kind.model_validate_json(row[0])

    @contextlib.contextmanager
    def _change(self) -> Iterator[tuple[sqlite3.Connection, int]]:
        """One write transaction; the revision it will have is handed out."""
        with self._reporting():
            database = self._database()
            database.execute("BEGIN IMMEDIATE")
            try:
                database.execute("UPDATE revision SET value = value + 1")
                revision = int(database.execute("SELECT value FROM revision").fetchone()[0])
                yield database, revision
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Locked for too long, no space, a damaged file: an error of ours that says which file."""
        try:
            yield
        except sqlite3.Error as error:
            raise UnavailableError(f"the store {self._path} cannot be used: {error}") from error

    def _database(self) -> sqlite3.Connection:
        """This thread's connection: sqlite3 objects must not cross threads."""
        existing: sqlite3.Connection | None = getattr(self._connections, "database", None)
        if existing is not None:
            return existing
        database = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        self._connections.database = database
        return database


def open_local_store(path: Path | str) -> LocalStore:
    """Open or create the store. Only the owner may read the file: it holds access keys.

    Raises UnavailableError if the file cannot be made, read or written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _make_empty(path)
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(SCHEMA)
    except (OSError, sqlite3.Error) as error:
        raise UnavailableError(f"the store {path} cannot be opened: {error}") from error
    return LocalStore(path)


def _make_empty(path: Path) -> None:
    """Make the file for its owner alone, without ever opening it by its own name.

    SQLite's locks are POSIX locks: closing any descriptor of the file frees all that this process holds on
    it, and another process may then delete the write-ahead log that an open connection still writes to.
    """
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        # A link fails where another was faster, and then the file is theirs.
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()


def _kind_name(kind: type[Resource]) -> str:
    return str(kind.model_fields["kind"].default)


def _dump(resource: Resource) -> str:
    return resource.model_dump_json(by_alias=True)


def _missing(kind: type[Resource], namespace: str, name: str) -> NotFoundError:
    return NotFoundError(f"there is no {_kind_name(kind)} {name!r} in namespace {namespace!r}")
