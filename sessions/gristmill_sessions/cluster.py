"""What a cluster shows of one session: its pods, its tenant and model, its volume. Values only.

The observer translates what Kubernetes says into the closed sets below; the planner never sees an object
of the API. Texts of the API are kept as they are in the `message` fields: people need them.
"""

from dataclasses import dataclass, field
from typing import Literal

from gristmill_contracts.session import PinnedStatus

Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]

PodReason = Literal[
    "",
    # held up
    "Unschedulable",
    "ResourceNotOffered",
    "ClaimPending",
    "VolumePending",
    "PullingImage",
    "ImagePullFailed",
    "ImageInvalid",
    "StartFailed",
    "MeterNotReady",
    "LoadingWeights",
    # ended
    "WorkerFailed",
    "OutOfMemory",
    "Evicted",
    "Preempted",
    "NodeLost",
    "MeterFailed",
]
"""Why a pod is not ready, or ended. ResourceNotOffered: no node has the resource at all; ImageInvalid: the
reference can never be pulled; StartFailed: the runtime refuses the container (CreateContainerError, ...);
LoadingWeights: all containers run, the worker is not ready; MeterFailed: the meter ended, not the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRef:
    """One pod, and no other that later gets its name."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod that carries the session's label, whoever made it."""

    name: str
    uid: str
    owner_uid: str
    """uid of its controlling owner; "" = it has none. Ours is the TrainingSession."""
    attempt: int | None = None
    """From its label; None = missing or no number."""
    rank: int | None = None
    phase: Phase = "Pending"
    ready: bool = False
    """Its Ready condition."""
    created_us: int = 0
    deleting_since_us: int | None = None
    """When its deletion was asked for (deletionTimestamp less deletionGracePeriodSeconds)."""
    ip: str = ""
    node: str = ""
    """"" = not bound to a node."""
    node_lost_since_us: int | None = None
    """Since when its node is not ready, or gone. None = the node is well, or there is none yet."""
    node_gone: bool = False
    """The node object is gone, or carries the out-of-service taint: nothing of it runs any more."""
    reason: PodReason = ""
    message: str = ""
    """What the API says about it, for people."""
    exit_code: int | None = None
    """Of the worker."""
    disrupted: bool = False
    """Ended from outside (DisruptionTarget, eviction, preemption, node shutdown): does not count."""
    meter_started: bool = True
    """The meter passed its start-up probe. Ranks above 0 have none: True."""
    meter_since_us: int | None = None
    """Since when the meter's container runs; None = it does not."""
    meter_deaths: int = 0
    """How often the meter ended in this pod's life."""
    meter_last_run_s: float | None = None
    """How long the run of the meter lasted that ended last."""
    restart: str = ""
    """Value of the annotation gristmill.dev/restart on the session when the pod was made (the pod carries it)."""

    @property
    def ref(self) -> PodRef:
        return PodRef(name=self.name, uid=self.uid)

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def deleting(self) -> bool:
        return self.deleting_since_us is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantView:
    """The Tenant that the session's namespace belongs to."""

    name: str = ""
    found: bool = True
    ready: bool = True
    suspended: bool = False
    terminating: bool = False
    """The Tenant is being deleted."""
    message: str = ""
    """Why it is not ready."""
    budget_exhausted: bool = False
    budget_message: str = ""
    position: int | None = None
    """Place in the tenant's queue for quota.maxRunning (see `queue.positions`); None = may run now."""
    max_running: int | None = None
    priority_classes: tuple[str, ...] = ()
    """Those that its sessions may name, its own default among them."""
    rate_card_missing: str = ""
    """The RateCard that the session is to be priced by, where there is none of that name; "" = nothing is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """The BaseModel that the session names, and its profile."""

    found: bool = True
    ready: bool = True
    message: str = ""
    """Why it is not ready."""
    deprecated: bool = False
    allowed: bool = True
    """allowedTenants admits the tenant."""
    profile_found: bool = True
    profiles: tuple[str, ...] = ("default",)
    """Names of those that it has."""
    workers: int = 1
    """Ranks that its profile says for a session that names no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiFailure:
    """Why the API server did not make the children of the last `Place`. Forgotten once one was made.

    QuotaExceeded: 403 by a ResourceQuota (its 409 conflicts are retried, never reported). Refused: any
    other 403, as of admission. Invalid: 422 or 400. NameTaken: an object of that name is not ours.
    Unavailable: 429, 5xx, no answer.
    """

    reason: Literal["QuotaExceeded", "Refused", "Invalid", "NameTaken", "Unavailable"]
    message: str
    """The API's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainJob:
    """The Job `<session>-drain-a<attempt>`."""

    name: str
    uid: str
    attempt: int
    state: Literal["Running", "Succeeded", "Failed"] = "Running"
    finished_us: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """The claim `<session>-state`."""

    found: bool = False
    deleting: bool = False
    unflushed: bool = False
    """It carries the label: it holds usage nobody has."""
    owned: bool = False
    """It has the session as an owner, and goes with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All that a cluster shows of one session beside the resource itself."""

    settled: bool = True
    """The caches hold all that we did to this session (expectations, our last status). Nothing is planned before."""
    pods: tuple[Pod, ...] = ()
    name_holder: str = ""
    """An older session of the namespace that is called the same; "" = none, or it was not asked any more."""
    tenant: TenantView = field(default_factory=TenantView)
    model: ModelView = field(default_factory=ModelView)
    pins: PinnedStatus = field(default_factory=PinnedStatus)
    """What a session that starts now would be pinned to."""
    failure: ApiFailure | None = None
    job: DrainJob | None = None
    volume: Volume = field(default_factory=Volume)
    namespace_terminating: bool = False
    ledger_read: bool = True
    """The ledger's heartbeats were read to their end since the operator started."""
    directive_given: bool = False
    """The ledger took `stop` for the present attempt since the operator started."""
    gap_recorded: bool = False
    """The ledger took a `RecordGap` of the present attempt since the operator started."""
    placed: int = 0
    """How many pods of the present attempt were made since the operator started: the status may not say so yet."""
    cost: str = ""
    """What the usage costs so far, with its currency; "" = not known."""
