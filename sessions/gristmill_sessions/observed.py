"""What a planner sees of one session, and what it may answer. Values only.

Both the supervisor of one machine and the operator of a cluster observe into these, and both carry
out the same actions, each in its own way.
"""

from dataclasses import dataclass, field
from typing import Any

from gristmill_contracts.http import Heartbeat
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import TrainingSession


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

    @property
    def conditions(self) -> list[Condition]:
        return self.session.status.conditions

    @property
    def beat(self) -> Heartbeat | None:
        """The heartbeat, if it is of the attempt that is seated."""
        if self.seat is None or self.heartbeat is None:
            return None
        return self.heartbeat if self.heartbeat.view.attempt == self.seat.attempt else None

    @property
    def flushed(self) -> bool:
        """Nothing of the session's usage is left with a meter."""
        if self.seat is None:
            return True
        beat = self.beat
        return beat is not None and beat.view.state == "Closed" and beat.acked_seq >= beat.head_seq


# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adopt:
    """Write the finalizer and the durable identity into the resource."""


@dataclass(frozen=True, slots=True)
class Register:
    """Tell the ledger of the tenant and the session."""


@dataclass(frozen=True, slots=True)
class Place:
    """Give the session a meter and a worker, for this attempt."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell the meter to end the session: finish what runs, skip what waits, post all usage."""


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


Action = Adopt | Register | Place | Drain | Withdraw | RemoveFiles | Release | DeleteSession


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
