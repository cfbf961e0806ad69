"""The kinds of the API server that the operator reads or writes, and under which address."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from gristmill_contracts import labels, resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of object. Compared and hashed by value."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    selector: str = ""
    """Labels of those that are ours: nothing else is listed, watched or kept."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Path of the collection (of one namespace, of all if "") or of one object."""
        parts = ["/apis/" + self.api_version if self.group else "/api/" + self.version]
        if self.namespaced and namespace:
            parts.append("namespaces/" + quote(namespace, safe=""))
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part]
        return "/".join(parts)


def _ours(kind: str, plural: str, *, namespaced: bool) -> Kind:
    return Kind(
        group=resources.GROUP,
        version=resources.VERSION,
        plural=plural,
        kind=kind,
        namespaced=namespaced,
    )


_MANAGED: Final = f"{labels.MANAGED_BY}={labels.MANAGER}"


def _core(kind: str, plural: str, *, namespaced: bool = True, selector: str = "") -> Kind:
    return Kind(
        group="", version="v1", plural=plural, kind=kind, namespaced=namespaced, selector=selector
    )


def _v1(group: str, kind: str, plural: str, *, selector: str = "") -> Kind:
    return Kind(group=group, version="v1", plural=plural, kind=kind, selector=selector)


SESSIONS: Final = _ours("TrainingSession", "trainingsessions", namespaced=True)
TENANTS: Final = _ours("Tenant", "tenants", namespaced=False)
MODELS: Final = _ours("BaseModel", "basemodels", namespaced=False)
CARDS: Final = _ours("RateCard", "ratecards", namespaced=False)

PODS: Final = _core("Pod", "pods", selector=_MANAGED)
SERVICES: Final = _core("Service", "services", selector=_MANAGED)
CLAIMS: Final = _core("PersistentVolumeClaim", "persistentvolumeclaims", selector=_MANAGED)
JOBS: Final = _v1("batch", "Job", "jobs", selector=_MANAGED)
NAMESPACES: Final = _core("Namespace", "namespaces", namespaced=False, selector=_MANAGED)
NODES: Final = _core("Node", "nodes", namespaced=False)

# Written, read by name, never watched: the operator holds no list of Secrets in memory, and needs no
# right to list them.
SECRETS: Final = _core("Secret", "secrets")
SERVICE_ACCOUNTS: Final = _core("ServiceAccount", "serviceaccounts")
RESOURCE_QUOTAS: Final = _core("ResourceQuota", "resourcequotas")
LIMIT_RANGES: Final = _core("LimitRange", "limitranges")
NETWORK_POLICIES: Final = _v1("networking.k8s.io", "NetworkPolicy", "networkpolicies")
ROLE_BINDINGS: Final = _v1("rbac.authorization.k8s.io", "RoleBinding", "rolebindings")
RESOURCE_CLAIM_TEMPLATES: Final = _v1(
    "resource.k8s.io", "ResourceClaimTemplate", "resourceclaimtemplates"
)
ENDPOINT_SLICES: Final = _v1("discovery.k8s.io", "EndpointSlice", "endpointslices")
LEASES: Final = _v1("coordination.k8s.io", "Lease", "leases")
EVENTS: Final = _v1("events.k8s.io", "Event", "events")

PRIMARY: Final = (SESSIONS, TENANTS, MODELS, CARDS)
"""What is reconciled: each has a key in the queue."""
CHILDREN: Final = (PODS, SERVICES, CLAIMS, JOBS)
"""What a session is made of; a change of one is a change of its session."""
WATCHED: Final = (*PRIMARY, *CHILDREN, NAMESPACES, NODES)
