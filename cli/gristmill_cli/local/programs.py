"""Which programs make up an instance, and the settings each is started with. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gristmill_cli.local.layout import GroupKey, Layout

Part = Literal["gateway", "ledger", "meter", "worker"]
HEARTBEAT_S: Final = 0.5
"""Loopback and one machine: beat faster than in a cluster, for starts wait for it."""
INHERITED_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One child process. Two programs are the same if all their fields are."""

    name: str
    part: Part
    environment: tuple[tuple[str, str], ...]
    log: Path
    host: str = ""
    port: int = 0
    socket: str = ""
    """Where it answers /readyz: a port, or a unix socket."""
    group: GroupKey | None = None

    @property
    def module(self) -> str:
        return f"gristmill_{self.part}"

    @property
    def ready_path(self) -> str:
        """A meter is not ready without its worker, but takes operations: it only has to be up."""
        return "/healthz" if self.part == "meter" else "/readyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """What a worker loads."""

    name: str
    folder: str
    dtype: str
    threads: int | None = None


def ledger_program(layout: Layout, port: int) -> Program:
    return Program(
        name="ledger",
        part="ledger",
        log=layout.logs / "ledger.log",
        host="127.0.0.1",
        port=port,
        environment=_environment(
            "LEDGER", HOST="127.0.0.1", PORT=port, DATA_DIR=layout.ledger, SHUTDOWN_S=5
        ),
    )


def gateway_program(layout: Layout, host: str, port: int, ledger_url: str) -> Program:
    return Program(
        name="gateway",
        part="gateway",
        log=layout.logs / "gateway.log",
        host=host,
        port=port,
        environment=_environment(
            "GATEWAY",
            HOST=host,
            PORT=port,
            STORE_PATH=layout.store,
            LEDGER_URL=ledger_url,
            ARTIFACTS_DIR=layout.artifacts,
            OPERATION_KEY_FILE=layout.operation_key,
        ),
    )


def meter_program(
    layout: Layout, key: GroupKey, port: int, socket: Path, ledger_url: str
) -> Program:
    return Program(
        name=f"meter.{key}",
        part="meter",
        log=layout.logs / f"meter.{key}.log",
        host="127.0.0.1",
        port=port,
        group=key,
        environment=_environment(
            "METER",
            HOST="127.0.0.1",
            PORT=port,
            DATA_DIR=layout.meter(key),
            ASSIGNMENTS_DIR=layout.assignments(key),
            WORKER_SOCKET=socket,
            WORKER_STATE_DIR=layout.worker(key),
            LEDGER_URL=ledger_url,
            HEARTBEAT_S=HEARTBEAT_S,
        ),
    )


def worker_program(layout: Layout, key: GroupKey, socket: Path, model: WorkerModel) -> Program:
    threads = {} if model.threads is None else {"THREADS": model.threads}
    return Program(
        name=f"worker.{key}",
        part="worker",
        log=layout.logs / f"worker.{key}.log",
        socket=str(socket),
        group=key,
        environment=_environment(
            "WORKER",
            SOCKET=socket,
            MODEL_DIR=model.folder,
            MODEL_NAME=model.name,
            ARTIFACTS_DIR=layout.artifacts,
            DTYPE=model.dtype,
            **threads,
        ),
    )


def child_environment(program: Program, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the child: ours, its settings, and of what the user set for its part the rest.

    What the supervisor decides (addresses, folders) wins over what was inherited; a setting that it
    leaves open, as GRISTMILL_METER_GAP_TIMEOUT_S, reaches the child as the user set it.
    """
    own = f"GRISTMILL_{program.part.upper()}_"
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("GRISTMILL_") or name.startswith(own)
    }
    decided = dict(program.environment)
    for tunable in (f"{own}HEARTBEAT_S", f"{own}SHUTDOWN_S"):
        if tunable in kept and tunable in decided:
            del decided[tunable]
    return {**kept, "PYTHONUNBUFFERED": "1", **decided}


def _environment(part: str, **settings: object) -> tuple[tuple[str, str], ...]:
    return tuple((f"GRISTMILL_{part}_{name}", str(value)) for name, value in settings.items())
