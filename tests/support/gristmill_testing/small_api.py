"""A few objects with the API server's rules for uids, versions, finalizers and merge patches, in memory.

For tests of what lies between the cache and the wire; whoever tests behaviour of Kubernetes uses a real one.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gristmill_contracts.errors import ConflictError, GristmillError, NotFoundError
from gristmill_operator.kinds import Kind
from gristmill_operator.problems import AlreadyExistsError

Json = dict[str, Any]
Place = tuple[str, str, str]


@dataclass
class SmallApi:
    """The part of `client.ApiClient` that caches, sweeps and the loop use."""

    objects: dict[Place, Json] = field(default_factory=dict)
    version: int = 100
    calls: list[str] = field(default_factory=list)
    fail: Callable[[str], GristmillError | None] = lambda call: None
    """Asked before each call is done."""
    lose: Callable[[str], GristmillError | None] = lambda call: None
    """Asked after each call was done: its answer is lost."""

    def put(self, kind: Kind, body: Json) -> Json:
        """As somebody else would: no call is counted."""
        body = copy.deepcopy(body)
        meta = body["metadata"]
        self.version += 1
        meta.setdefault("uid", f"uid-{meta['name']}-{self.version}")
        meta["resourceVersion"] = str(self.version)
        meta.setdefault("generation", 1)
        meta.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        self.objects[self._place(kind, meta.get("namespace", ""), meta["name"])] = body
        return copy.deepcopy(body)

    def drop(self, kind: Kind, namespace: str, name: str) -> None:
        del self.objects[self._place(kind, namespace, name)]

    async def get(self, kind: Kind, namespace: str, name: str) -> Json:
        with self._call(f"get {kind.plural} {name}"):
            return copy.deepcopy(self._known(kind, namespace, name))

    async def list(self, kind: Kind, namespace: str = "", *, selector: str = "") -> Sequence[Json]:
        return (await self.list_metadata(kind))[0]

    async def list_metadata(self, kind: Kind) -> tuple[Sequence[Json], str]:
        with self._call(f"list {kind.plural}"):
            found = [body for place, body in self.objects.items() if place[0] == kind.plural]
            listed = [{"metadata": copy.deepcopy(body["metadata"])} for body in found]
            return listed, str(self.version)

    async def create(self, kind: Kind, body: Json) -> Json:
        meta = body["metadata"]
        with self._call(f"create {kind.plural} {meta['name']}"):
            if self._place(kind, meta.get("namespace", ""), meta["name"]) in self.objects:
                raise AlreadyExistsError(f"{meta['name']} exists")
            return self.put(kind, body)

    async def merge_patch(
        self, kind: Kind, namespace: str, name: str, patch: Json, *, subresource: str = ""
    ) -> Json:
        with self._call(f"patch {kind.plural} {name} {subresource}".strip()):
            body = self._known(kind, namespace, name)
            wanted = (patch.get("metadata") or {}).get("resourceVersion")
            if wanted not in (None, body["metadata"]["resourceVersion"]):
                raise ConflictError(f"{name} has been modified")
            marks = {
                k: v for k, v in (patch.get("metadata") or {}).items() if k != "resourceVersion"
            }
            return self.put(kind, _merged(body, {**patch, "metadata": marks}))

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str,
        grace_s: int | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
    ) -> Json | None:
        with self._call(f"delete {kind.plural} {name}"):
            body = self.objects.get(self._place(kind, namespace, name))
            if body is None or body["metadata"]["uid"] != uid:
                return None
            self.drop(kind, namespace, name)
            return {"kind": "Status", "status": "Success"}

    def _known(self, kind: Kind, namespace: str, name: str) -> Json:
        try:
            return self.objects[self._place(kind, namespace, name)]
        except KeyError:
            raise NotFoundError(f"{kind.plural} {name} not found") from None

    def _place(self, kind: Kind, namespace: str, name: str) -> Place:
        return (kind.plural, namespace, name)

    def _call(self, call: str) -> "_Call":
        self.calls.append(call)
        return _Call(self, call)


@dataclass
class _Call:
    api: SmallApi
    call: str

    def __enter__(self) -> None:
        error = self.api.fail(self.call)
        if error is not None:
            raise error

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        lost = self.api.lose(self.call) if error is None else None
        if lost is not None:
            raise lost


def _merged(body: Json, patch: Json) -> Json:
    merged = copy.deepcopy(body)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(merged[name], value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged
