"""The TrainingSession resource: one live session of one tenant on one base model."""

from typing import Annotated, Final, Literal

from pydantic import Field

from gristmill_contracts import limits
from gristmill_contracts.resources import (
    Condition,
    Decimal,
    Model,
    NameRef,
    ObjectName,
    Quantity,
    Resource,
    TimeUs,
)

State = Literal[
    "Created", "Scheduled", "Running", "Blocked", "Failed", "Stopping", "Stopped", "Expired", "Deleting",
    "DeletionFailed",
]  # fmt: skip
TERMINAL_STATES: frozenset[State] = frozenset({"Failed", "Expired", "Stopped"})

LoraTarget = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all-linear"
]


class LoraSpec(Model):
    """The adapter that the session trains."""

    rank: int = Field(default=32, ge=1, le=limits.LORA_RANK_MAX)
    """Rank of the adapter's matrices."""
    alpha: int = Field(default=64, ge=1, le=limits.LORA_ALPHA_MAX)
    """The adapter's output is scaled by alpha / rank."""
    targets: list[LoraTarget] = Field(default_factory=list, max_length=16)
    """Which projections get an adapter; empty = every linear layer of the decoder's blocks."""


class FullSpec(Model):
    """All weights are trained. Not served yet: such a session is not accepted."""


class BaseModelRef(Model):
    name: str = Field(max_length=63)
    """Name of the BaseModel."""
    profile: str = Field(default="default", max_length=63)
    """One of the model's profiles: devices, memory, placement."""


OUTPUT_PATH_PATTERN: Final = (
    r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
    r"(/+[^/.\x00-\x1f][^/\x00-\x1f]*(/[^/.\x00-\x1f][^/\x00-\x1f]*)*)?/*)?$"
)
"""No part begins with a dot: neither `..`, nor the names under which files are still being written."""


class OutputSpec(Model):
    path: str = Field(default="", max_length=1024, pattern=OUTPUT_PATH_PATTERN)
    """s3:// location of checkpoints; empty = the tenant's default bucket and the session's name."""
    checkpoint_group: str = Field(default="sagemaker-default", max_length=63)
    """The group that checkpoints are registered in."""


class IdleSpec(Model):
    park_after_seconds: int = Field(default=900, ge=0, le=604_800)
    """After this long without an operation the session may be parked; 0 = never."""


class SessionLimits(Model):
    pending_seconds: int = Field(default=86_400, ge=30, le=604_800)
    """How long the session may wait for its first start before it fails."""
    wake_seconds: int = Field(default=600, ge=30, le=3600)
    """How long a parked session may take to wake."""
    lifetime_seconds: int | None = Field(default=None, ge=60, le=2_592_000)
    """The session expires this long after its creation."""


class FailurePolicy(Model):
    max_restarts: int = Field(default=3, ge=0, le=20)
    """How many failures without progress in between are tried again."""
    backoff_seconds: int = Field(default=10, ge=1, le=600)
    """Pause before the first restart; it doubles."""
    backoff_max_seconds: int = Field(default=300, ge=1, le=3600)
    """Longest pause before a restart."""
    fatal_exit_codes: list[Annotated[int, Field(ge=1, le=255)]] = Field(
        default_factory=list, max_length=16
    )
    """Exit codes of the worker that fail the session at once."""


class StorageSpec(Model):
    """The session's volume: operation log, snapshots, checkpoints on their way."""

    size: Quantity = "10Gi"
    """Size of the volume; it may only grow."""
    storage_class_name: str = Field(default="", max_length=253)
    """Storage class; empty = the cluster's default."""
    retain: Literal["Retain", "Delete"] = "Retain"
    """Whether the volume outlives the session."""
    durability: Literal["Volume", "Ledger"] = "Volume"
    """When a result may leave: once it is on the volume, or once the ledger has acknowledged it."""
    retain_seconds: int = Field(default=604_800, ge=0, le=31_536_000)
    """A kept volume holds prompts: it is purged after this."""


class BudgetSpec(Model):
    """At most one of the two."""

    max_tokens: int | None = Field(default=None, ge=1, le=limits.QUANTITY_MAX)
    """Tokens of all types that the session may use."""
    max_cost: Decimal | None = None
    """Money that the session may cost, in the rate card's currency."""


class EncryptionSpec(Model):
    key_ref: str = Field(default="", max_length=253)
    """Name of one of the tenant's encryption keys."""


