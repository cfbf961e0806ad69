"""What of an object is kept in memory: what somebody reads, with equal texts shared. Pure."""

import sys
from collections.abc import Callable
from typing import Any, Final

from gristmill_operator.kinds import NODES, PODS, SERVICES, Kind
from gristmill_operator.seams import Json

METADATA_DROPPED: Final = frozenset({"managedFields", "selfLink", "generateName"})
ANNOTATIONS_DROPPED: Final = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})
POD_SPEC_KEPT: Final = frozenset({"nodeName", "schedulingGates"})
POD_STATUS_DROPPED: Final = frozenset({"podIPs", "hostIPs", "qosClass", "resourceClaimStatuses"})
CONTAINER_KEPT: Final = frozenset(
    {"name", "ready", "started", "restartCount", "state", "lastState", "imageID"}
)
CONTAINERS: Final = frozenset({"containerStatuses", "initContainerStatuses"})
TEXT_SHARED_CHARS_MAX: Final = 64


def trim(kind: Kind, body: Json) -> Json:
    """A copy of `body` without what is never read. apiVersion and kind are left out."""
    kept = {name: value for name, value in body.items() if name not in ("apiVersion", "kind")}
    kept["metadata"] = _metadata(body["metadata"])
    special = _BY_KIND.get(kind)
    return _shared(special(kept) if special else kept)  # type: ignore[no-any-return]


def _metadata(metadata: Json) -> Json:
    kept = {name: value for name, value in metadata.items() if name not in METADATA_DROPPED}
    if "annotations" in kept:
        kept["annotations"] = {
            name: value
            for name, value in kept["annotations"].items()
            if name not in ANNOTATIONS_DROPPED
        }
    return kept


def _pod(body: Json) -> Json:
    spec, status = body.get("spec") or {}, body.get("status") or {}
    kept = {name: value for name, value in status.items() if name not in POD_STATUS_DROPPED}
    for name in CONTAINERS & kept.keys():
        kept[name] = [_only(each, CONTAINER_KEPT) for each in kept[name] or ()]
    return {"metadata": body["metadata"], "spec": _only(spec, POD_SPEC_KEPT), "status": kept}


def _service(body: Json) -> Json:
    return {"metadata": body["metadata"], "spec": body.get("spec") or {}}


def _node(body: Json) -> Json:
    spec, status = body.get("spec") or {}, body.get("status") or {}
    ready = [each for each in status.get("conditions") or () if each["type"] == "Ready"]
    return {
        "metadata": _only(body["metadata"], _NODE_METADATA_KEPT),
        "spec": _only(spec, frozenset({"taints", "unschedulable", "podCIDR", "podCIDRs"})),
        # The kubelet reports every few minutes that nothing has changed.
        "status": {
            "allocatable": status.get("allocatable") or {},
            "addresses": status.get("addresses") or [],
            "conditions": [_without(each, "lastHeartbeatTime") for each in ready],
        },
    }


_NODE_METADATA_KEPT: Final = frozenset(
    {"name", "uid", "resourceVersion", "labels", "deletionTimestamp", "creationTimestamp"}
)


def _only(body: Json, names: frozenset[str]) -> Json:
    return {name: value for name, value in body.items() if name in names}


def _without(body: Json, left_out: str) -> Json:
    return {name: value for name, value in body.items() if name != left_out}


def _shared(value: Any) -> Any:  # Any: JSON
    """A copy in which equal keys and short texts are one object: most of them repeat in every pod."""
    if isinstance(value, dict):
        return {sys.intern(name): _shared(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shared(each) for each in value]
    if isinstance(value, str) and len(value) <= TEXT_SHARED_CHARS_MAX:
        return sys.intern(value)
    return value


_BY_KIND: Final[dict[Kind, Callable[[Json], Json]]] = {
    PODS: _pod,
    SERVICES: _service,
    NODES: _node,
}
