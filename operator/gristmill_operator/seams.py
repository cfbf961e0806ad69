"""Who calls whom within the operator: the loop, the eyes, the hands.

The loop (`reconcile`) takes a key from the queue, lets the eyes (`observe`) look, asks the planner,
and lets the hands (`apply`) do it. Everything here is called on the one event loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gristmill_contracts.http import Heartbeat
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.session import TrainingSession
from gristmill_operator.kinds import Kind
from gristmill_sessions.observed import Action, Observed

Json = dict[str, Any]  # Any: an object of the API server, as it stands in JSON
"""Read it, never change it: the cache hands out what it holds."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What the queue holds: one object that is to be looked at."""

    kind: Literal["TrainingSession", "Tenant", "BaseModel", "RateCard"]
    namespace: str
    """"" for cluster-wide kinds."""
    name: str


class Cache(Protocol):
    """What the watches have told. Answers in memory; never waits.

    An answer of the API server to a write of ours is in it as soon as the write returns.
    """

    def get(self, kind: Kind, namespace: str, name: str) -> Json | None: ...

    def list(self, kind: Kind, namespace: str | None = None) -> Sequence[Json]:
        """Every object of a kind, in no order; `namespace=None` = all namespaces."""
        ...

    def children(
        self, kind: Kind, owner: TrainingSession, *, foreign: bool = False
    ) -> Sequence[Json]:
        """Those that carry the session's label in its namespace and no controller but this session.

        foreign: those of other controllers, too.
        """
        ...


class Heartbeats(Protocol):
    """The newest heartbeat of each session, from the ledger's stream."""

    @property
    def ledger_answers(self) -> bool:
        """The ledger answered the last poll."""
        ...

    @property
    def caught_up(self) -> bool:
        """Everything that the ledger had when the operator started was read."""
        ...

    def newest(self, uid: SessionUid) -> Heartbeat | None: ...

    def age_s(self, uid: SessionUid) -> float | None:
        """Seconds since the newest one arrived here; None = none did since the operator started."""
        ...


class Cluster(Protocol):
    """Writes to the API server, and reads past the cache.

    `body` needs apiVersion and kind only where it is convenient: they are filled in. Every answer goes
    into the cache; after a create or delete the owning session is not planned again until that is seen
    (or 30 s have passed). Errors: see `gristmill_operator.client`: all are GristmillErrors.
    """

    async def get(self, kind: Kind, namespace: str, name: str) -> Json:
        """Ask the API server itself. Raises NotFoundError."""
        ...

    async def list(self, kind: Kind, namespace: str = "", *, selector: str = "") -> Sequence[Json]:
        """Ask the API server itself; "" = all namespaces."""
        ...

    async def create(self, kind: Kind, body: Json) -> Json:
        """Raises AlreadyExistsError, QuotaError, ForbiddenError, InvalidRequestError, UnavailableError."""
        ...

    async def apply(self, kind: Kind, body: Json, *, subresource: str = "") -> Json:
        """Server-side apply, field manager `gristmill-operator`, force: creates or changes."""
        ...

    async def merge_patch(
        self, kind: Kind, namespace: str, name: str, patch: Json, *, subresource: str = ""
    ) -> Json:
        """JSON merge patch. With metadata.resourceVersion in it: ConflictError if that is stale."""
        ...

    async def json_patch(
        self, kind: Kind, namespace: str, name: str, operations: Sequence[Json]
    ) -> Json:
        """JSON patch (RFC 6902). A failed `test` is a ConflictError."""
        ...

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
        """Delete the object with this uid. No error if it is gone, or another has its name."""
        ...


class Recorder(Protocol):
    """Events that users see. Returns at once; repeats are counted in series, bursts are cut."""

    def record(
        self,
        regarding: Json,
        reason: str,
        note: str,
        *,
        warning: bool = False,
        action: str = "Reconcile",
        related: Json | None = None,
    ) -> None: ...


class Observer(Protocol):
    """The eyes: reads cache and heartbeats, changes nothing, never waits."""

    def observe(self, session: TrainingSession, *, error: str, now_us: int) -> Observed:
        """`session` carries the status as this pass has it so far, which may be newer than the cache.

        error: what went wrong when the last plan was carried out; empty = nothing.
        """
        ...


class Hands(Protocol):
    """Carries out the planner's actions. Each may be done again and ends in the same state."""

    async def do(self, session: TrainingSession, action: Action) -> None:
        """Raises GristmillError or OSError: its message is shown to the user, and the session is tried
        again with backoff (ConflictError and QuotaError: soon, not counted).
        """
        ...

    async def keep_budgets(self, session: TrainingSession) -> None:
        """Tell the ledger where spec.budget changed since the session was registered. Raises nothing."""
        ...


class Reconciler(Protocol):
    """Keeps one Tenant, BaseModel or RateCard (cluster-wide kinds) as it says."""

    async def reconcile(self, name: str) -> float | None:
        """Look once and do what is missing; also called when the object is gone.

        Returns seconds until it should be looked at again though nothing changed; None = at the next
        change or resync (10 min). Raises GristmillError or OSError to be tried again with backoff.
        """
        ...


Reconcilers = Mapping[str, Reconciler]
"""By `Key.kind`."""
