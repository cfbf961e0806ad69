"""In which namespace a tenant's sessions lie. Pure, but for what it reads from the store."""

from collections.abc import Iterable
from typing import Protocol

from gristmill_contracts import conditions, labels
from gristmill_contracts.errors import UnavailableError
from gristmill_contracts.tenant import Tenant
from gristmill_sessions.port import ResourceStore


class Tenancy(Protocol):
    def namespaces(self) -> dict[str, str]:
        """Tenants by name, and the namespace of each."""
        ...

    def missing(self, tenant: str) -> str:
        """The namespace of a tenant that `namespaces` does not name. Raises UnavailableError."""
        ...


class NamedTenancy:
    """Of one machine: a tenant's namespace has its name, and a tenant needs no resource."""

    def namespaces(self) -> dict[str, str]:
        return {}

    def missing(self, tenant: str) -> str:
        return tenant


class DeclaredTenancy:
    """Of a cluster: the Tenant says it."""

    def __init__(self, store: ResourceStore) -> None:
        self._store = store

    def namespaces(self) -> dict[str, str]:
        return namespaces_of(self._store.list(Tenant))

    def missing(self, tenant: str) -> str:
        raise UnavailableError(
            f"tenant {tenant!r} has no namespace of its own yet; `kubectl describe tenant {tenant}` says "
            "what it waits for"
        )


def namespaces_of(tenants: Iterable[Tenant]) -> dict[str, str]:
    """A namespace is one tenant's: of two that claim it, it is his whom the operator gave it, else the older's.

    A tenant whose namespace was found to be somebody else's has none, or its keys would open what lies
    there.
    """
    owners: dict[str, str] = {}
    for tenant in sorted(tenants, key=_claim):
        ready = conditions.find(tenant.status.conditions, conditions.NAMESPACE_READY)
        if ready is not None and ready.status == "False" and ready.reason == "NamespaceForeign":
            continue
        owners.setdefault(namespace_of(tenant), tenant.metadata.name)
    return {tenant: namespace for namespace, tenant in owners.items()}


def _claim(tenant: Tenant) -> tuple[bool, int, str]:
    given = conditions.is_true(tenant.status.conditions, conditions.NAMESPACE_READY)
    return (not given, tenant.metadata.creation_time_us, tenant.metadata.name)


def namespace_of(tenant: Tenant) -> str:
    """What the tenant asks for; its name tells it where it asks for nothing."""
    return tenant.spec.namespace or labels.NAMESPACE_PREFIX + tenant.metadata.name
