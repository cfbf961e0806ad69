"""What the API server holds of our kinds, as the watches and our own writes have told.

Objects are known by uid: what is older than what is known is dropped, and so is all that is told of an
object after its end. Reordered and repeated news therefore do no harm.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from gristmill_contracts import labels
from gristmill_contracts.session import TrainingSession
from gristmill_operator.kinds import SESSIONS, Kind
from gristmill_operator.seams import Json
from gristmill_operator.trim import trim

ENDED_MAX: Final = 50_000
"""Uids of objects that are known to be gone."""

Place = tuple[str, str]
"""Namespace and name."""


@dataclass(slots=True)
class _Shelf:
    """All objects of one kind."""

    objects: dict[Place, Json] = field(default_factory=dict)
    by_uid: dict[str, Place] = field(default_factory=dict)
    by_namespace: dict[str, set[Place]] = field(default_factory=dict)
    by_session: dict[Place, set[Place]] = field(default_factory=dict)
    """Namespace and session label -> the objects that carry it."""


@dataclass(slots=True)
class ObjectCache:
    """The implementation of `seams.Cache`."""

    _shelves: dict[Kind, _Shelf] = field(default_factory=dict)
    _ended: OrderedDict[str, None] = field(default_factory=OrderedDict)

    # --- questions -------------------------------------------------------------------------------

    def get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        return self._shelf(kind).objects.get((namespace, name))

    def by_uid(self, kind: Kind, uid: str) -> Json | None:
        shelf = self._shelf(kind)
        place = shelf.by_uid.get(uid)
        return None if place is None else shelf.objects[place]

    def list(self, kind: Kind, namespace: str | None = None) -> Sequence[Json]:
        shelf = self._shelf(kind)
        if namespace is None:
            return [*shelf.objects.values()]
        return [shelf.objects[place] for place in shelf.by_namespace.get(namespace, ())]

    def children(
        self, kind: Kind, owner: TrainingSession, *, foreign: bool = False
    ) -> Sequence[Json]:
        meta, shelf = owner.metadata, self._shelf(kind)
        places = shelf.by_session.get((meta.namespace, meta.name), ())
        found = (shelf.objects[place] for place in places)
        return [body for body in found if foreign or _may_belong(body, meta.uid)]

    def uids(self, kind: Kind) -> set[str]:
        return set(self._shelf(kind).by_uid)

    def count(self, kind: Kind) -> int:
        return len(self._shelf(kind).objects)

    # --- news ------------------------------------------------------------------------------------

    def put(self, kind: Kind, body: Json) -> bool:
        """Take over what `body` says, unless something newer is known. True if it was news."""
        meta = body["metadata"]
        place, uid = _place(meta), meta["uid"]
        if uid in self._ended:
            return False
        shelf = self._shelf(kind)
        known = shelf.objects.get(place)
        if known is not None and version_of(known) >= version_of(body):
            return False
        if known is not None:
            self._take_off(shelf, place, known)
        kept = trim(kind, body)
        shelf.objects[place] = kept
        shelf.by_uid[kept["metadata"]["uid"]] = place
        shelf.by_namespace.setdefault(place[0], set()).add(place)
        session = _session_label(kept)
        if session:
            shelf.by_session.setdefault((place[0], session), set()).add(place)
        return True

    def remove(self, kind: Kind, namespace: str, name: str, uid: str) -> bool:
        """The object with this uid is gone, for good. True if it was known."""
        self._ended[uid] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        shelf, place = self._shelf(kind), (namespace, name)
        known = shelf.objects.get(place)
        if known is None or known["metadata"]["uid"] != uid:
            return False
        self._take_off(shelf, place, known)
        return True

    def _take_off(self, shelf: _Shelf, place: Place, known: Json) -> None:
        del shelf.objects[place]
        shelf.by_uid.pop(known["metadata"]["uid"], None)
        _take_out(shelf.by_namespace, place[0], place)
        _take_out(shelf.by_session, (place[0], _session_label(known)), place)

    def _shelf(self, kind: Kind) -> _Shelf:
        shelf = self._shelves.get(kind)
        if shelf is None:
            shelf = self._shelves[kind] = _Shelf()
        return shelf


K = TypeVar("K")


def _take_out(index: dict[K, set[Place]], key: K, place: Place) -> None:
    places = index.get(key)
    if places is not None:
        places.discard(place)
        if not places:
            del index[key]


def version_of(body: Json) -> int:
    """The resourceVersion: a number that grows with every change of the store."""
    text = str(body["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def controller_of(body: Json) -> Json | None:
    """The owner reference of the controller."""
    references: Iterable[Json] = body["metadata"].get("ownerReferences") or ()
    return next((each for each in references if each.get("controller")), None)


def session_of(body: Json) -> str:
    """Name of the session that a child belongs to: its owner, else what its label says; "" = none."""
    owner = controller_of(body)
    if owner is None:
        return _session_label(body)
    if owner["kind"] == SESSIONS.kind and owner["apiVersion"] == SESSIONS.api_version:
        return str(owner["name"])
    # A pod of a Job of ours: the Job is the session's child, and both carry its label.
    return _session_label(body) if owner["kind"] == "Job" else ""


def _may_belong(body: Json, uid: str) -> bool:
    owner = controller_of(body)
    return owner is None or owner["uid"] == uid or owner["kind"] == "Job"


def _session_label(body: Json) -> str:
    return str((body["metadata"].get("labels") or {}).get(labels.SESSION, ""))


def _place(meta: Json) -> Place:
    return meta.get("namespace", ""), meta["name"]
