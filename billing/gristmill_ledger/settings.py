"""The ledger's settings: environment variables `GRISTMILL_LEDGER_*`, read once in `__main__`."""

from pathlib import Path
from typing import Final

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from gristmill_contracts import limits

ENV_PREFIX: Final = "GRISTMILL_LEDGER_"


class LedgerSettings(BaseSettings):
    """A field is set by its upper-case name behind the prefix, as in GRISTMILL_LEDGER_PORT."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on. The routes carry no authentication: keep it private."""
    port: int = Field(default=8460, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one, which the log names."""
    data_dir: Path = Path("gristmill-data")
    """Folder of the SQLite file. Not used when database_url is set."""
    database_url: str = ""
    """sqlite:////absolute/path or postgresql://user@host/name. Empty: ledger.sqlite3 in data_dir."""
    busy_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """How long a statement waits for a lock of another process before the caller is told to retry."""
    readers: int = Field(default=4, ge=1, le=64)
    """Threads, and database connections, that answer queries. Writes have one thread."""
    writes_pending_max: int = Field(default=limits.LEDGER_WRITES_PENDING_MAX, ge=1)
    """Writes that may wait for the writer; past it 429."""
    price_book: str = "default"
    """The price book that usage is shown with."""
    shutdown_s: int = Field(default=10, ge=1, le=600)
    """How long open requests may take to end after SIGTERM."""
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")

    @property
    def url(self) -> str:
        """Where the database is, with the default filled in."""
        return self.database_url or f"sqlite:///{self.data_dir.resolve() / 'ledger.sqlite3'}"
