"""The worker's settings: environment variables `GRISTMILL_WORKER_*`, read once in `__main__`."""

from pathlib import Path
from typing import Final, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX: Final = "GRISTMILL_WORKER_"


class WorkerSettings(BaseSettings):
    """A field is set by its upper-case name behind the prefix, as in GRISTMILL_WORKER_SOCKET."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, protected_namespaces=("settings_",)
    )

    socket: Path
    """Unix socket to listen on; at most 107 characters. An old socket file there is replaced."""
    model_dir: Path
    """Folder of a prepared base model: see `python -m gristmill_worker.prepare`."""
    model_name: str = ""
    """What the status calls the model. Empty: the folder's name."""
    artifacts_dir: Path = Path("artifacts")
    """Root of all checkpoints. Nothing outside it is read or written."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the base weights and of compute. Adapters, gradients and moments are float32."""
    path: Literal["auto", "fast", "generic"] = "auto"
    """fast = our own decoder, for Llama-shaped models; generic = transformers, for all. auto = fast where it can."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = cuda where torch finds one."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Of torch. 0 = the CPUs that the cgroup grants."""
    base_weights: Literal["auto", "replicated", "sharded"] = "auto"
    """Of a team of ranks: replicated = each holds the whole base; sharded = each holds an equal part of every
    layer, and the layers are gathered as they run (fast path only). auto = sharded where a rank's GPU could not
    hold the whole base and still work. All ranks need the same setting."""
    token_budget: int = Field(default=2048, ge=16, le=1_048_576)
    """Tokens in one forward pass of a training operation, unless a single datum is longer."""
    adapters_cached: int = Field(default=8, ge=1, le=1024)
    """Checkpoints kept in memory for sampling."""
    kv_cache_mib: int = Field(default=2048, ge=1, le=1_048_576)
    """Keys and values of all samples that run at once. A single row runs whatever it needs."""
    prefix_cache_mib: int = Field(default=0, ge=0, le=1_048_576)
    """Keys and values of prompts' first blocks of 256 tokens, kept for prompts that begin alike; what is
    found there is counted as cached_prefill. 0 = none are kept."""
    batch_invariant: bool = False
    """A sample's tokens depend on its own request alone, to the last bit, whatever else runs; slower."""
    snapshots_kept: int = Field(default=2, ge=2, le=16)
    """Of each session. Two, so that one that was cut off has a predecessor."""
    socket_mode: Literal["0600", "0660"] = "0600"
    """Permissions of the socket; 0660 where the meter is another user of the same group, which may then
    read and write checkpoints too."""
    network: Literal["auto", "none", "full"] = "auto"
    """none = the process gives up network sockets for good before it loads the model. auto = none, but
    full for a team of several ranks and where the system has no seccomp filter."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collectives of a team of ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun sets them)."""
    team_start_s: float = Field(default=600.0, gt=0, le=86_400)
    """How long to wait at start for the other ranks."""
    team_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """How long one collective may take before another rank is taken for lost."""
    ready_file: Path | None = None
    """Made by ranks other than 0 once they are ready: they have no door that could be asked."""
    shutdown_s: int = Field(default=10, ge=1, le=600)
    """How long open requests may take to end after SIGTERM."""
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    """DEBUG, INFO, WARNING or ERROR."""

    @property
    def name(self) -> str:
        return self.model_name or self.model_dir.name
