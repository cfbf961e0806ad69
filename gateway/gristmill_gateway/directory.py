"""Who and what there is, read from the resource store and remembered until the store changes.

Calls block for milliseconds at most; async callers wrap them in `asyncio.to_thread`. Safe from several
threads.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.session import (
    AccessKey,
    BaseModelResource,
    EndpointSecret,
    Tenant,
    TrainingSession,
)
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


class Directory:
    """Reads through to `store`. One change of the store forgets all: a read is a few rows."""

    def __init__(self, store: ResourceStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._revision = -1
        self._remembered: dict[tuple[object, ...], Any] = {}  # Any: by what the key asks for

    def access_key(self, access_key_id: str) -> AccessKey | None:
        keys = self._ask(("keys",), self._keys)
        return keys.get(access_key_id)

    def tenant(self, name: str) -> Tenant | None:
        return self._ask(("tenants",), self._tenants).get(name)

    def base_model(self, name: str) -> BaseModelResource | None:
        return self._ask(("model", name), lambda: self._model(name))

    def session(self, tenant: str, name: str) -> TrainingSession | None:
        """The tenant's session that is called `name`."""
        return self._ask(("sessions", tenant), lambda: self._sessions(tenant)).get(name)

    def session_object(self, namespace: str, name: str) -> TrainingSession | None:
        """The session whose resource is called `name`."""
        sessions = self._ask(("sessions", namespace), lambda: self._sessions(namespace)).values()
        return next((each for each in sessions if each.metadata.name == name), None)

    def endpoint(self, session: TrainingSession, *, fresh: bool = False) -> Endpoint | None:
        """Where to reach the session's meter; None while it has none. fresh: ask the store anew."""
        if fresh:
            return self._endpoint(session)
        meta = session.metadata
        return self._ask(("endpoint", meta.namespace, meta.name), lambda: self._endpoint(session))

    def _ask(self, question: tuple[object, ...], read: Callable[[], T]) -> T:
        revision = self._store.revision()
        with self._lock:
            if revision != self._revision or len(self._remembered) > REMEMBERED_MAX:
                self._remembered = {}
                self._revision = revision
            elif question in self._remembered:
                found: T = self._remembered[question]
                return found
        answer = read()
        with self._lock:
            if revision == self._revision:
                # Read at or after `revision`: at worst newer, and then forgotten at the next question.
                self._remembered[question] = answer
        return answer

    def _keys(self) -> dict[str, AccessKey]:
        return {key.spec.access_key_id: key for key in self._store.list(AccessKey)}

    def _tenants(self) -> dict[str, Tenant]:
        return {tenant.metadata.name: tenant for tenant in self._store.list(Tenant)}

    def _model(self, name: str) -> BaseModelResource | None:
        models = self._store.list(BaseModelResource)
        return next((model for model in models if model.metadata.name == name), None)

    def _sessions(self, tenant: str) -> dict[str, TrainingSession]:
        # Reversed: of two with one name, which the admission refuses, the older is meant.
        sessions = reversed(self._store.list(TrainingSession, tenant))
        return {session_name(session): session for session in sessions}

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
