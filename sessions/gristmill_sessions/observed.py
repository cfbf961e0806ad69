"""What a planner sees of one session, and what it may answer. Values only.

Both the supervisor of one machine and the operator of a cluster observe into these, and both carry
out the same actions, each in its own way.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gristmill_contracts import conditions
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import TrainingSession
from gristmill_sessions.cluster import Cluster, PodRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where the session was put: a meter that was told of it, for one attempt."""

    attempt: int
    endpoint: str
    stopping: bool
    """The meter was told to end it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailures:
    """Ends of the worker that hit this session since it last made progress."""

    count: int = 0
    exit_code: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One session and its surroundings at one moment."""

    session: TrainingSession
    now_us: int
    model_found: bool = True
    tenant_suspended: bool = False
    registered: bool = False
    """The ledger knows tenant and session."""
    seat: Seat | None = None
    heartbeat: Heartbeat | None = None
    """The newest one of this session."""
    meter_answers: bool = True
    """The process of its meter is up."""
    failures: WorkerFailures = field(default_factory=WorkerFailures)
    error: str = ""
    """What went wrong when the last plan was carried out; empty = nothing."""
    workers_max: int = 1
    """How many workers a session may have here."""
    cluster: Cluster | None = None
    """What a cluster shows of it; None = this is one machine."""

    @property
    def platform(self) -> Literal["machine", "cluster"]:
        return "machine" if self.cluster is None else "cluster"

    @property
    def conditions(self) -> list[Condition]:
        """Of the session as it is."""
        return self.session.status.conditions

    @property
    def attempt(self) -> int:
        """The present one; 0 = there was none. Pods tell of it too, should the status have been lost."""
        if self.cluster is None:
            return 0 if self.seat is None else self.seat.attempt
        uid = self.session.metadata.uid
        told = (pod.attempt or 0 for pod in self.cluster.pods if pod.owner_uid == uid)
        return max(self.session.status.attempt, *told, 0)

    @property
    def beat(self) -> Heartbeat | None:
        """The heartbeat, if it is of the present attempt."""
        if self.heartbeat is None or self.attempt == 0:
            return None
        return self.heartbeat if self.heartbeat.view.attempt == self.attempt else None

    @property
    def flushed(self) -> bool:
        """Nothing of the session's usage is left with a meter."""
        if self.cluster is None and self.seat is None:
            return True
        if self.cluster is not None and self._is_known_flushed:
            return True
        beat = self.beat
        return beat is not None and beat.view.state == "Closed" and beat.acked_seq >= beat.head_seq

    @property
    def ran(self) -> bool:
        """There may be usage. Nobody is sent to a meter before Started is written down."""
        beat = self.heartbeat
        told = beat is not None and (beat.head_seq > 0 or beat.view.last_received_number > 0)
        return told or conditions.is_true(self.conditions, conditions.STARTED)

    @property
    def _is_known_flushed(self) -> bool:
        """There was none, or it was said already: no attempt follows the one that it was said of."""
        recorded = self.cluster is not None and self.cluster.gap_recorded
        noted = conditions.is_true(self.conditions, conditions.USAGE_FLUSHED)
        return not self.ran or recorded or noted


# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adopt:
    """Write the finalizer and the durable identity into the resource; in a cluster also whose it is (a label)."""


@dataclass(frozen=True, slots=True)
class Register:
    """Tell the ledger of the tenant and the session."""


@dataclass(frozen=True, slots=True)
class Place:
    """Give the session a meter and a worker, for this attempt.

    In a cluster: all children of the attempt, the pods of all ranks at once. Before it makes a pod it reads
    session and pods anew, and gives up with a conflict unless `status.attempt` is this attempt, the session is
    not being deleted, and no pod of another attempt is left but those in `beside`.
    """

    attempt: int
    beside: tuple[str, ...] = ()
    """uids of pods on lost nodes: they are fenced by their attempt's number, and nobody waits for them."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell the meter to end the session: finish what runs, skip what waits, post all usage.

    In a cluster: the directive `stop` for `status.attempt`, at the ledger.
    """


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take the session from its meter. Its files stay."""


@dataclass(frozen=True, slots=True)
class RemoveFiles:
    """Remove log and snapshots. `flushed` False: keep the log aside, it holds usage nobody has."""

    flushed: bool


@dataclass(frozen=True, slots=True)
class Release:
    """Remove the finalizer, so that the resource can go."""


@dataclass(frozen=True, slots=True)
class DeleteSession:
    """Delete the resource, as its owner could."""


# --- actions of a cluster ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePods:
    """Delete these pods, each with its uid as a precondition. Gone already = done."""

    pods: tuple[PodRef, ...]
    force: bool = False
    """With no grace: their node is gone, nobody will confirm their end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDrainJob:
    """Make the Job that ships the log of a volume whose pod is gone."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveDrainJob:
    """Delete the Job and its pods."""

    name: str
    uid: str


VOLUME_LOST: Final = "VolumeLost"
"""Reason of a gap: the claim is gone. Whoever records it asks the API server itself first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordGap:
    """Tell the ledger that usage of this attempt could not be brought in. Again = the same gap."""

    attempt: int
    acked_seq: int
    head_seq: int | None
    """None = nobody knows."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepVolume:
    """Take the session from the owners of its volume, so that it stays. No volume = done."""

    unflushed: bool
    """Label it: it holds usage nobody has, and is never deleted by us."""


@dataclass(frozen=True, slots=True)
class RemoveVolume:
    """Delete the session's volume. No volume = done; one that is labelled unflushed is never deleted."""


Action = (
    Adopt
    | Register
    | Place
    | Drain
    | Withdraw
    | RemoveFiles
    | Release
    | DeleteSession
    | DeletePods
    | StartDrainJob
    | RemoveDrainJob
    | RecordGap
    | KeepVolume
    | RemoveVolume
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of the first policy that had one. Actions run in order; the first error ends them."""

    policy: str
    actions: tuple[Action, ...] = ()
    conditions: tuple[Condition, ...] = ()
    status: dict[str, Any] = field(default_factory=dict)
    """Other fields of the status to set."""  # Any: each field has its own type
    again_at_us: int | None = None
    """When time alone may change the answer."""
    more: bool = False
    """Another plan follows at once and says it all: the status of this one need not be written if its
    actions succeeded."""
