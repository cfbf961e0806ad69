"""Writes to the API server whose answers go into the cache, so that the next look sees them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gristmill_contracts import labels
from gristmill_contracts.errors import GristmillError, NotFoundError, UnavailableError
from gristmill_operator.cache import ObjectCache
from gristmill_operator.client import ApiClient
from gristmill_operator.expectations import Expectations, Expected, Owner
from gristmill_operator.kinds import PRIMARY, SESSIONS, WATCHED, Kind
from gristmill_operator.seams import Json

_WATCHED: Final = frozenset(WATCHED)


@dataclass(slots=True, kw_only=True)
class CachedCluster:
    """The implementation of `seams.Cluster`."""

    client: ApiClient
    cache: ObjectCache
    expectations: Expectations
    told: Callable[[Kind, Json | None, Json | None], None] = lambda kind, before, after: None
    """Told of what our own writes changed of what sessions wait for, before and after: the watch brings
    it later, and it is no news then. A session, and what is made for one, is looked at again anyway."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Json:
        return self._keep(kind, await self.client.get(kind, namespace, name))

    async def list(self, kind: Kind, namespace: str = "", *, selector: str = "") -> Sequence[Json]:
        return await self.client.list(kind, namespace, selector=selector)

    async def create(self, kind: Kind, body: Json) -> Json:
        owner, expected = _owner(body), _appears(kind, body["metadata"])
        self._expect(owner, expected)
        try:
            answer = await self.client.create(kind, body)
        except GristmillError as error:
            # Without an answer it may have happened all the same.
            if not isinstance(error, UnavailableError):
                self.expectations.drop(owner, expected)
            raise
        return self._keep(kind, answer)

    async def apply(self, kind: Kind, body: Json, *, subresource: str = "") -> Json:
        return self._keep(kind, await self.client.apply(kind, body, subresource=subresource))

    async def merge_patch(
        self, kind: Kind, namespace: str, name: str, patch: Json, *, subresource: str = ""
    ) -> Json:
        answer = await self.client.merge_patch(
            kind, namespace, name, patch, subresource=subresource
        )
        return self._keep(kind, answer)

    async def json_patch(
        self, kind: Kind, namespace: str, name: str, operations: Sequence[Json]
    ) -> Json:
        return self._keep(kind, await self.client.json_patch(kind, namespace, name, operations))

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str,
        grace_s: int | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
    ) -> None:
        known = self.cache.by_uid(kind, uid)
        owner = _owner(known) if known is not None else None
        expected = Expected(kind=kind, namespace=namespace, name=name, gone_uid=uid)
        self._expect(owner, expected)
        try:
            answer = await self.client.delete(
                kind, namespace, name, uid=uid, grace_s=grace_s, propagation=propagation
            )
        except GristmillError as error:
            if not isinstance(error, UnavailableError):
                self.expectations.drop(owner or _NOBODY, expected)
            raise
        if answer is None or answer.get("kind") == "Status":
            self.cache.remove(kind, namespace, name, uid)
        else:
            self._keep(kind, answer)

    async def settle(self, owner: Owner) -> bool:
        """Ask the API server for what was not seen yet. True if all is known now."""
        for expected in self.expectations.unseen(owner):
            try:
                found = await self.get(expected.kind, expected.namespace, expected.name)
            except NotFoundError:
                found = None
            uid = "" if found is None else found["metadata"]["uid"]
            if expected.gone_uid and uid != expected.gone_uid:
                self.cache.remove(
                    expected.kind, expected.namespace, expected.name, expected.gone_uid
                )
            # Not deleted, or not created: the write never arrived, and may be done again.
            self.expectations.drop(owner, expected)
        return not self.expectations.unseen(owner)

    def _expect(self, owner: Owner | None, expected: Expected) -> None:
        if owner is not None and expected.kind in _WATCHED:
            self.expectations.expect(owner, expected)

    def _keep(self, kind: Kind, answer: Json) -> Json:
        meta = answer.get("metadata", {})
        if kind not in _WATCHED or "uid" not in meta:
            return answer
        if kind in PRIMARY and meta.get("deletionTimestamp") and not meta.get("finalizers"):
            # Its last finalizer was taken away by this very write.
            self.cache.remove(kind, meta.get("namespace", ""), meta["name"], meta["uid"])
        else:
            self._put(kind, answer)
        return answer

    def _put(self, kind: Kind, answer: Json) -> None:
        meta = answer["metadata"]
        place = meta.get("namespace", ""), meta["name"]
        before = self.cache.get(kind, *place)
        is_news = self.cache.put(kind, answer)
        if is_news and kind != SESSIONS and not _owner(answer)[1]:
            self.told(kind, before, self.cache.get(kind, *place))


_NOBODY: Final = ("", "")


def _owner(body: Json) -> Owner:
    meta = body["metadata"]
    return meta.get("namespace", ""), (meta.get("labels") or {}).get(labels.SESSION, "")


def _appears(kind: Kind, meta: Json) -> Expected:
    return Expected(kind=kind, namespace=meta.get("namespace", ""), name=meta["name"])
