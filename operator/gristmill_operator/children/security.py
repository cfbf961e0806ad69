"""Security contexts of the restricted Pod Security level, with fixed users."""

from typing import Any

from gristmill_operator.children.paths import SHARED_GID


def pod_security(*, shared_files: bool = True) -> dict[str, Any]:
    """shared_files: give the pod's volumes to the shared group, so that both users can write there."""
    context: dict[str, Any] = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if shared_files:
        # A volume of many files is walked once, not at every start.
        context |= {"fsGroup": SHARED_GID, "fsGroupChangePolicy": "OnRootMismatch"}
    return context


def container_security(uid: int) -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": uid,
        "runAsGroup": SHARED_GID,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
