"""Weights from the hub: one volume for each tenant and model, filled once by a Job. Pure."""

from dataclasses import dataclass
from typing import Any, Final

from gristmill_contracts import labels
from gristmill_contracts.base_model import BaseModelResource, HubWeights, Resources
from gristmill_contracts.tenant import Tenant
from gristmill_operator.children import containers, paths
from gristmill_operator.children.jobs import job_pod
from gristmill_operator.children.manifest import COMPONENT, FETCH, Manifest, tenant_labels
from gristmill_operator.children.namespace import namespace_name
from gristmill_operator.children.options import ChildOptions
from gristmill_operator.children.seating import fetch_job_name, weights_claim_name
from gristmill_operator.children.security import container_security, pod_security
from gristmill_operator.children.shared_claims import shared_mounts, shared_volumes
from gristmill_operator.children.weights import fetched_folder

MODEL: Final = "gristmill.dev/model"
"""Label of what serves one base model in a tenant's namespace."""
FILLED: Final = "gristmill.dev/filled"
"""Annotation of a volume: the folder that holds weights, whole."""
TOKEN_ENTRY: Final = "token"  # noqa: S105 - the name of an entry
FETCH_TRIES: Final = 5
FETCH_S: Final = 4 * 3600
Job = dict[str, Any]  # Any: fields of a Job's spec


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchState:
    filled: bool = False
    job_succeeded: bool = False
    job_failed: bool = False
    waits_for: str = ""
    """For people; "" = the weights are there."""


def fetch_state(
    model: BaseModelResource, claim: Manifest | None, job: Manifest | None
) -> FetchState:
    """How far the weights of one tenant are."""
    name = model.metadata.name
    marks = {} if claim is None else claim["metadata"].get("annotations") or {}
    if marks.get(FILLED) == fetched_folder(model):
        return FetchState(filled=True)
    if job is None:
        return FetchState(waits_for=f"the weights of {name!r} are about to be fetched")
    found = {
        each["type"]: each
        for each in (job.get("status") or {}).get("conditions") or ()
        if each["status"] == "True"
    }
    where = f"Job {job['metadata']['namespace']}/{job['metadata']['name']}"
    if "Complete" in found:
        return FetchState(job_succeeded=True, waits_for=f"{where} has fetched the weights")
    if "Failed" in found:
        why = found["Failed"].get("message") or found["Failed"].get("reason") or "no reason given"
        return FetchState(
            job_failed=True,
            waits_for=f"{where} could not fetch the weights: {why}. Its pod's log says more; delete the "
            "Job to try again",
        )
    return FetchState(waits_for=f"{where} fetches the weights")


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
            *shared_mounts(options),
        ],
    }
    claim = {"claimName": weights_claim_name(name)}
    job: Job = {
        "backoffLimit": FETCH_TRIES,
        "activeDeadlineSeconds": FETCH_S,
        "template": {
            "metadata": {"labels": marks},
            "spec": {
                **job_pod(options, labels.WORKER_ACCOUNT),
                "securityContext": pod_security(),
                "containers": [container],
                "volumes": [
                    {"name": "weights", "persistentVolumeClaim": claim},
                    {"name": "tmp", "emptyDir": {"sizeLimit": options.tmp_size}},
                    *shared_volumes(options),
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
        f"{paths.MODELS}/{fetched_folder(model)}",
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


def fetch_token(tenant: Tenant, model: BaseModelResource, token: str) -> Manifest:
    """The hub's token for the Job alone, for as long as it runs. `token` is base64."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": fetch_job_name(model.metadata.name),
            "namespace": namespace_name(tenant),
            "labels": _model_labels(tenant, model),
        },
        "type": "Opaque",
        "data": {TOKEN_ENTRY: token},
    }
