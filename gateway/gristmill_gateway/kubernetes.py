"""The resource store over custom resources: reads from watched caches, writes to the API server.

Access keys and endpoint secrets are no objects of the cluster: they follow from the Tenants, the
sessions' status and the cluster key, so that a gateway may read no Secret of any tenant.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar, cast

from gristmill_contracts import limits, secrets
from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.credentials import (
    AccessKey,
    AccessKeySpec,
    EndpointSecret,
    EndpointSecretSpec,
)
from gristmill_contracts.errors import (
    ConflictError,
    InvalidRequestError,
    InvariantError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.resources import Metadata, Resource
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_gateway.kubernetes_api import ApiServer
from gristmill_gateway.kubernetes_cache import Cache, Made
from gristmill_gateway.kubernetes_objects import (
    COLLECTIONS,
    Json,
    object_to_create,
    patch_between,
    path_of,
    read_object,
    status_patch,
)
from gristmill_gateway.kubernetes_watch import Reflector
from gristmill_gateway.tenancy import namespaces_of
from gristmill_sessions.identity import session_uid

R = TypeVar("R", bound=Resource)
T = TypeVar("T")

CALL_TIMEOUT_S: Final = limits.API_TIMEOUT_S * limits.API_TRIES_MAX
WATCHED: Final[tuple[type[Resource], ...]] = (TrainingSession, Tenant, BaseModelResource)


class KubernetesStore:
    """`ResourceStore`. Made on the event loop that `start` runs on; its calls come from threads of it.

    A session that the cache does not know is asked for at the API server: another gateway may just have
    made it.
    """

    def __init__(self, api: ApiServer, cluster_key: bytes) -> None:
        self._api = api
        self._key = cluster_key
        self._loop = asyncio.get_running_loop()
        self._revision = 0
        self._caches: dict[type[Resource], Cache[Any]] = {
            kind: Cache(self._changed) for kind in WATCHED
        }
        self._keys = Made(
            self._caches[Tenant], lambda all_: access_keys(all_, cluster_key), of_status=True
        )
        self._owners = Made(self._caches[TrainingSession], owners_of, of_status=False)
        self._reflectors = [Reflector(api, kind, self._caches[kind]) for kind in WATCHED]
        self._tasks: list[asyncio.Task[None]] = []
        self._places = threading.BoundedSemaphore(limits.API_CONNECTIONS_MAX)
        """A thread that waits for the API server has one, so that it never has all threads wait."""

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._tasks = [asyncio.create_task(each.run()) for each in self._reflectors]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def away(self) -> list[str]:
        """The kinds whose changes do not arrive just now."""
        return [each.name for each in self._reflectors if each.away]

    def _changed(self) -> None:
        self._revision += 1

    # --- the port --------------------------------------------------------------------------------

    def create(self, resource: R) -> R:
        meta = resource.metadata
        path = path_of(type(resource), meta.namespace)
        try:
            made = self._run(self._api.create(path, object_to_create(resource)))
        except NotFoundError as error:
            raise UnavailableError(
                f"{resource.kind} {meta.name!r} cannot be made in namespace {meta.namespace!r} yet: "
                f"{error.message}"
            ) from error
        return self._keep(type(resource), made)

    def get(self, kind: type[R], namespace: str, name: str) -> R:
        if kind is EndpointSecret:
            return cast(R, self._endpoint(self.get(TrainingSession, namespace, name)))
        if kind is AccessKey:
            found = next((k for k in self.list(kind, namespace) if k.metadata.name == name), None)
        else:
            found = self._filled(kind).get(namespace, name)
        if found is not None:
            return found
        if kind is not TrainingSession:
            raise NotFoundError(f"there is no {kind.__name__} {name!r}")
        return self._read(kind, namespace, name)

    def list(self, kind: type[R], namespace: str | None = None) -> list[R]:
        if kind is AccessKey:
            self._filled(Tenant)
            keys = self._keys.get()
            return [cast(R, k) for k in keys if namespace in (None, k.metadata.namespace)]
        if kind is EndpointSecret:
            return [
                cast(R, self._endpoint(session))
                for session in self._filled(TrainingSession).list(namespace)
                if session.status.endpoint and self._is_owner(session)
            ]
        return self._filled(kind).list(namespace)

    def update(self, resource: R) -> R:
        kind, meta = type(resource), resource.metadata
        known = self._filled(kind).get(meta.namespace, meta.name)
        if known is None or known.metadata.resource_version != meta.resource_version:
            raise ConflictError(
                f"{resource.kind} {meta.name!r} is at another version than {meta.resource_version}; read it "
                "again and repeat the change"
            )
        changes = patch_between(known, resource)
        if not changes:
            return known
        return self._patch(resource, path_of(kind, meta.namespace, meta.name), changes)

    def update_status(self, resource: R) -> R:
        meta = resource.metadata
        path = path_of(type(resource), meta.namespace, meta.name, "status")
        return self._patch(resource, path, status_patch(resource))

    def delete(self, kind: type[R], namespace: str, name: str) -> None:
        """Of the object that is known here: a newer one of its name is left alone."""
        uid = self.get(kind, namespace, name).metadata.uid
        self._run(self._api.delete(path_of(kind, namespace, name), uid))

    def revision(self) -> int:
        for kind in WATCHED:
            self._filled(kind)
        return self._revision

    # --- how -------------------------------------------------------------------------------------

    def _endpoint(self, session: TrainingSession) -> EndpointSecret:
        """Raises NotFoundError, also where the session's identity is another's."""
        if not self._is_owner(session):
            meta = session.metadata
            raise NotFoundError(
                f"session {meta.name} in namespace {meta.namespace} has the identity of an older session; "
                "delete it and apply it again without the annotation gristmill.dev/session-id"
            )
        return endpoint_of(session, self._key)

    def _is_owner(self, session: TrainingSession) -> bool:
        owner = self._owners.get().get(session_uid(session), session.metadata.uid)
        return owner == session.metadata.uid

    def read_session(self, namespace: str, name: str) -> TrainingSession:
        """As it is at the API server this moment."""
        return self._read(TrainingSession, namespace, name)

    def _filled(self, kind: type[R]) -> Cache[R]:
        cache = self._caches.get(kind)
        if cache is None:
            raise InvariantError(f"no {kind.__name__} is watched")
        if not cache.filled:
            raise UnavailableError(
                f"the {COLLECTIONS[kind].plural} of the cluster are not known yet; try again shortly"
            )
        return cache

    def _patch(self, resource: R, path: str, changes: Json) -> R:
        kind, meta = type(resource), resource.metadata
        try:
            return self._keep(kind, self._run(self._api.patch(path, changes)))
        except ConflictError:
            # Ours was old. Whoever tries again finds the newest.
            self._read(kind, meta.namespace, meta.name)
            raise

    def _read(self, kind: type[R], namespace: str, name: str) -> R:
        return self._keep(kind, self._run(self._api.get(path_of(kind, namespace, name))))

    def _keep(self, kind: type[R], content: Json) -> R:
        try:
            resource = read_object(kind, content)
        except ValueError as error:
            raise InvalidRequestError(
                f"the API server's {kind.__name__} is of another version than this gateway: {error}"
            ) from error
        self._loop.call_soon_threadsafe(self._caches[kind].written, resource)
        return resource

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run on the event loop, from a thread of it."""
        if not self._places.acquire(timeout=limits.API_PLACE_WAIT_S):
            call.close()
            raise OverloadedError(
                f"{limits.API_CONNECTIONS_MAX} calls wait for the API server; try again shortly"
            )
        try:
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
            try:
                return future.result(CALL_TIMEOUT_S)
            except TimeoutError as error:
                future.cancel()
                raise UnavailableError(
                    "the API server did not answer in time; try again"
                ) from error
        finally:
            self._places.release()


