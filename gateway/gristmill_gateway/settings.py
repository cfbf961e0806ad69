"""The gateway's settings: environment variables `GRISTMILL_GATEWAY_*`, read once in `__main__`."""

from pathlib import Path
from typing import Final, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from gristmill_contracts import limits

ENV_PREFIX: Final = "GRISTMILL_GATEWAY_"
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class GatewaySettings(BaseSettings):
    """A field is set by its upper-case name behind the prefix, as in GRISTMILL_GATEWAY_PORT."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8450, ge=0, le=65_535)
    """The one public port: control plane, runtime plane and S3. 0 takes a free one, which the log names."""
    store: Literal["local", "kubernetes"] = "local"
    """Where sessions, models and tenants are kept: a file of this machine, or custom resources."""
    store_path: Path = Path("gristmill-data/store.sqlite")
    """The local store: sessions, models, tenants, access keys."""
    api_url: str = Field(default="", pattern="^(https?://.+)?$")
    """The API server, with the store `kubernetes`; empty = that of the cluster this pod is in."""
    api_token_file: Path = SERVICE_ACCOUNT / "token"
    """The token to show the API server; read again every minute."""
    api_ca_file: Path = SERVICE_ACCOUNT / "ca.crt"
    """The authority that the API server's certificate is of."""
    cluster_key_file: Path | None = None
    """The cluster key: every secret between our parts follows from it. Needed with `kubernetes`."""
    ledger_url: str = "http://127.0.0.1:8460"
    """Where accounts, checkpoints and usage are asked for."""
    artifacts_dir: Path = Path("gristmill-data/artifacts")
    """Root of the artifact store, which the S3 calls read. In a cluster the ledger has the artifacts."""
    operation_key_file: Path = Path("gristmill-data/operation.key")
    """Key that signs operation ids and page tokens; made (mode 0600) if absent. With a cluster key it
    follows from that."""
    result_wait_s: float = Field(
        default=limits.RESULT_WAIT_S_MAX, ge=0, le=limits.RESULT_WAIT_S_MAX
    )
    """How long a Get of a result is held while the operation runs, in seconds."""
    submit_hold_s: float = Field(
        default=limits.SUBMIT_HOLD_S_MAX, ge=0, le=limits.SUBMIT_HOLD_S_MAX
    )
    """How long a submit waits while its session's pod is started or recovered, in seconds."""
    clock_skew_s: float = Field(default=limits.CLOCK_SKEW_S_MAX, gt=0, le=86_400)
    """How far a client's clock may be off, in seconds."""
    trust_forwarded_host: bool = False
    """The proxy before us changes Host and says in X-Forwarded-Host what the client signed."""
    leave_s: float = Field(default=0.0, ge=0, le=300)
    """How long after SIGTERM new calls are still answered, in seconds: so long until no one sends any."""
    shutdown_s: int = Field(default=10, ge=1, le=600)
    """How long requests may take to end after that, in seconds."""
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
