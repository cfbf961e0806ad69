"""Volumes that wait to be claimed: at the control level nobody provisions them."""

import json
from typing import Any

from gristmill_testing.cluster import Cluster

CLASS = "waiting"


def make_volumes(
    cluster: Cluster,
    count: int,
    prefix: str = "waiting",
    mode: str = "Immediate",
    size: str = "1Gi",
) -> None:
    """`count` volumes of the size, of the default storage class, which this makes.

    mode: WaitForFirstConsumer = bound when a pod that uses the claim is scheduled.
    """
    made = [_storage_class(mode), *(_volume(f"{prefix}-{number}", size) for number in range(count))]
    cluster.apply("\n---\n".join(json.dumps(each) for each in made), timeout=300)


def _storage_class(mode: str) -> dict[str, Any]:  # Any: JSON
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": mode,
    }


def _volume(name: str, size: str) -> dict[str, Any]:  # Any: JSON
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": CLASS,
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": f"/var/tmp/{name}"},
        },
    }
