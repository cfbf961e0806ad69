"""Jobs: one ships the log of a volume whose pod is gone, one fills a volume with a model's weights."""

from typing import Any, Final

from gristmill_contracts import labels, limits
from gristmill_contracts.base_model import BaseModelResource, HubWeights, Resources
from gristmill_contracts.tenant import Tenant
from gristmill_operator.children import containers, paths
from gristmill_operator.children.manifest import (
    COMPONENT,
    DRAIN,
    FETCH,
    Manifest,
    owner,
    session_labels,
    tenant_labels,
)
from gristmill_operator.children.namespace import namespace_name
from gristmill_operator.children.options import ChildOptions
from gristmill_operator.children.pods import placement, rank_0_volumes
from gristmill_operator.children.seating import (
    Seating,
    drain_job_name,
    fetch_job_name,
    weights_claim_name,
)
from gristmill_operator.children.security import container_security, pod_security
from gristmill_operator.children.weights import PREPARED

MODEL: Final = "gristmill.dev/model"
"""Label of what serves one base model in a tenant's namespace."""
TOKEN_ENTRY: Final = "token"  # noqa: S105 - the name of an entry
DRAIN_TRIES: Final = 3
FINAL_CODES: Final = [4, 6]
"""Ends of a drain that another try does not change: the log is damaged, or a newer attempt owns it."""
FETCH_TRIES: Final = 5
FETCH_S: Final = 4 * 3600
KEPT_S: Final = 600
"""How long a finished Job stays to be read."""
Job = dict[str, Any]  # Any: fields of a Job's spec


def drain_job(seating: Seating) -> Manifest:
    """The meter's own command over the session's volume; it reports by heartbeat, as a live meter does."""
    session, options = seating.session, seating.options
    marks = {
        **session_labels(session),
        COMPONENT: DRAIN,
        labels.ATTEMPT: str(seating.attempt),
        # Network policies let rank 0 alone reach the ledger.
        labels.RANK: "0",
    }
    container = {
        "name": "drain",
        "image": seating.meter_image,
        "imagePullPolicy": options.images.pull_policy,
        "command": ["python", "-m", "gristmill_meter", "drain"],
        "env": containers.environment(options, containers.meter_settings(options)),
        "resources": containers.meter_resources(options),
        "securityContext": container_security(paths.METER_UID),
        "volumeMounts": [*containers.log_mounts(), {"name": "meter-tmp", "mountPath": paths.TMP}],
    }
    volumes = [*rank_0_volumes(seating), {"name": "meter-tmp", "emptyDir": {"sizeLimit": "64Mi"}}]
    spec: Job = {
        "backoffLimit": DRAIN_TRIES,
        "activeDeadlineSeconds": int(limits.FLUSH_ABANDON_S),
        "ttlSecondsAfterFinished": KEPT_S,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "drain",
                        "operator": "In",
                        "values": FINAL_CODES,
                    },
                }
            ]
        },
        "template": {
            "metadata": {"labels": marks},
            "spec": {
                **_pod(options, labels.WORKER_ACCOUNT),
                # The volume may lie on a node that only the session's own pods tolerate.
                **placement(seating),
                "securityContext": pod_security(),
                "containers": [container],
                "volumes": volumes,
            },
        },
    }
    meta = {
        "name": drain_job_name(seating.name, seating.attempt),
        "namespace": seating.namespace,
        "labels": marks,
        "ownerReferences": owner(session),
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}


def weights_claim(tenant: Tenant, model: BaseModelResource, options: ChildOptions) -> Manifest:
    """One for each tenant and model: a claim cannot be shared between namespaces."""
    storage = options.storage
    spec: dict[str, Any] = {  # Any: fields of a claim
        "accessModes": [storage.weights_access_mode],
        "resources": {"requests": {"storage": storage.weights_size}},
    }
    class_name = storage.weights_class_name or storage.class_name
    if class_name:
        spec["storageClassName"] = class_name
    meta = {
        "name": weights_claim_name(model.metadata.name),
        "namespace": namespace_name(tenant),
        "labels": _model_labels(tenant, model),
    }
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": meta,
        "spec": spec,
    }


def fetch_job(
    tenant: Tenant, model: BaseModelResource, hub: HubWeights, options: ChildOptions
) -> Manifest:
    """It alone reaches the hub and it alone has the hub's token; what it wrote is read-only for all others."""
    name, spec = model.metadata.name, model.spec
    marks = {**_model_labels(tenant, model), COMPONENT: FETCH}
    settings = {"HF_HOME": f"{paths.MODELS}/.cache"}
    environment: list[dict[str, Any]] = [*containers.environment(options, settings)]  # Any: sources
    if hub.token_secret:
        source = {"secretKeyRef": {"name": fetch_job_name(name), "key": TOKEN_ENTRY}}
        environment.append({"name": "HF_TOKEN", "valueFrom": source})
    container = {
        "name": "fetch",
        "image": spec.image,
        "imagePullPolicy": options.images.pull_policy,
        "command": fetch_command(model, hub),
        "env": environment,
        "resources": _fetch_resources(model),
        "securityContext": container_security(paths.WORKER_UID),
        "volumeMounts": [
            {"name": "weights", "mountPath": paths.MODELS},
            {"name": "tmp", "mountPath": paths.TMP},
        ],
    }
    claim = {"claimName": weights_claim_name(name)}
    job: Job = {
        "backoffLimit": FETCH_TRIES,
        "activeDeadlineSeconds": FETCH_S,
        "template": {
            "metadata": {"labels": marks},
            "spec": {
                **_pod(options, labels.WORKER_ACCOUNT),
                "securityContext": pod_security(),
                "containers": [container],
                "volumes": [
                    {"name": "weights", "persistentVolumeClaim": claim},
                    {"name": "tmp", "emptyDir": {"sizeLimit": options.tmp_size}},
                ],
            },
        },
    }
    meta = {"name": fetch_job_name(name), "namespace": namespace_name(tenant), "labels": marks}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": job}


def fetch_command(model: BaseModelResource, hub: HubWeights) -> list[str]:
    """Prepares the folder whole or not at all; done before, it ends at once."""
    revision = [] if hub.revision == "main" else ["--revision", hub.revision]
    return [
        *("python", "-m", "gristmill_worker.prepare", hub.repository),
        f"{paths.MODELS}/{PREPARED}",
        *("--name", model.metadata.name, "--dtype", model.spec.dtype),
        *revision,
    ]


def _fetch_resources(model: BaseModelResource) -> dict[str, dict[str, str]]:
    """Preparing loads the model once, into as much memory as serving it takes."""
    wanted = model.spec.profiles[0].resources if model.spec.profiles else Resources()
    return {
        "requests": {"cpu": wanted.cpu, "memory": wanted.memory},
        "limits": {"memory": wanted.memory},
    }


def _model_labels(tenant: Tenant, model: BaseModelResource) -> dict[str, str]:
    return {**tenant_labels(tenant.metadata.name), MODEL: model.metadata.name}


def _pod(options: ChildOptions, account: str) -> dict[str, Any]:  # Any: fields of a pod's spec
    spec: dict[str, Any] = {  # Any: see above
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": account,
    }
    if options.images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": each} for each in options.images.pull_secrets]
    return spec
