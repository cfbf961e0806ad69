"""Claims of a tenant's namespace that the platform team has every worker mount, read-only. Pure."""

from typing import Any

from gristmill_operator.children.options import ChildOptions


def shared_volumes(options: ChildOptions) -> list[dict[str, Any]]:  # Any: fields of a volume
    return [
        {"name": _name(index), "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for index, (_, claim) in enumerate(options.worker_claims)
    ]


def shared_mounts(options: ChildOptions) -> list[dict[str, Any]]:  # Any: fields of a mount
    return [
        {"name": _name(index), "mountPath": path, "readOnly": True}
        for index, (path, _) in enumerate(options.worker_claims)
    ]


def _name(index: int) -> str:
    return f"shared-{index}"
