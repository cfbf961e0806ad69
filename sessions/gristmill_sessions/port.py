"""The store of resources, as a port with the semantics of the Kubernetes API.

Two implementations: `local` (one SQLite file) here, custom resources in the cluster.
"""

from typing import Protocol, TypeVar

from gristmill_contracts.resources import Resource

R = TypeVar("R", bound=Resource)


class ResourceStore(Protocol):
    """Optimistic concurrency by `metadata.resource_version`; every change moves it.

    Errors: NotFoundError, ConflictError (exists already; stale resource_version), UnavailableError.
    Calls block for milliseconds at most; async callers wrap them in `asyncio.to_thread`.
    """

    def create(self, resource: R) -> R:
        """Store a new resource; fills uid, resource_version, generation, creation_time_us."""
        ...

    def get(self, kind: type[R], namespace: str, name: str) -> R: ...

    def list(self, kind: type[R], namespace: str | None = None) -> list[R]:
        """All of a kind, in creation order; `namespace=None` = every namespace."""
        ...

    def update(self, resource: R) -> R:
        """Replace metadata and spec. generation grows if the spec changed; status is left alone."""
        ...

    def update_status(self, resource: R) -> R:
        """Replace status only."""
        ...

    def delete(self, kind: type[R], namespace: str, name: str) -> None:
        """Remove it, or mark deletion_time_us while finalizers are left."""
        ...

    def revision(self) -> int:
        """A number that grows with every change of the store: the cheap way to notice one."""
        ...
