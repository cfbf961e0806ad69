"""Base models on the test cluster's node: weights and the Python packages that the worker's image lacks.

The image holds no torch: it would take minutes to import. One read-only volume holds the prepared weights
and, as hard links, this machine's packages; `sessions.environment` of the chart puts them in the path.
"""

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gristmill_testing.cluster import NODE, Cluster

PACKAGES: Final = "site"
SIZE: Final = {"storage": "20Gi"}


def environment(model: str) -> dict[str, str]:
    """What `sessions.environment` must hold for the worker of this model to find torch."""
    return {"PYTHONPATH": f"/models/{model}/{PACKAGES}"}


def place_model(cluster: Cluster, model: str, build: Callable[[Path], Any]) -> Path:
    """A folder on the node with the prepared model that `build` writes, and the packages."""
    folder = cluster.folder / "models" / model
    if not folder.exists():
        new = folder.with_name(f"{model}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        build(new)
        for path in new.rglob("*"):
            path.chmod(
                0o755 if path.is_dir() else 0o644
            )  # safetensors writes 0600, and root writes here
        site = Path(sysconfig.get_path("purelib"))
        shutil.copytree(site, new / PACKAGES, copy_function=os.link, symlinks=True)
        for path in (new.parent, new):
            path.chmod(0o755)
        new.rename(folder)
    return folder


def share_model(cluster: Cluster, namespace: str, folder: Path) -> str:
    """A read-only claim over the folder in a tenant's namespace; returns its name."""
    claim = f"weights-{folder.name}"
    on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{claim}-{namespace}"},
            "spec": {
                "capacity": SIZE,
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": namespace, "name": claim},
                "local": {"path": str(folder)},
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
                "volumeName": f"{claim}-{namespace}",
                "resources": {"requests": SIZE},
            },
        },
    )
    return claim


def base_model(cluster: Cluster, model: str, claim: str, **spec: Any) -> dict[str, Any]:
    """The BaseModel that runs it on one processor."""
    return {
        "apiVersion": "gristmill.dev/v1alpha1",
        "kind": "BaseModel",
        "metadata": {"name": model},
        "spec": {
            "image": cluster.image("worker"),
            "weights": {"pvc": {"claimName": claim}},
            "huggingFaceId": f"/models/{model}",
            "architecture": "LlamaForCausalLM",
            "dtype": "float32",
            "profiles": [{"name": "default", "resources": {"cpu": "1", "memory": "2Gi"}}],
            **spec,
        },
    }
