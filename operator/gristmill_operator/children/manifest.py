"""What all children share: their type, labels, owner, and a hash of what was asked for."""

import hashlib
import json
from typing import Any, Final

from gristmill_contracts import labels
from gristmill_contracts.resources import GROUP_VERSION
from gristmill_contracts.session import TrainingSession
from gristmill_sessions.identity import tenant_of

Manifest = dict[str, Any]
"""An object of the Kubernetes API as JSON."""  # Any: each kind has fields of its own

NAME: Final = "app.kubernetes.io/name"
COMPONENT: Final = "app.kubernetes.io/component"
PRODUCT: Final = "gristmill"
WORKER: Final = "worker"
DRAIN: Final = "drain"
FETCH: Final = "fetch"
ASKED_HASH: Final = "gristmill.dev/asked"
"""Annotation: hash of the fields that the operator asked for. It shows that one was taken away."""


def session_labels(session: TrainingSession) -> dict[str, str]:
    """On every child of a session."""
    return {
        NAME: PRODUCT,
        labels.MANAGED_BY: labels.MANAGER,
        labels.SESSION: session.metadata.name,
        labels.TENANT: tenant_of(session),
    }


def tenant_labels(tenant: str) -> dict[str, str]:
    """On every child of a tenant."""
    return {NAME: PRODUCT, labels.MANAGED_BY: labels.MANAGER, labels.TENANT: tenant}


def owner(session: TrainingSession) -> list[dict[str, Any]]:
    """The reference by which the cluster removes what a session leaves."""
    return [
        {
            "apiVersion": GROUP_VERSION,
            "kind": "TrainingSession",
            "name": session.metadata.name,
            "uid": session.metadata.uid,
            "controller": True,
        }
    ]


def hash_of(content: object) -> str:
    """Sixteen hex digits of the canonical JSON: short enough for a label's value."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def asked(manifest: Manifest) -> Manifest:
    """The same object with the hash of itself in an annotation."""
    meta = manifest["metadata"]
    marks = {**meta.get("annotations", {}), ASKED_HASH: hash_of(manifest)}
    return {**manifest, "metadata": {**meta, "annotations": marks}}
