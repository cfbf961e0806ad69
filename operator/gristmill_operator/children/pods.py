"""The pods of a session: one for each rank of an attempt, never started again but replaced as a whole."""

from dataclasses import replace
from typing import Any, Final

from gristmill_contracts import labels, limits
from gristmill_contracts.base_model import Toleration
from gristmill_contracts.session import TrainingSession
from gristmill_operator.children import containers
from gristmill_operator.children.manifest import (
    COMPONENT,
    WORKER,
    Manifest,
    hash_of,
    owner,
    session_labels,
)
from gristmill_operator.children.paths import PRODUCER_SECRET
from gristmill_operator.children.seating import (
    Seating,
    attempt_secret_name,
    device_claims_name,
    pod_name,
    state_claim_name,
)
from gristmill_operator.children.secret import PRODUCER_ENTRY, assignment_entry
from gristmill_operator.children.security import pod_security
from gristmill_operator.children.shared_claims import shared_volumes
from gristmill_operator.children.weights import WeightsMount

Volume = dict[str, Any]  # Any: fields of a volume
SECRET_MODE: Final = 0o440
RUN_SIZE: Final = "16Mi"
METER_TMP_SIZE: Final = "64Mi"


def worker_pod(seating: Seating, rank: int, mount: WeightsMount) -> Manifest:
    """The pod of one rank. Rank 0 has the meter and the session's volume."""
    session = seating.session
    name = pod_name(seating.name, seating.attempt, rank)
    template = pod_spec(seating, rank, mount)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": seating.namespace,
            "labels": {
                **session_labels(session),
                COMPONENT: WORKER,
                labels.ATTEMPT: str(seating.attempt),
                labels.RANK: str(rank),
                labels.TEMPLATE_HASH: template_hash(seating, mount),
            },
            "annotations": _annotations(session),
            "ownerReferences": owner(session),
        },
        "spec": {"hostname": name, "subdomain": seating.name, **template},
    }


def _annotations(session: TrainingSession) -> dict[str, str]:
    """With the value of the session's restart, by which one sees that these pods obeyed it."""
    marks = {"kubectl.kubernetes.io/default-container": containers.WORKER}
    restart = session.metadata.annotations.get(labels.RESTART)
    return marks if restart is None else {**marks, labels.RESTART: restart}


def template_hash(seating: Seating, mount: WeightsMount) -> str:
    """Of rank 0's pod, whatever the attempt. It tells what a pod was made from; nothing is made anew for it."""
    return hash_of(pod_spec(replace(seating, attempt=0), 0, mount))


def pod_spec(seating: Seating, rank: int, mount: WeightsMount) -> dict[str, Any]:  # Any: its fields
    options, session = seating.options, seating.session
    spec: dict[str, Any] = {  # Any: fields of a pod's spec
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": limits.POD_GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": session.spec.service_account_name or labels.WORKER_ACCOUNT,
        "securityContext": pod_security(),
        "containers": [containers.worker(seating, rank, mount)],
        "volumes": _volumes(seating, rank, mount),
    }
    if rank == 0:
        spec["initContainers"] = [containers.meter(seating)]
    if options.images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": each} for each in options.images.pull_secrets]
    if seating.profile.dra is not None:
        name = device_claims_name(seating.name)
        spec["resourceClaims"] = [{"name": "devices", "resourceClaimTemplateName": name}]
    if seating.profile.node_selector:
        spec["nodeSelector"] = dict(seating.profile.node_selector)
    return spec | placement(seating)


def placement(seating: Seating) -> dict[str, Any]:  # Any: fields of a pod's spec
    """What it may run beside, before whom, in what sandbox. Only what is set: an empty name is not a name."""
    tenant, profile = seating.tenant.spec, seating.profile
    chosen: dict[str, Any] = {  # Any: see above
        "tolerations": [_toleration(each) for each in profile.tolerations],
        "runtimeClassName": tenant.runtime_class_name,
        "priorityClassName": seating.session.spec.priority_class_name or tenant.priority_class_name,
    }
    return {field: value for field, value in chosen.items() if value}


def _toleration(toleration: Toleration) -> dict[str, Any]:  # Any: text and one number
    fields = toleration.model_dump(by_alias=True, exclude_none=True)
    return {name: value for name, value in fields.items() if value != ""}


def _volumes(seating: Seating, rank: int, mount: WeightsMount) -> list[Volume]:
    return [
        *(
            rank_0_volumes(seating)
            if rank == 0
            else [_folder("scratch", seating.session.spec.storage.size)]
        ),
        mount.volume,
        _memory("run", RUN_SIZE),
        _memory("shm", seating.profile.shm_size),
        _folder("tmp", seating.options.tmp_size),
        *([_folder("meter-tmp", METER_TMP_SIZE)] if rank == 0 else []),
        *shared_volumes(seating.options),
    ]


def rank_0_volumes(seating: Seating) -> list[Volume]:
    """The session's own volume, and what its meter is told. Also those of a drain Job."""
    claim = {"claimName": state_claim_name(seating.name)}
    secret = attempt_secret_name(seating.name, seating.attempt)
    entry = assignment_entry(seating.uid)
    return [
        {"name": "state", "persistentVolumeClaim": claim},
        _entry("assignment", secret, entry, entry),
        _entry("producer", secret, PRODUCER_ENTRY, PRODUCER_SECRET.rsplit("/", 1)[-1]),
    ]


def _entry(volume: str, secret: str, key: str, path: str) -> Volume:
    return {
        "name": volume,
        "secret": {
            "secretName": secret,
            "defaultMode": SECRET_MODE,
            "items": [{"key": key, "path": path}],
        },
    }


def _memory(name: str, size: str) -> Volume:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}}


def _folder(name: str, size: str) -> Volume:
    return {"name": name, "emptyDir": {"sizeLimit": size}}
