"""Where things lie inside the containers, and who owns them."""

from typing import Final

METER_UID: Final = 10_001
WORKER_UID: Final = 10_002
SHARED_GID: Final = 10_000
"""Group of both containers: it opens the socket and the checkpoints, and nothing else."""

STATE: Final = "/var/lib/gristmill"
METER_STATE: Final = f"{STATE}/meter"
WORKER_STATE: Final = f"{STATE}/worker"
KERNELS: Final = f"{WORKER_STATE}/kernels"
"""What the worker compiled: code that it runs, and so where it alone writes."""
ARTIFACTS: Final = f"{STATE}/artifacts"
RUN: Final = "/run/gristmill"
SOCKET: Final = f"{RUN}/worker.sock"
SOCKET_MODE: Final = "0660"
"""For the shared group: the meter is another user."""
READY_FILE: Final = f"{RUN}/ready"
ASSIGNMENTS: Final = "/etc/gristmill/assignments"
PRODUCER: Final = "/etc/gristmill/producer"
PRODUCER_SECRET: Final = f"{PRODUCER}/secret"
MODELS: Final = "/models"
TMP: Final = "/tmp"  # noqa: S108 - inside the container, a volume of its own
SHM: Final = "/dev/shm"  # noqa: S108


def model_dir(model: str) -> str:
    return f"{MODELS}/{model}"
