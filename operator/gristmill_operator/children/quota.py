"""What a tenant's namespace may use in all, and what a container gets that asks for nothing."""

from typing import Final

from gristmill_contracts.tenant import Tenant
from gristmill_operator.children.manifest import Manifest, tenant_labels
from gristmill_operator.children.namespace import namespace_name

NAME: Final = "gristmill"
SESSIONS: Final = "count/trainingsessions.gristmill.dev"


def resource_quota(tenant: Tenant) -> Manifest | None:
    """None = nothing is bounded."""
    quota = tenant.spec.quota
    bounds = {
        SESSIONS: quota.max_sessions,
        "pods": quota.pods,
        "requests.cpu": quota.cpu,
        "requests.memory": quota.memory,
        "limits.memory": quota.memory,
        "requests.storage": quota.storage,
        "persistentvolumeclaims": quota.pvcs,
        # Devices have no other form in a quota: their limits equal their requests.
        **{f"requests.{device}": amount for device, amount in quota.devices.items()},
    }
    hard = {name: str(amount) for name, amount in bounds.items() if amount is not None}
    if not hard:
        return None
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": _meta(tenant),
        "spec": {"hard": hard},
    }


def limit_range(tenant: Tenant) -> Manifest:
    """A quota refuses containers that name no amount, such as those of an admission plug-in's sidecar."""
    return {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": _meta(tenant),
        "spec": {
            "limits": [
                {
                    "type": "Container",
                    "default": {"memory": "512Mi"},
                    "defaultRequest": {"cpu": "100m", "memory": "256Mi"},
                }
            ]
        },
    }


def _meta(tenant: Tenant) -> dict[str, object]:
    return {
        "name": NAME,
        "namespace": namespace_name(tenant),
        "labels": tenant_labels(tenant.metadata.name),
    }