def owners_of(sessions: list[TrainingSession]) -> dict[SessionUid, str]:
    """Uids of the resources that identities are of. sessions: in creation order.

    The identity is an annotation, which whoever makes a session may choose; the secret of its meter
    follows from it. So of two with one identity the older has it.
    """
    owners: dict[SessionUid, str] = {}
    for session in sessions:
        owners.setdefault(session_uid(session), session.metadata.uid)
    return owners


def access_keys(tenants: list[Tenant], cluster_key: bytes) -> list[AccessKey]:
    """The keys that the tenants declare. Of a tenant without a namespace none opens anything."""
    namespaces = namespaces_of(tenants)
    keys = []
    for tenant in tenants:
        name = tenant.metadata.name
        if name not in namespaces:
            continue
        for key in tenant.spec.keys:
            key_id = secrets.access_key_id(tenant.metadata.uid, key.name)
            account = f"system:serviceaccount:{namespaces[name]}:{key.service_account_name}"
            spec = AccessKeySpec(
                access_key_id=key_id,
                secret_access_key=secrets.access_key_secret(cluster_key, key_id),
                tenant=name,
                service_account=account,
                description=key.name,
                revoked_us=0 if key.revoked else None,
            )
            meta = Metadata(name=key_id.lower(), namespace=name)
            keys.append(AccessKey(metadata=meta, spec=spec))
    return keys


def endpoint_of(session: TrainingSession, cluster_key: bytes) -> EndpointSecret:
    """Where the session's meter listens, and what opens it. Raises NotFoundError while it serves nowhere."""
    meta, status = session.metadata, session.status
    if not status.endpoint:
        raise NotFoundError(f"session {meta.name} in namespace {meta.namespace} is served nowhere")
    uid = session_uid(session)
    return EndpointSecret(
        metadata=Metadata(name=meta.name, namespace=meta.namespace),
        spec=EndpointSecretSpec(
            session_uid=uid,
            attempt=status.attempt,
            endpoint=status.endpoint,
            secret=secrets.attempt_secret(cluster_key, uid, status.attempt),
        ),
    )
