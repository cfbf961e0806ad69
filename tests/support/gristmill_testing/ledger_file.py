"""A new ledger's SQLite file, made once for a process: its steps take longer than many a test."""

import tempfile
from functools import cache
from pathlib import Path

from gristmill_ledger.database import open_engine
from gristmill_ledger.migrate import migrate


@cache
def migrated_sqlite() -> bytes:
    """Migrated, without an event."""
    with tempfile.TemporaryDirectory(prefix="gm-ledger-") as folder:
        path = Path(folder) / "ledger.sqlite3"
        engine = open_engine(f"sqlite:///{path}", busy_timeout_s=30, connections=1)
        migrate(engine)
        engine.dispose()
        return path.read_bytes()
