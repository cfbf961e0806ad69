"""A tenant's namespace: how it is called, whose it is, and what it looks like. Pure."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from gristmill_contracts import labels
from gristmill_contracts.tenant import Tenant
from gristmill_operator.children.manifest import Manifest, tenant_labels
from gristmill_operator.children.options import ChildOptions

NEVER: Final = frozenset({"default"})
NEVER_PREFIX: Final = "kube-"
HAND_OVER: Final = "gristmill.dev/hand-over-to"
"""Annotation by which whoever owns a namespace gives it to the tenant of this name."""


def namespace_name(tenant: Tenant) -> str:
    return tenant.spec.namespace or f"{labels.NAMESPACE_PREFIX}{tenant.metadata.name}"


def tenant_namespace(tenant: Tenant, options: ChildOptions) -> Manifest:
    """With the Pod Security level that its pods are held to, and the mark of whose it is."""
    level, version = tenant.spec.pod_security, options.pod_security_version
    security = {
        f"pod-security.kubernetes.io/{mode}{suffix}": value
        for mode in ("enforce", "audit", "warn")
        for suffix, value in (("", level), ("-version", version))
    }
    marks = {
        labels.TENANT: tenant.metadata.name,
        labels.TENANT_UID: tenant.metadata.uid,
    }
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": namespace_name(tenant),
            "labels": tenant_labels(tenant.metadata.name) | marks | security,
            "annotations": marks,
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Whether the tenant may have its namespace."""

    verdict: Literal["New", "Ours", "Adopt", "Foreign", "Terminating"]
    message: str = ""


def claim_namespace(tenant: Tenant, found: Manifest | None, options: ChildOptions) -> Claim:
    """By the annotations: the same name with another uid is the same tenant, made again.

    A namespace without them was made by somebody else: nothing in it is touched.
    """
    name, who = namespace_name(tenant), tenant.metadata.name
    if name in NEVER or name.startswith(NEVER_PREFIX) or name == options.system_namespace:
        return Claim(
            verdict="Foreign",
            message=f"namespace {name!r} belongs to the cluster and is never a tenant's; "
            "make the tenant again with another spec.namespace",
        )
    if found is None:
        return Claim(verdict="New")
    meta: dict[str, Any] = found["metadata"]  # Any: fields of metadata
    marks = meta.get("annotations") or {}
    marked = marks.get(labels.TENANT) or marks.get(HAND_OVER)
    if marked != who:
        return Claim(verdict="Foreign", message=_foreign(name, who, marked))
    if meta.get("deletionTimestamp"):
        return Claim(
            verdict="Terminating",
            message=f"namespace {name!r} is being deleted; it is made again once it is gone",
        )
    if marks.get(labels.TENANT_UID) == tenant.metadata.uid:
        return Claim(verdict="Ours")
    return Claim(
        verdict="Adopt",
        message=f"namespace {name!r} was there before this tenant {who!r} and is taken over with all in it",
    )


def _foreign(name: str, who: str, marked: str | None) -> str:
    if marked is not None:
        return (
            f"namespace {name!r} belongs to tenant {marked!r}, and nothing in it is touched; "
            f"make tenant {who!r} again with another spec.namespace"
        )
    return (
        f"namespace {name!r} was not made for a tenant, and nothing in it is touched; make tenant {who!r} "
        f"again with another spec.namespace, or hand it over: kubectl annotate namespace {name} "
        f"{HAND_OVER}={who}"
    )
