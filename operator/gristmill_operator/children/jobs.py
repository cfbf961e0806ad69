"""The drain Job: it ships the log of a volume whose pod is gone."""

from typing import Any, Final

from gristmill_contracts import labels, limits
from gristmill_operator.children import containers, paths
from gristmill_operator.children.manifest import (
    COMPONENT,
    DRAIN,
    Manifest,
    owner,
    session_labels,
)
from gristmill_operator.children.options import ChildOptions
from gristmill_operator.children.pods import placement, rank_0_volumes
from gristmill_operator.children.seating import (
    Seating,
    drain_job_name,
)
from gristmill_operator.children.security import container_security, pod_security

DRAIN_TRIES: Final = 3
FINAL_CODES: Final = [4, 6]
"""Ends of a drain that another try does not change: the log is damaged, or a newer attempt owns it."""
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
                **job_pod(options, labels.WORKER_ACCOUNT),
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


def job_pod(options: ChildOptions, account: str) -> dict[str, Any]:  # Any: fields of a pod's spec
    spec: dict[str, Any] = {  # Any: see above
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": account,
    }
    if options.images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": each} for each in options.images.pull_secrets]
    return spec
