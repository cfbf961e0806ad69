"""The meter's settings: environment variables `GRISTMILL_METER_*`, read once in `__main__`."""

from pathlib import Path
from typing import Final, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from gristmill_contracts import limits

ENV_PREFIX: Final = "GRISTMILL_METER_"


class MeterSettings(BaseSettings):
    """A field is set by its upper-case name behind the prefix, as in GRISTMILL_METER_PORT."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on. Every route but health and metrics needs the session's secret."""
    port: int = Field(default=8470, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one, which the log names."""
    data_dir: Path = Path("gristmill-data/meter")
    """Volume of the operation logs, one folder for each session."""
    assignments_dir: Path = Path("gristmill-data/assignments")
    """Folder of `<uid>.json` files: the sessions to serve."""
    worker_socket: Path = Path("gristmill-data/worker.sock")
    """Unix socket of the worker."""
    worker_state_dir: str = "gristmill-data/worker-state"
    """Folder, as the worker sees it, below which each session's snapshots lie in `<uid>`."""
    ledger_url: str = "http://127.0.0.1:8460"
    """Where usage, checkpoints and heartbeats are posted."""
    producer_secret_file: Path | None = None
    """File of the secret that the ledger asks for in a cluster. With it a session takes and releases
    nothing before the ledger has taken its registration."""
    artifacts_dir: Path | None = None
    """Folder where the worker writes checkpoints. Set where the ledger keeps them: they are copied to and
    from it. Not set: all parts share one folder."""
    ready_when: Literal["open", "serving"] = "open"
    """What /readyz says: that operations are taken, or that the worker is there and all sessions serve."""
    gap_timeout_s: float = Field(default=limits.GAP_TIMEOUT_S, gt=0)
    """How long a session waits for a missing sequence number before it fails."""
    claim_timeout_s: float = Field(default=limits.CLAIM_TIMEOUT_S, gt=0)
    """How long the result of a keyless operation waits to be fetched before it becomes an attempt."""
    result_retention_s: float = Field(default=limits.RESULT_RETENTION_S, gt=0)
    """How long a result can be fetched after the operation ended."""
    log_free_bytes_min: int = Field(default=limits.LOG_FREE_BYTES_MIN, ge=0)
    """New work is refused when the volume has less than this, beside what is reserved for results."""
    snapshot_replay_s: float = Field(default=limits.SNAPSHOT_REPLAY_S_MAX, ge=0)
    """A snapshot is taken when the operations since the last one ran for this long."""
    snapshot_payload_bytes: int = Field(default=limits.SNAPSHOT_PAYLOAD_BYTES_MAX, ge=0)
    """A snapshot is taken when the operations since the last one are this large."""
    heartbeat_s: float = Field(default=limits.HEARTBEAT_S, gt=0, le=60)
    """How often the state of the sessions is posted and the worker asked for its own."""
    scan_s: float = Field(default=0.2, gt=0, le=60)
    """How often the assignments folder is read."""
    drain_s: float = Field(default=20.0, gt=0, le=600)
    """How long the end may take after SIGTERM: what runs, and shipping the rest to the ledger."""
    lock_wait_s: float = Field(default=30.0, ge=0, le=600)
    """How long to wait at start for another meter to leave the data folder."""
    stop_wait_s: float = Field(default=30.0, gt=0, le=600)
    """How long a stopping session waits for a worker that is away."""
    retry_first_s: float = Field(default=0.05, gt=0)
    """First pause before the worker or ledger is called again; it doubles."""
    retry_last_s: float = Field(default=2.0, gt=0)
    """Longest pause before the worker or ledger is called again."""
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
