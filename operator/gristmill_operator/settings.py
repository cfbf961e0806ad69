"""The operator's settings: environment variables `GRISTMILL_OPERATOR_*`, read once in `__main__`."""

from pathlib import Path
from typing import Final

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX: Final = "GRISTMILL_OPERATOR_"


class OperatorSettings(BaseSettings):
    """A field is set by its upper-case name behind the prefix, as in GRISTMILL_OPERATOR_PORT."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True)

    host: str = "0.0.0.0"  # noqa: S104 - the kubelet and Prometheus come from outside the pod
    """Address of /healthz, /readyz and /metrics."""
    port: int = Field(default=8480, ge=0, le=65_535)
    """Port of /healthz, /readyz and /metrics; 0 takes a free one, which the log names."""
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    identity: str = ""
    """Name in the Lease; empty = the host's name and a random part."""
    system_namespace: str = "gristmill-system"
    """Namespace of the operator, its Lease and the cluster key."""

    # --- the API server ---
    kubeconfig: Path | None = None
    """Not set = the service account of the pod, else $KUBECONFIG, else ~/.kube/config."""
    api_server_url: str = ""
    """Replaces the address of the API server; credentials stay as they are."""
    qps: float = Field(default=50.0, gt=0)
    """Requests a second to the API server, in the long run."""
    burst: int = Field(default=100, ge=1)
    """Requests that may go out at once after a pause."""
    connections_max: int = Field(default=32, ge=1)
    request_timeout_s: float = Field(default=30.0, gt=0)
    initial_streaming: bool = True
    """Fill the caches by a streaming list; needs Kubernetes 1.34."""

    # --- the loop ---
    workers: int = Field(default=16, ge=1, le=256)
    """How many objects are reconciled at once."""
    resync_s: float = Field(default=600.0, gt=0)
    """Every object is looked at once in this time, though nothing changed."""
    sweep_s: float = Field(default=180.0, gt=0)
    """How often the caches are compared with the API server."""
    lease_s: float = Field(default=15.0, gt=0)
    """How long a leader that stopped renewing is believed to lead."""
    lease_renew_s: float = Field(default=10.0, gt=0)
    """A leader that could not renew for this long stops writing and exits."""
    lease_retry_s: float = Field(default=2.0, gt=0)

    # --- what sessions are made with ---
    ledger_url: str
    """Where the ledger answers, for the operator and for meters, as http://gristmill-ledger.gristmill-system:8460."""
    cluster_key_file: Path | None = None
    """The cluster key as a file; not set, or not there yet = read from its Secret."""
    meter_image: str = ""
    """Image of the meter, by digest. A session keeps the one that it first started with."""