class TrainingSessionSpec(Model):
    display_name: str = Field(default="", max_length=limits.SESSION_NAME_CHARS_MAX)
    """The name that clients use; empty = the object's name. Unique within the tenant."""
    client_token: str = Field(default="", max_length=limits.CLIENT_TOKEN_CHARS_MAX)
    """Makes a create that is sent again the same create."""
    base_model_ref: BaseModelRef
    """The model that is trained."""
    lora: LoraSpec = Field(default_factory=LoraSpec)
    full: FullSpec | None = None
    workers: int = Field(default=1, ge=1, le=64)
    """How many worker pods (ranks) the session has."""
    desired_state: Literal["Running", "Parked", "Stopped"] = "Running"
    """What the session should be. Stopped is for ever."""
    idle: IdleSpec = Field(default_factory=IdleSpec)
    limits: SessionLimits = Field(default_factory=SessionLimits)
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    storage: StorageSpec = Field(default_factory=StorageSpec)
    rate_card_ref: NameRef | None = None
    """The prices; not set = the tenant's."""
    budget: BudgetSpec | None = None
    """What the session may spend; not set = the tenant's budget alone."""
    queue_name: str = Field(default="", max_length=63)
    """Queue that the session waits in; empty = the tenant's."""
    priority_class_name: str = Field(default="", max_length=63)
    """Priority class of the pods; empty = the tenant's."""
    project: str = Field(default="", max_length=63)
    """What usage is grouped by within the tenant."""
    output: OutputSpec = Field(default_factory=OutputSpec)
    encryption: EncryptionSpec = Field(default_factory=EncryptionSpec)
    service_account_name: str = Field(default="", max_length=63)
    """ServiceAccount of the pods; empty = gm-worker, which has no rights."""
    egress_profiles: list[ObjectName] = Field(default_factory=list, max_length=8)
    """Names of the tenant's egress profiles: where the pods may connect to."""
    role_arn: str = Field(default="", max_length=2048)
    """The role that the creator named; given back to its client."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=31_536_000)
    """A finished session is deleted after this; not set = never."""


class UsageStatus(Model):
    """Tokens so far. Informative: the ledger is the truth."""

    prefill: int = 0
    cached_prefill: int = 0
    sample: int = 0
    train: int = 0


class LastFailure(Model):
    reason: str = Field(default="", max_length=63)
    message: str = Field(default="", max_length=1024)
    exit_code: int | None = None
    pod: str = Field(default="", max_length=253)
    rank: int | None = None


class WorkersStatus(Model):
    desired: int = 0
    created: int = 0
    ready: int = 0


class QueueStatus(Model):
    position: int | None = None
    """1 = next."""
    reason: str = Field(default="", max_length=1024)


class PinnedStatus(Model):
    """What was decided at the session's first start, and stays so over upgrades."""

    base_model_uid: str = Field(default="", max_length=63)
    image: str = Field(default="", max_length=512)
    meter_image: str = Field(default="", max_length=512)
    rate_card_uid: str = Field(default="", max_length=63)
    rate_card_hash: str = Field(default="", max_length=64)
    template_hash: str = Field(default="", max_length=64)


class TrainingSessionStatus(Model):
    state: State = "Created"
    """A function of spec, deletion and conditions, in the words of the SageMaker API."""
    observed_generation: int = 0
    """The metadata.generation that this status is of."""
    conditions: list[Condition] = Field(default_factory=list, max_length=16)
    attempt: int = 0
    """Number of the present set of pods; it grows with each restart."""
    restarts: int = 0
    """Failures without progress in between."""
    workers: WorkersStatus = Field(default_factory=WorkersStatus)
    endpoint: str = Field(default="", max_length=512)
    """Where the present attempt's meter listens."""
    start_time_us: TimeUs | None = Field(default=None, alias="startTime")
    """When the session first served."""
    end_time_us: TimeUs | None = Field(default=None, alias="endTime")
    """When it was over."""
    last_activity_time_us: TimeUs | None = Field(default=None, alias="lastActivityTime")
    """When the last operation came in, to the minute."""
    parked_at_us: TimeUs | None = Field(default=None, alias="parkedAt")
    queue: QueueStatus | None = None
    pinned: PinnedStatus | None = None
    usage: UsageStatus = Field(default_factory=UsageStatus)
    cost: str = Field(default="", max_length=64)
    """What the usage costs so far, with its currency; empty = not priced. Informative."""
    last_failure: LastFailure | None = None
    last_received_sequence: int = 0
    """Highest sequence number received from a client."""


class TrainingSession(Resource):
    """A live training session: a base model and an adapter held ready for a client's operations."""

    kind: Literal["TrainingSession"] = "TrainingSession"
    spec: TrainingSessionSpec
    status: TrainingSessionStatus = Field(default_factory=TrainingSessionStatus)
