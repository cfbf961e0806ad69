"""The session's volume: operation log, snapshots, and checkpoints on their way."""

from typing import Any, Final

from gristmill_contracts import labels
from gristmill_operator.children.manifest import Manifest, owner, session_labels
from gristmill_operator.children.seating import Seating, state_claim_name

KEPT_UNTIL: Final = "gristmill.dev/kept-until"
"""Annotation of a volume whose session is gone: it holds prompts, and is removed at this time."""


def state_claim(seating: Seating, *, unflushed: bool = False, kept: bool = False) -> Manifest:
    """unflushed: the volume holds usage that nobody has, so that it must outlive everybody.

    kept: it was kept of an earlier session of this name, for longer than this one wants it.
    """
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
    if session.spec.storage.retain == "Delete" and not (unflushed or kept):
        meta["ownerReferences"] = owner(session)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": meta,
        "spec": spec,
    }


def kept_patch(claim: Manifest, owner_uid: str, *, unflushed: bool, until: str) -> Manifest | None:
    """What makes the claim outlive its session; None = it does already.

    until: RFC 3339, when it may be removed. It is never removed while it holds usage that nobody has.
    """
    meta = claim["metadata"]
    owners, marks = meta.get("ownerReferences") or [], meta.get("annotations") or {}
    others = [each for each in owners if each["uid"] != owner_uid]
    is_marked = labels.UNFLUSHED in (meta.get("labels") or {})
    holds = unflushed or is_marked
    kept_until = None if holds else marks.get(KEPT_UNTIL) or until
    is_said = kept_until == marks.get(KEPT_UNTIL) and (is_marked or not holds)
    if is_said and len(others) == len(owners):
        return None
    fields: dict[str, Any] = {  # Any: fields of metadata
        "resourceVersion": meta["resourceVersion"],
        "ownerReferences": others or None,
        "annotations": {KEPT_UNTIL: kept_until},
    }
    if holds:
        fields["labels"] = {labels.UNFLUSHED: "true"}
    return {"metadata": fields}
