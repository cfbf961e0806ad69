"""The two containers of a session's pod: the meter that stands before the worker, and the worker. Pure."""

from typing import Any, Final

from gristmill_contracts import labels, limits
from gristmill_operator.children import paths
from gristmill_operator.children.options import ChildOptions
from gristmill_operator.children.seating import Seating, pod_name
from gristmill_operator.children.security import container_security
from gristmill_operator.children.shared_claims import shared_mounts
from gristmill_operator.children.weights import VOLUME, WeightsMount

Container = dict[str, Any]  # Any: fields of a container
METER: Final = "meter"
WORKER: Final = "worker"
SHUTDOWN_S: Final = limits.WORKER_GRACE_S - 10
"""The worker's own deadline, within its part of the pod's grace."""
METER_DRAIN_S: Final = limits.POD_GRACE_S - limits.WORKER_GRACE_S - 5
EVERY_ADDRESS: Final = "0.0.0.0"  # noqa: S104 - the pod's address; network policies say who reaches it


def meter(seating: Seating) -> Container:
    """A native sidecar: up before the worker starts, down after it ended, started again if it dies."""
    options = seating.options
    return {
        "name": METER,
        "image": seating.meter_image,
        "imagePullPolicy": options.images.pull_policy,
        "command": ["python", "-m", "gristmill_meter"],
        "restartPolicy": "Always",
        "env": environment(options, meter_settings(options)),
        "ports": [{"name": METER, "containerPort": labels.METER_PORT, "protocol": "TCP"}],
        # The worker starts once this answers. A meter that never does is seen by the operator.
        "startupProbe": {
            "httpGet": {"path": "/healthz", "port": METER},
            "periodSeconds": 1,
            "timeoutSeconds": 1,
            "failureThreshold": int(limits.METER_START_S),
        },
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": METER},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        "resources": meter_resources(options),
        "securityContext": container_security(paths.METER_UID),
        "volumeMounts": [
            *log_mounts(),
            {"name": "run", "mountPath": paths.RUN},
            {"name": "meter-tmp", "mountPath": paths.TMP},
        ],
    }


def meter_settings(options: ChildOptions) -> dict[str, str]:
    """Also those of a drain Job. An image of an earlier release must know all of them: sessions keep theirs."""
    return {
        "GRISTMILL_METER_HOST": EVERY_ADDRESS,
        "GRISTMILL_METER_PORT": str(labels.METER_PORT),
        "GRISTMILL_METER_DATA_DIR": paths.METER_STATE,
        "GRISTMILL_METER_ASSIGNMENTS_DIR": paths.ASSIGNMENTS,
        "GRISTMILL_METER_WORKER_SOCKET": paths.SOCKET,
        "GRISTMILL_METER_WORKER_STATE_DIR": paths.WORKER_STATE,
        "GRISTMILL_METER_ARTIFACTS_DIR": paths.ARTIFACTS,
        "GRISTMILL_METER_LEDGER_URL": options.ledger_url,
        "GRISTMILL_METER_PRODUCER_SECRET_FILE": paths.PRODUCER_SECRET,
        # The pod is ready when its session takes operations, not before.
        "GRISTMILL_METER_READY_WHEN": "serving",
        "GRISTMILL_METER_DRAIN_S": str(METER_DRAIN_S),
        "GRISTMILL_METER_LOG_LEVEL": options.meter.log_level,
    }


def meter_resources(options: ChildOptions) -> dict[str, Any]:  # Any: quantities by name
    """No limit on the CPU: a throttled meter would slow every operation down."""
    return {
        "requests": {"cpu": options.meter.cpu, "memory": options.meter.memory},
        "limits": {"memory": options.meter.memory},
    }


def log_mounts() -> list[dict[str, Any]]:  # Any: fields of a mount
    """What reads or writes the operation log. The worker never sees it: it cannot edit its own bill."""
    return [
        {"name": "state", "mountPath": paths.METER_STATE, "subPath": "meter"},
        {"name": "state", "mountPath": paths.ARTIFACTS, "subPath": "artifacts"},
        {"name": "assignment", "mountPath": paths.ASSIGNMENTS, "readOnly": True},
        {"name": "producer", "mountPath": paths.PRODUCER, "readOnly": True},
    ]


