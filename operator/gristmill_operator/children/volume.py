"""The session's volume: operation log, snapshots, and checkpoints on their way."""

from typing import Any

from gristmill_contracts import labels
from gristmill_operator.children.manifest import Manifest, owner, session_labels
from gristmill_operator.children.seating import Seating, state_claim_name


def state_claim(seating: Seating, *, unflushed: bool = False) -> Manifest:
    """unflushed: the volume holds usage that nobody has, so that it must outlive everybody."""
    session, storage = seating.session, seating.options.storage
    spec: dict[str, Any] = {  # Any: fields of a claim
        "accessModes": [storage.access_mode],
        "resources": {"requests": {"storage": session.spec.storage.size}},
    }
    class_name = session.spec.storage.storage_class_name or storage.class_name
    if class_name:
        spec["storageClassName"] = class_name
    meta: dict[str, Any] = {  # Any: fields of metadata
        "name": state_claim_name(seating.name),
        "namespace": seating.namespace,
        "labels": session_labels(session) | ({labels.UNFLUSHED: "true"} if unflushed else {}),
    }
    if session.spec.storage.retain == "Delete" and not unflushed:
        meta["ownerReferences"] = owner(session)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": meta,
        "spec": spec,
    }
