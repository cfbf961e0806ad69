"""Our resources as read from the cache, each version of one parsed once."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, TypeVar, cast

from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.rate_card import RateCard
from gristmill_contracts.resources import Resource
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_operator.codec import read
from gristmill_operator.kinds import CARDS, MODELS, SESSIONS, TENANTS, Kind
from gristmill_operator.seams import Cache, Json

R = TypeVar("R", bound=Resource)
KEPT_MAX: Final = 20_000


@dataclass(slots=True, kw_only=True)
class Parsed:
    cache: Cache
    _kept: OrderedDict[str, tuple[str, Resource]] = field(default_factory=OrderedDict)
    """uid -> resourceVersion and what was read from it."""

    def session(self, namespace: str, name: str) -> TrainingSession | None:
        return self._get(TrainingSession, SESSIONS, namespace, name)

    def session_of(self, body: Json) -> TrainingSession:
        """`body` as it stands in the cache. Raises InvalidRequestError if this version cannot read it."""
        return self._read(TrainingSession, body)

    def tenant(self, name: str) -> Tenant | None:
        return self._get(Tenant, TENANTS, "", name)

    def model(self, name: str) -> BaseModelResource | None:
        return self._get(BaseModelResource, MODELS, "", name)

    def card(self, name: str) -> RateCard | None:
        return self._get(RateCard, CARDS, "", name)

    def sessions(self, namespace: str | None = None) -> list[TrainingSession]:
        """Those that can be read: one that a newer version wrote must not stop the others."""
        return self._list(TrainingSession, SESSIONS, namespace)

    def tenants(self) -> list[Tenant]:
        return self._list(Tenant, TENANTS, None)

    def _get(self, shape: type[R], kind: Kind, namespace: str, name: str) -> R | None:
        """Raises InvalidRequestError if this version cannot read it."""
        body = self.cache.get(kind, namespace, name)
        return None if body is None else self._read(shape, body)

    def _list(self, shape: type[R], kind: Kind, namespace: str | None) -> list[R]:
        found: list[R] = []
        for body in self.cache.list(kind, namespace):
            try:
                found.append(self._read(shape, body))
            except InvalidRequestError:
                continue
        return found

    def _read(self, shape: type[R], body: Json) -> R:
        uid, version = body["metadata"]["uid"], body["metadata"]["resourceVersion"]
        known = self._kept.get(uid)
        if known is not None and known[0] == version:
            self._kept.move_to_end(uid)
            return cast(R, known[1])
        resource = read(shape, body)
        self._kept[uid] = (version, resource)
        self._kept.move_to_end(uid)
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        return resource
