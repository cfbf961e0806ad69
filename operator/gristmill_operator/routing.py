"""Which keys a change of one object makes worth a look. Pure: reads the cache alone."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gristmill_contracts import labels
from gristmill_operator.cache import ObjectCache, session_of
from gristmill_operator.kinds import (
    CARDS,
    CHILDREN,
    MODELS,
    NAMESPACES,
    NODES,
    PODS,
    SESSIONS,
    TENANTS,
    Kind,
)
from gristmill_operator.own_addresses import of_node
from gristmill_operator.seams import Json, Key

MODEL_LABEL: Final = "gristmill.dev/model"


def keys_for(
    kind: Kind, before: Json | None, after: Json | None, cache: ObjectCache
) -> Iterable[Key]:
    """`before` None = it is new here, `after` None = it is gone."""
    body = after if after is not None else before
    if body is None:
        return ()
    if kind in CHILDREN:
        return _of_child(body)
    router = _ROUTERS.get(kind)
    return () if router is None else router(before, after, cache)


def is_turn(kind: Kind, before: Json | None, after: Json | None) -> bool:
    """A pod became ready, or is no longer, or ended: its session says so before others are begun."""
    return kind == PODS and _serves(before) != _serves(after)


def session_key(body: Json) -> Key:
    meta = body["metadata"]
    return Key("TrainingSession", meta["namespace"], meta["name"])


def all_keys(cache: ObjectCache) -> Iterator[Key]:
    """Everything that is reconciled."""
    for body in cache.list(TENANTS):
        yield Key("Tenant", "", body["metadata"]["name"])
    for body in cache.list(MODELS):
        yield Key("BaseModel", "", body["metadata"]["name"])
    for body in cache.list(CARDS):
        yield Key("RateCard", "", body["metadata"]["name"])
    for body in cache.list(SESSIONS):
        yield session_key(body)


def queued_beside(body: Json, cache: ObjectCache) -> Iterator[Key]:
    """Sessions of the same namespace that wait for a place: one may have become free."""
    for each in cache.list(SESSIONS, body["metadata"]["namespace"]):
        if (each.get("status") or {}).get("queue") and each is not body:
            yield session_key(each)


def waiting_beside(body: Json, cache: ObjectCache) -> Iterator[Key]:
    """Sessions of the same namespace that wait for a place, or for a name: one may have become free."""
    for each in cache.list(SESSIONS, body["metadata"]["namespace"]):
        if _is_waiting(each) and each is not body:
            yield session_key(each)


def _of_child(body: Json) -> list[Key]:
    meta = body["metadata"]
    known, session = meta.get("labels") or {}, session_of(body)
    if session:
        return [Key("TrainingSession", meta.get("namespace", ""), session)]
    keys: list[Key] = []
    if known.get(MODEL_LABEL):
        keys.append(Key("BaseModel", "", known[MODEL_LABEL]))
    if known.get(labels.TENANT):
        keys.append(Key("Tenant", "", known[labels.TENANT]))
    return keys


def _of_session(before: Json | None, after: Json | None, cache: ObjectCache) -> Iterator[Key]:
    body = _either(before, after)
    yield session_key(body)
    if before is None:
        # Weights from a hub are fetched into the namespace of the session that needs them.
        model = ((body.get("spec") or {}).get("baseModelRef") or {}).get("name")
        if model:
            yield Key("BaseModel", "", model)
    elif after is not None and _generation(before) != _generation(after):
        # What its tenant's namespace lets it do may follow from its spec: volumes, egress.
        namespace = cache.get(NAMESPACES, "", body["metadata"]["namespace"])
        tenant = _label(namespace, labels.TENANT) if namespace else ""
        if tenant:
            yield Key("Tenant", "", tenant)
    if after is None:
        yield from waiting_beside(body, cache)


def _of_tenant(before: Json | None, after: Json | None, cache: ObjectCache) -> Iterator[Key]:
    body = _either(before, after)
    yield Key("Tenant", "", body["metadata"]["name"])
    yield from _told(before, after, _sessions_of_tenant(body, cache))


def _of_model(before: Json | None, after: Json | None, cache: ObjectCache) -> Iterator[Key]:
    name = _either(before, after)["metadata"]["name"]
    yield Key("BaseModel", "", name)
    yield from _told(before, after, _sessions_of_model(name, cache))


def _of_card(before: Json | None, after: Json | None, cache: ObjectCache) -> Iterator[Key]:
    yield Key("RateCard", "", _either(before, after)["metadata"]["name"])
    waiting = (session_key(body) for body in cache.list(SESSIONS) if _is_waiting(body))
    yield from _told(before, after, waiting)


def _of_namespace(before: Json | None, after: Json | None, cache: ObjectCache) -> Iterator[Key]:
    meta = _either(before, after)["metadata"]
    tenant = _label(_either(before, after), labels.TENANT)
    if tenant:
        yield Key("Tenant", "", tenant)
    if after is None or meta.get("deletionTimestamp"):
        for each in cache.list(SESSIONS, meta["name"]):
            yield session_key(each)


def _of_node(before: Json | None, after: Json | None, cache: ObjectCache) -> Iterator[Key]:
    if _addresses(before) != _addresses(after):
        # They are left out of what tenants may reach; of the hub's ranges at the next look at each tenant.
        for each in cache.list(TENANTS):
            network = (each.get("spec") or {}).get("network") or {}
            if network.get("egressCIDRs") or network.get("egressProfiles"):
                yield Key("Tenant", "", each["metadata"]["name"])
    if _node_essence(before) == _node_essence(after):
        return
    name = _either(before, after)["metadata"]["name"]
    for each in cache.list(PODS):
        if (each.get("spec") or {}).get("nodeName") == name:
            yield from _of_child(each)
    for each in cache.list(MODELS):
        yield Key("BaseModel", "", each["metadata"]["name"])


def _either(before: Json | None, after: Json | None) -> Json:
    body = after if after is not None else before
    if body is None:
        raise AssertionError("a change has a before or an after")
    return body


def _told(before: Json | None, after: Json | None, keys: Iterable[Key]) -> Iterable[Key]:
    """`keys`, if others may care: it came, went, or says something else now."""
    return keys if _essence(before) != _essence(after) else ()


def _essence(body: Json | None) -> object:
    if body is None:
        return None
    status, meta = body.get("status") or {}, body["metadata"]
    # The message, too: that of a model's weights says which tenants have them.
    said = [
        (c["type"], c["status"], c.get("reason", ""), c.get("message", ""))
        for c in status.get("conditions") or ()
    ]
    return body.get("spec"), meta.get("deletionTimestamp"), sorted(said), status.get("namespace")


def _sessions_of_tenant(body: Json, cache: ObjectCache) -> Iterator[Key]:
    name = body["metadata"]["name"]
    named = (body.get("spec") or {}).get("namespace") or labels.NAMESPACE_PREFIX + name
    places = {named, (body.get("status") or {}).get("namespace") or named}
    for each in cache.list(SESSIONS):
        label = (each["metadata"].get("labels") or {}).get(labels.TENANT)
        if each["metadata"]["namespace"] in places or label == name:
            yield session_key(each)


def _sessions_of_model(name: str, cache: ObjectCache) -> Iterator[Key]:
    for each in cache.list(SESSIONS):
        if ((each.get("spec") or {}).get("baseModelRef") or {}).get("name") == name:
            yield session_key(each)


def _node_essence(body: Json | None) -> object:
    if body is None:
        return None
    ready = [each["status"] for each in body["status"]["conditions"]]
    return ready, body["status"]["allocatable"], body.get("spec"), body["metadata"].get("labels")


def _addresses(node: Json | None) -> frozenset[str]:
    return frozenset() if node is None else of_node(node)


def _serves(pod: Json | None) -> tuple[str, str]:
    """Its phase, and its Ready condition."""
    status = (pod or {}).get("status") or {}
    found = (each["status"] for each in status.get("conditions") or () if each["type"] == "Ready")
    return status.get("phase", ""), next(found, "")


def _generation(body: Json) -> object:
    return body["metadata"].get("generation")


def _label(body: Json, name: str) -> str:
    return str((body["metadata"].get("labels") or {}).get(name, ""))


def _is_waiting(body: Json) -> bool:
    """It has not come to its first attempt."""
    status = body.get("status") or {}
    return status.get("state", "Created") == "Created" and not status.get("attempt")


_ROUTERS: Final[dict[Kind, Callable[[Json | None, Json | None, ObjectCache], Iterable[Key]]]] = {
    SESSIONS: _of_session,
    TENANTS: _of_tenant,
    MODELS: _of_model,
    CARDS: _of_card,
    NAMESPACES: _of_namespace,
    NODES: _of_node,
}
