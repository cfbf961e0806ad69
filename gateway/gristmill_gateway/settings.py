"""The gateway's settings: environment variables `GRISTMILL_GATEWAY_*`, read once in `__main__`."""

from pathlib import Path
from typing import Final

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from gristmill_contracts import limits

ENV_PREFIX: Final = "GRISTMILL_GATEWAY_"


class GatewaySettings(BaseSettings):
    """A field is set by its upper-case name behind the prefix, as in GRISTMILL_GATEWAY_PORT."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8450, ge=0, le=65_535)
    """The one public port: control plane, runtime plane and S3. 0 takes a free one, which the log names."""
    store_path: Path = Path("gristmill-data/store.sqlite")
    """The resource store: sessions, models, tenants, access keys."""
    ledger_url: str = "http://127.0.0.1:8460"
    """Where accounts, checkpoints and usage are asked for."""
    artifacts_dir: Path = Path("gristmill-data/artifacts")
    """Root of the artifact store, which the S3 calls read."""
    operation_key_file: Path = Path("gristmill-data/operation.key")
    """Key that signs operation ids and page tokens; made (mode 0600) if absent. All replicas share it."""
    result_wait_s: float = Field(
        default=limits.RESULT_WAIT_S_MAX, ge=0, le=limits.RESULT_WAIT_S_MAX
    )
    """How long a Get of a result is held while the operation runs, in seconds."""
    clock_skew_s: float = Field(default=limits.CLOCK_SKEW_S_MAX, gt=0, le=86_400)
    """How far a client's clock may be off, in seconds."""
    shutdown_s: int = Field(default=10, ge=1, le=600)
    """How long requests may take to end after SIGTERM, in seconds."""
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
