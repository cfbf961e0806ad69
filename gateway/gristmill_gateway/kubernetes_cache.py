"""The objects of one kind as the API server last told them. Written on the event loop, read anywhere."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from gristmill_contracts.resources import Resource

R = TypeVar("R", bound=Resource)
T = TypeVar("T")

Place = tuple[str, str]
"""Namespace and name."""


class Cache(Generic[R]):
    """`changed` is called after each change. Versions of one kind are comparable: a revision of etcd."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._objects: dict[str, dict[str, R]] = {}
        self._seen = 0
        """Everything up to this version was told."""
        self.changes = 0
        """Grows with each change."""
        self.shapes = 0
        """Grows with each change that is more than one of a status."""
        self.filled = False
        """A list was taken in: from here on, what is not here is not there."""

    def get(self, namespace: str, name: str) -> R | None:
        return self._objects.get(namespace, {}).get(name)

    def list(self, namespace: str | None = None) -> list[R]:
        """In creation order."""
        if namespace is not None:
            found = list(self._objects.get(namespace, {}).values())
        else:
            found = [each for part in list(self._objects.values()) for each in list(part.values())]
        return sorted(found, key=_age)

    def replace(self, objects: Iterable[R], version: int) -> None:
        """A whole list. What we wrote since it was made is kept."""
        fresh: dict[str, dict[str, R]] = {}
        newer = [each for each in self.list() if each.metadata.resource_version > version]
        for each in [*objects, *newer]:
            fresh.setdefault(each.metadata.namespace, {})[each.metadata.name] = each
        self._objects = fresh
        self.shapes += 1
        self._seen = max(self._seen, version)
        self.filled = True
        self._tell()

    def told(self, resource: R) -> None:
        """A watch told of it."""
        self._seen = max(self._seen, resource.metadata.resource_version)
        self._put(resource)

    def written(self, resource: R) -> None:
        """The answer to a write or a read of ours. The watch may have told what came after it already."""
        if resource.metadata.resource_version > self._seen:
            self._put(resource)

    def gone(self, place: Place, uid: str, version: int) -> None:
        """A watch told that it was deleted, or a read found nothing."""
        self._seen = max(self._seen, version)
        known = self.get(*place)
        if known is None or (uid and known.metadata.uid != uid):
            return
        del self._objects[place[0]][place[1]]
        self.shapes += 1
        self._tell()

    def marked(self, version: int) -> None:
        """A bookmark: nothing changed up to here."""
        self._seen = max(self._seen, version)

    def _put(self, resource: R) -> None:
        meta = resource.metadata
        known = self.get(meta.namespace, meta.name)
        if known is not None and known.metadata.resource_version >= meta.resource_version:
            return
        self._objects.setdefault(meta.namespace, {})[meta.name] = resource
        self.shapes += known is None or _shape(known) != _shape(resource)
        self._tell()

    def _tell(self) -> None:
        self.changes += 1
        self._changed()


class Made(Generic[R, T]):
    """What follows from all objects of a cache, made again when they have changed.

    of_status: it follows from their status too.
    """

    def __init__(self, cache: Cache[R], make: Callable[[list[R]], T], *, of_status: bool) -> None:
        self._cache = cache
        self._make = make
        self._of_status = of_status
        self._known: tuple[int, T] | None = None

    def get(self) -> T:
        # Read before the objects: at worst it is made once more than needed.
        changes = self._cache.changes if self._of_status else self._cache.shapes
        known = self._known
        if known is None or known[0] != changes:
            known = (changes, self._make(self._cache.list()))
            self._known = known
        return known[1]


def _shape(resource: Resource) -> tuple[object, ...]:
    """What is another where more than the status is. The generation is that of the spec."""
    meta = resource.metadata
    return (meta.uid, meta.generation, meta.annotations, meta.labels)


def _age(resource: Resource) -> tuple[int, str]:
    meta = resource.metadata
    return (meta.creation_time_us, meta.name)