def worker(seating: Seating, rank: int, mount: WeightsMount) -> Container:
    """The engine of one rank. It has no key, no token, and no way out but the meter."""
    options, profile = seating.options, seating.profile
    amounts = {"cpu": profile.resources.cpu, "memory": profile.resources.memory}
    if profile.device is not None:
        amounts[profile.device.resource_name] = str(profile.device.count)
    resources: dict[str, Any] = {"requests": amounts, "limits": dict(amounts)}  # Any: see above
    if profile.dra is not None:
        resources["claims"] = [{"name": "devices"}]
    container: Container = {
        "name": WORKER,
        "image": seating.worker_image,
        "imagePullPolicy": options.images.pull_policy,
        "command": worker_command(seating, rank),
        "env": environment(options, worker_settings(seating, rank)),
        "resources": resources,
        "securityContext": container_security(paths.WORKER_UID),
        "volumeMounts": [*_state_mounts(rank), *_worker_mounts(seating, mount)],
    }
    if rank > 0:
        # Rank 0 is ready when its meter is, which asks it over the socket; the others have no meter.
        container["readinessProbe"] = {
            "exec": {"command": ["test", "-f", paths.READY_FILE]},
            "periodSeconds": 2,
            "failureThreshold": 3,
        }
    return container


def worker_command(seating: Seating, rank: int) -> list[str]:
    """Several ranks are started by torchrun, one process in each pod. It never starts one again itself:
    collectives do not heal, and the attempt is replaced as a whole.
    """
    if seating.workers == 1:
        return ["python", "-m", "gristmill_worker"]
    leader = pod_name(seating.name, seating.attempt, 0)
    return [
        *("python", "-m", "torch.distributed.run"),
        *("--nnodes", str(seating.workers), "--node-rank", str(rank)),
        *("--nproc-per-node", "1", "--max-restarts", "0"),
        *("--master-addr", f"{leader}.{seating.name}"),
        *("--master-port", str(seating.profile.port)),
        *("-m", "gristmill_worker"),
    ]


def worker_settings(seating: Seating, rank: int) -> dict[str, str]:
    model = seating.model.metadata.name
    settings = {
        "GRISTMILL_WORKER_SOCKET": paths.SOCKET,
        "GRISTMILL_WORKER_SOCKET_MODE": paths.SOCKET_MODE,
        "GRISTMILL_WORKER_MODEL_DIR": paths.model_dir(model),
        "GRISTMILL_WORKER_MODEL_NAME": model,
        "GRISTMILL_WORKER_ARTIFACTS_DIR": paths.ARTIFACTS,
        "GRISTMILL_WORKER_DTYPE": seating.model.spec.dtype,
        "GRISTMILL_WORKER_SHUTDOWN_S": str(SHUTDOWN_S),
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": paths.KERNELS,
    }
    return settings if rank == 0 else settings | {"GRISTMILL_WORKER_READY_FILE": paths.READY_FILE}


def _state_mounts(rank: int) -> list[dict[str, Any]]:  # Any: fields of a mount
    """The volume belongs to rank 0, which is one writer; what the others write goes with their pod."""
    if rank > 0:
        return [{"name": "scratch", "mountPath": paths.STATE}]
    return [
        {"name": "state", "mountPath": paths.WORKER_STATE, "subPath": "worker"},
        {"name": "state", "mountPath": paths.ARTIFACTS, "subPath": "artifacts"},
    ]


def _worker_mounts(
    seating: Seating, mount: WeightsMount
) -> list[dict[str, Any]]:  # Any: fields of a mount
    weights: dict[str, Any] = {  # Any: fields of a mount
        "name": VOLUME,
        "mountPath": paths.model_dir(seating.model.metadata.name),
        "readOnly": True,
    }
    if mount.sub_path:
        weights["subPath"] = mount.sub_path
    return [
        weights,
        {"name": "run", "mountPath": paths.RUN},
        {"name": "shm", "mountPath": paths.SHM},
        {"name": "tmp", "mountPath": paths.TMP},
        *shared_mounts(seating.options),
    ]


def environment(options: ChildOptions, settings: dict[str, str]) -> list[dict[str, str]]:
    """The root file system is read-only: what wants a home finds it in /tmp."""
    fixed = {"HOME": paths.TMP, "TMPDIR": paths.TMP, **dict(options.extra_environment)}
    return [{"name": name, "value": value} for name, value in (fixed | settings).items()]
