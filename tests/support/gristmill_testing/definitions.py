"""Our resource definitions in the test cluster, and a valid object of each kind to change."""

import copy
import uuid
from collections.abc import Mapping
from typing import Any, Final

from gristmill_testing.api_server import CRDS, Json
from gristmill_testing.cluster import Cluster

API: Final = "gristmill.dev/v1alpha1"
LEFT_OUT: Final = object()
"""In changes: the field is removed."""

DIGEST: Final = "registry.test/gristmill-worker@sha256:" + "a" * 64
METERS: Final = ("prefill", "cached_prefill", "sample", "train")


def install_definitions(cluster: Cluster) -> list[str]:
    """Install what is missing; the names of what was not there before."""
    files = sorted(CRDS.glob("*.yaml"))
    names = [f"{file.stem}.gristmill.dev" for file in files]
    missing = [name for name in names if cluster.find("crd", name) is None]
    cluster.apply(*files)
    for name in names:
        cluster.wait_condition("crd", name, "Established")
    return missing


def prices(model: str, *meters: str) -> list[Json]:
    return [{"model": model, "meter": each, "price": "1.5"} for each in meters or METERS]


SPECS: Final[Mapping[str, Json]] = {
    "TrainingSession": {"baseModelRef": {"name": "tiny"}, "lora": {}},
    "Tenant": {},
    "BaseModel": {"image": DIGEST, "weights": {"path": "/models/tiny"}, "architecture": "Llama"},
    "RateCard": {
        "currency": "USD",
        "prices": prices("*"),
        "effectiveFrom": "2026-01-01T00:00:00Z",
    },
}


def an_object(kind: str, namespace: str = "", changes: Mapping[str, object] | None = None) -> Json:
    """A valid object with a name of its own, and `changes` by path: {"spec.lora.rank": 8}."""
    meta = {"name": f"t-{uuid.uuid4().hex[:10]}"}
    if kind == "TrainingSession":
        meta["namespace"] = namespace
    thing = {
        "apiVersion": API,
        "kind": kind,
        "metadata": meta,
        "spec": copy.deepcopy(SPECS[kind]),
    }
    return changed(thing, changes or {})


def changed(thing: Json, changes: Mapping[str, object]) -> Json:
    """A copy with the values at the paths; LEFT_OUT removes."""
    copied: Json = copy.deepcopy(thing)
    for path, value in changes.items():
        *parents, last = path.split(".")
        at: Any = copied
        for name in parents:
            at = at.setdefault(name, {})
        if value is LEFT_OUT:
            at.pop(last, None)
        else:
            at[last] = copy.deepcopy(value)
    return copied
