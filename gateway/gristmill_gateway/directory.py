"""Who and what there is, read from the resource store and remembered until the store changes.

Every question says as of when: the time (monotonic seconds) at which its request arrived, so that
whatever was written before is seen. A request that asks much looks at the store once. None = as of now.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.credentials import AccessKey, EndpointSecret
from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_gateway.object_names import object_name
from gristmill_gateway.tenancy import NamedTenancy, Tenancy
from gristmill_sessions.identity import session_name, session_uid
from gristmill_sessions.port import ResourceStore

T = TypeVar("T")

REMEMBERED_MAX = 10_000
"""Answers kept between two changes of the store; unknown names a caller makes up are among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a session's meter listens, and what opens its door."""

    session: SessionUid
    url: str
    secret: str
    attempt: int


ReadSession = Callable[[str, str], TrainingSession]
"""By namespace and name. Raises NotFoundError."""


@dataclass(frozen=True, slots=True)
class _Known:
    """Answers at one revision of the store."""

    revision: int
    answers: dict[tuple[object, ...], Any]  # Any: by what the question asks for


class Directory:
    """Reads through to `store`, rows in threads. To be used on one event loop alone."""

    def __init__(
        self,
        store: ResourceStore,
        tenancy: Tenancy | None = None,
        past_cache: ReadSession | None = None,
    ) -> None:
        """past_cache: for a store that answers from a cache, how to read a session past it."""
        self._store = store
        self._tenancy = tenancy or NamedTenancy()
        self._past_cache = past_cache
        self._known = _Known(-1, {})
        self._checked_at = 0.0
        """The store was at `_known.revision` at this time or later."""

    async def access_key(self, access_key_id: str, as_of: float | None = None) -> AccessKey | None:
        return (await self._ask(("keys",), self._keys, as_of)).get(access_key_id)

    async def tenant(self, name: str, as_of: float | None = None) -> Tenant | None:
        return (await self._ask(("tenants",), self._tenants, as_of)).get(name)

    async def base_model(self, name: str, as_of: float | None = None) -> BaseModelResource | None:
        return (await self._ask(("models",), self._models, as_of)).get(name)

    async def namespace(self, tenant: str, as_of: float | None = None) -> str:
        """Where the tenant's sessions lie. Raises UnavailableError while that is nowhere."""
        known = await self._ask(("namespaces",), self._tenancy.namespaces, as_of)
        return known.get(tenant) or self._tenancy.missing(tenant)

    async def owner(self, namespace: str) -> str:
        """The tenant whose sessions lie there."""
        known = await self._ask(("namespaces",), self._tenancy.namespaces, time.monotonic())
        return next((tenant for tenant, own in known.items() if own == namespace), namespace)

    async def session(
        self, tenant: str, name: str, as_of: float | None = None
    ) -> TrainingSession | None:
        """The tenant's session that is called `name`."""
        namespace = await self.namespace(tenant, as_of)
        question = ("sessions", namespace)
        found = (await self._ask(question, lambda: self._sessions(namespace), as_of)).get(name)
        if found is not None:
            return found
        # A list may be a moment old where several gateways make sessions; a read by name is not.
        named = ("session", namespace, name)
        return await self._ask(named, lambda: self._named(namespace, name), as_of)

    async def session_object(
        self, namespace: str, name: str, as_of: float | None = None
    ) -> TrainingSession | None:
        """The session whose resource is called `name`."""
        question = ("sessions", namespace)
        sessions = await self._ask(question, lambda: self._sessions(namespace), as_of)
        return next((each for each in sessions.values() if each.metadata.name == name), None)

    async def fresh(self, session: TrainingSession) -> TrainingSession | None:
        """The session as it is this moment, before something is refused because of how it was.

        Another gateway may have told its client more than this one knows yet. None = it is gone.
        """
        meta = session.metadata
        read = self._past_cache
        if read is None:
            return await self.session_object(meta.namespace, meta.name)
        return await asyncio.to_thread(_read, read, meta.namespace, meta.name)

    async def endpoint(
        self, session: TrainingSession, as_of: float | None = None
    ) -> Endpoint | None:
        """Where to reach the session's meter; None while it has none."""
        meta = session.metadata
        question = ("endpoint", meta.namespace, meta.name, session_uid(session))
        return await self._ask(question, lambda: self._endpoint(session), as_of)

    async def _ask(
        self, question: tuple[object, ...], read: Callable[[], T], as_of: float | None
    ) -> T:
        if as_of is None or as_of > self._checked_at:
            self._check()
        known = self._known
        if question in known.answers:
            found: T = known.answers[question]
            return found
        answer = await asyncio.to_thread(read)
        # At worst newer than `known`: then the store's next revision makes it forgotten. Absence is not
        # remembered: another gateway may have made it, and the watch that would tell us may lag.
        if answer is not None:
            known.answers[question] = answer
        return answer

    def _check(self) -> None:
        """Look at the store's revision, here and now: a read of one number beats a hop to a thread."""
        asked_at = time.monotonic()
        revision = self._store.revision()
        if revision != self._known.revision or len(self._known.answers) > REMEMBERED_MAX:
            self._known = _Known(revision, {})
        self._checked_at = asked_at

    def _keys(self) -> dict[str, AccessKey]:
        return {key.spec.access_key_id: key for key in self._store.list(AccessKey)}

    def _tenants(self) -> dict[str, Tenant]:
        return {tenant.metadata.name: tenant for tenant in self._store.list(Tenant)}

    def _models(self) -> dict[str, BaseModelResource]:
        return {model.metadata.name: model for model in self._store.list(BaseModelResource)}

    def _sessions(self, namespace: str) -> dict[str, TrainingSession]:
        # Reversed: of two with one name, which the admission refuses, the older is meant.
        sessions = reversed(self._store.list(TrainingSession, namespace))
        return {session_name(session): session for session in sessions}

    def _named(self, namespace: str, name: str) -> TrainingSession | None:
        try:
            found = self._store.get(TrainingSession, namespace, object_name(name))
        except NotFoundError:
            return None
        return found if session_name(found) == name else None

    def _endpoint(self, session: TrainingSession) -> Endpoint | None:
        meta = session.metadata
        try:
            spec = self._store.get(EndpointSecret, meta.namespace, meta.name).spec
        except NotFoundError:
            return None
        uid = session_uid(session)
        if spec.session_uid != uid:
            return None  # Left over from an earlier session of that name.
        return Endpoint(session=uid, url=spec.endpoint, secret=spec.secret, attempt=spec.attempt)


def _read(read: ReadSession, namespace: str, name: str) -> TrainingSession | None:
    try:
        return read(namespace, name)
    except NotFoundError:
        return None
