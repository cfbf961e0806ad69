"""Pods and volumes for tests on the node, allowed by Pod Security `restricted`."""

from __future__ import annotations

import json
from typing import Any

from gristmill_testing.cluster import NODE, Cluster, Json, eventually

PYTHON_IMAGE = "gristmill.test/python:1"
USER, GROUP = 10001, 10000
TRY_TO_CONNECT = """
import json, socket, sys
found = {}
for host, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((host, port), 1.0).close()
        found[f"{host}:{port}"] = "open"
    except ConnectionRefusedError:
        found[f"{host}:{port}"] = "refused"
    except TimeoutError:
        found[f"{host}:{port}"] = "dropped"
    except OSError as error:
        found[f"{host}:{port}"] = str(error)
print(json.dumps(found))
"""


def pod(name: str, *args: str, image: str = PYTHON_IMAGE, user: int = USER, labels: Json | None = None,
        container: Json | None = None, **spec: Any) -> Json:  # fmt: skip
    """A pod of one container that ends at once when it is deleted; `container` and `spec` add to it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": GROUP,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [hardened("c", *args, image=image, **(container or {}))],
            **spec,
        },
    }


def hardened(name: str, *args: str, image: str = PYTHON_IMAGE, **more: Any) -> Json:
    """A container that `restricted` admits, with a read-only root."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        **({"args": list(args)} if args else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        **more,
    }


def restrict(cluster: Cluster, namespace: str) -> None:
    """Let the namespace refuse every pod that is not `restricted`."""
    label = "pod-security.kubernetes.io/enforce=restricted"
    cluster.kubectl("label", "namespace", namespace, label, "--overwrite")


def share_packages(cluster: Cluster, namespace: str, claim: str = "site-packages") -> None:
    """A read-only claim over this machine's Python packages, torch and transformers among them.

    A worker mounts it readOnly at /site with PYTHONPATH=/site; a pod that does may set no fsGroup for it.
    """
    volume = f"{claim}-{namespace}"
    size = {"storage": "10Gi"}
    on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": namespace, "name": claim},
                "local": {"path": str(cluster.folder / "site-packages")},
                "nodeAffinity": {
                    "required": {"nodeSelectorTerms": [{"matchExpressions": [on_node]}]}
                },
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": size},
            },
        },
    )


def connections(
    cluster: Cluster, namespace: str, name: str, *targets: tuple[str, int]
) -> dict[str, str]:
    """What a pod meets at each host and port: `open`, `refused`, `dropped` (a policy), or another error."""
    output = cluster.pod_exec(namespace, name, "python3", "-c", TRY_TO_CONNECT, json.dumps(targets))
    found: dict[str, str] = json.loads(output)
    return found


def ended(cluster: Cluster, namespace: str, name: str, seconds: float = 60) -> str:
    """The log of a pod that has ended well; AssertionError with its log if it has not."""

    def phase() -> str | None:
        now = cluster.get("pod", name, namespace)["status"]["phase"]
        return now if now in ("Succeeded", "Failed") else None

    eventually(f"pod {name} has ended", phase, seconds)
    log = cluster.kubectl("logs", f"-n{namespace}", name, "--all-containers")
    assert phase() == "Succeeded", log
    return log
