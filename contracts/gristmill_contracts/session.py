"""The TrainingSession resource: one live session of one tenant on one base model."""

from typing import Annotated, Final, Literal

from pydantic import Field

from gristmill_contracts import limits
from gristmill_contracts.resources import (
    SET,
    Conditions,
    Count,
    Decimal,
    Model,
    NameRef,
    ObjectName,
    OptionalName,
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
    targets: list[LoraTarget] = Field(default_factory=list, max_length=16, json_schema_extra=SET)
    """Which projections get an adapter; empty = every linear layer of the decoder's blocks."""


class FullSpec(Model):
    """All weights are trained. Not served yet: such a session is not accepted."""


class BaseModelRef(Model):
    """A model and the way to run it."""

    name: ObjectName
    """Name of the BaseModel."""
    profile: ObjectName = "default"
    """One of the model's profiles: devices, memory, placement."""


OUTPUT_PATH_PATTERN: Final = (
    r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
    r"(/+[^/.\x00-\x1f][^/\x00-\x1f]*(/[^/.\x00-\x1f][^/\x00-\x1f]*)*)?/*)?$"
)
"""No part begins with a dot: neither `..`, nor the names under which files are still being written."""


class OutputSpec(Model):
    """Where checkpoints go."""

    path: str = Field(default="", max_length=1024, pattern=OUTPUT_PATH_PATTERN)
    """s3:// location of checkpoints; empty = the tenant's default bucket and the session's name."""
    checkpoint_group: str = Field(default="sagemaker-default", min_length=1, max_length=63)
    """The group that checkpoints are registered in."""


class IdleSpec(Model):
    """When an idle session gives its devices back."""

    park_after_seconds: int = Field(default=900, ge=0, le=604_800)
    """After this long without an operation the session may be parked; 0 = never."""


class SessionLimits(Model):
    """How long the session may take. A limit that is set may only grow."""

    pending_seconds: int = Field(default=86_400, ge=30, le=604_800)
    """How long the session may wait for its first start before it fails."""
    wake_seconds: int = Field(default=600, ge=30, le=3600)
    """How long a parked session may take to wake."""
    lifetime_seconds: int | None = Field(default=None, ge=60, le=2_592_000)
    """The session expires this long after its first start; not set = never."""


class FailurePolicy(Model):
    """What happens when the pods fail."""

    max_restarts: int = Field(default=3, ge=0, le=20)
    """How many failures without progress in between are tried again."""
    backoff_seconds: int = Field(default=10, ge=1, le=600)
    """Pause before the first restart; it doubles."""
    backoff_max_seconds: int = Field(default=300, ge=1, le=3600)
    """Longest pause before a restart; at least backoffSeconds."""
    fatal_exit_codes: list[Annotated[int, Field(ge=1, le=255)]] = Field(
        default_factory=list, max_length=16, json_schema_extra=SET
    )
    """Exit codes of the worker that fail the session at once."""


class StorageSpec(Model):
    """The session's volume: operation log, snapshots, checkpoints on their way."""

    size: Quantity = "10Gi"
    """Size of the volume, as 10Gi; it may only grow."""
    storage_class_name: str = Field(default="", max_length=253)
    """Storage class; empty = the cluster's default."""
    retain: Literal["Retain", "Delete"] = "Retain"
    """Whether the volume outlives the session."""
    durability: Literal["Volume", "Ledger"] = "Volume"
    """When a result may leave: once it is on the volume, or once the ledger has acknowledged it; Ledger is not served
    yet."""
    retain_seconds: int = Field(default=604_800, ge=0, le=31_536_000)
    """A kept volume holds prompts: it is purged after this."""


class BudgetSpec(Model):
    """What the session may spend: tokens or money, not both."""

    max_tokens: int | None = Field(default=None, ge=1, le=limits.RESOURCE_INTEGER_MAX)
    """Tokens of all types that the session may use."""
    max_cost: Decimal | None = None
    """Money that the session may cost, in the rate card's currency, as 12.50."""


class EncryptionSpec(Model):
    """How checkpoints are encrypted."""

    key_ref: str = Field(default="", max_length=253)
    """Name of one of the tenant's encryption keys; empty = none."""


DISPLAY_NAME_PATTERN: Final = r"^([a-zA-Z0-9](-*[a-zA-Z0-9]){0,62})?$"


class TrainingSessionSpec(Model):
    """What the session should be. What it is made of never changes: make another session."""

    display_name: str = Field(
        default="", max_length=limits.SESSION_NAME_CHARS_MAX, pattern=DISPLAY_NAME_PATTERN
    )
    """The name that clients use; empty = the object's name. Unique within the tenant. It never changes."""
    client_token: str = Field(default="", max_length=limits.CLIENT_TOKEN_CHARS_MAX)
    """Makes a create that is sent again the same create. It never changes."""
    base_model_ref: BaseModelRef
    """The model that is trained. It never changes."""
    lora: LoraSpec = Field(default_factory=LoraSpec)
    """The adapter that is trained: set this, as {} for the defaults, or full. It never changes."""
    full: FullSpec | None = None
    """All weights are trained: not with lora, and not served yet."""
    workers: int = Field(default=1, ge=1, le=64)
    """How many worker pods (ranks) the session has. It never changes."""
    desired_state: Literal["Running", "Parked", "Stopped"] = "Running"
    """What the session should be. Stopped is for ever; Parked is not served yet."""
    idle: IdleSpec = Field(default_factory=IdleSpec)
    """When an idle session gives its devices back. On record; no session is parked yet."""
    limits: SessionLimits = Field(default_factory=SessionLimits)
    """How long the session may take. A limit that is set may only grow."""
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    """What happens when the pods fail."""
    storage: StorageSpec = Field(default_factory=StorageSpec)
    """The session's volume: operation log, snapshots, checkpoints on their way."""
    rate_card_ref: NameRef | None = None
    """The prices; not set = the tenant's. It never changes."""
    budget: BudgetSpec | None = None
    """What the session may spend; not set = the tenant's budget alone. It may change at any time: operations that
    could pass it wait, and go on when it is raised."""
    queue_name: OptionalName = ""
    """Queue that the session waits in; empty = the tenant's. It never changes. Not served yet."""
    priority_class_name: str = Field(default="", max_length=63)
    """Priority class of the pods; empty = the tenant's. It never changes."""
    project: str = Field(default="", max_length=63)
    """What usage is grouped by within the tenant. It never changes."""
    output: OutputSpec = Field(default_factory=OutputSpec)
    """Where checkpoints go. It never changes."""
    encryption: EncryptionSpec = Field(default_factory=EncryptionSpec)
    """How checkpoints are encrypted. Not served yet."""
    service_account_name: OptionalName = ""
    """ServiceAccount of the pods; empty = gm-worker, which has no rights."""
    egress_profiles: list[ObjectName] = Field(
        default_factory=list, max_length=8, json_schema_extra=SET
    )
    """Names of the tenant's egress profiles: where the pods may connect to."""
    role_arn: str = Field(default="", max_length=2048)
    """The role that the creator named; given back to its client. It never changes."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=31_536_000)
    """A finished session is deleted after this; not set = never."""


class UsageStatus(Model):
    """Tokens so far, in four disjoint types. Informative: the ledger is the truth."""

    prefill: Count = 0
    """Prompt tokens that were computed."""
    cached_prefill: Count = 0
    """Prompt tokens that were found in the cache."""
    sample: Count = 0
    """Tokens that were sampled."""
    train: Count = 0
    """Tokens of forward_backward and forward."""


class LastFailure(Model):
    """The last failure of the session's pods."""

    reason: str = Field(default="", max_length=63)
    """Why, in one word for programs."""
    message: str = Field(default="", max_length=1024)
    """Why, for people."""
    exit_code: int | None = Field(default=None, ge=-255, le=255)
    """Exit code of the worker; below 0 = the signal that ended a process outside a container."""
    pod: str = Field(default="", max_length=253)
    """Name of the pod."""
    rank: int | None = Field(default=None, ge=0, le=63)
    """Rank of the pod."""
    time_us: TimeUs | None = Field(default=None, alias="time")
    """When it was seen; the pause before the next attempt counts from here."""


class WorkersStatus(Model):
    """Worker pods of the present attempt."""

    desired: int = Field(default=0, ge=0, le=64)
    """How many there should be."""
    created: int = Field(default=0, ge=0, le=64)
    """How many there are."""
    ready: int = Field(default=0, ge=0, le=64)
    """How many are ready."""


class QueueStatus(Model):
    """What the session waits for."""

    position: int | None = Field(default=None, ge=1, le=1_000_000)
    """Place in the queue; 1 = next."""
    reason: str = Field(default="", max_length=1024)
    """What it waits for, for people."""


class PinnedStatus(Model):
    """What was decided at the session's first start, and stays so over upgrades."""

    base_model_uid: str = Field(default="", max_length=63)
    """metadata.uid of the BaseModel."""
    image: str = Field(default="", max_length=512)
    """The worker's image."""
    meter_image: str = Field(default="", max_length=512)
    """The meter's image."""
    rate_card_uid: str = Field(default="", max_length=63)
    """metadata.uid of the RateCard; empty = not priced."""
    rate_card_hash: str = Field(default="", max_length=64)
    """Hash of the RateCard's spec."""
    template_hash: str = Field(default="", max_length=64)
    """Hash of the pods' template."""


class TrainingSessionStatus(Model):
    """What the operator saw and did. It can be rebuilt at any time."""

    state: State = "Created"
    """A function of spec, deletion and conditions, in the words of the SageMaker API."""
    observed_generation: Count = 0
    """The metadata.generation that this status is of."""
    conditions: Conditions = Field(default_factory=list)
    """Accepted, QuotaReserved, PodsReady, Started, Ready (a call now is accepted), Serving (and runs without a
    start), Parked, Blocked, and in the end Stopped, Expired or Failed."""
    attempt: int = Field(default=0, ge=0, le=2_147_483_647)
    """Number of the present set of pods; it grows with each restart."""
    restarts: int = Field(default=0, ge=0, le=2_147_483_647)
    """Failures without progress in between."""
    workers: WorkersStatus = Field(default_factory=WorkersStatus)
    """Worker pods of the present attempt."""
    endpoint: str = Field(default="", max_length=512)
    """Where the present attempt's meter listens; empty = no attempt serves."""
    start_time_us: TimeUs | None = Field(default=None, alias="startTime")
    """When the session first served."""
    end_time_us: TimeUs | None = Field(default=None, alias="endTime")
    """When it was over."""
    last_activity_time_us: TimeUs | None = Field(default=None, alias="lastActivityTime")
    """When the last operation came in, to the minute."""
    parked_at_us: TimeUs | None = Field(default=None, alias="parkedAt")
    """When the session was parked; not set = it is not parked."""
    queue: QueueStatus | None = None
    """What the session waits for; not set = it waits in no queue."""
    pinned: PinnedStatus | None = None
    """What was decided at the session's first start, and stays so over upgrades."""
    usage: UsageStatus = Field(default_factory=UsageStatus)
    """Tokens so far, at most a minute old. Informative: the ledger is the truth."""
    cost: str = Field(default="", max_length=64)
    """What the usage costs so far, with its currency; empty = not priced. Informative."""
    last_failure: LastFailure | None = None
    """The last failure of the session's pods."""
    last_received_sequence: Count = 0
    """Highest sequence number received from a client."""


class TrainingSession(Resource):
    """A live training session: a base model and an adapter held ready for a client's operations."""

    kind: Literal["TrainingSession"] = "TrainingSession"
    spec: TrainingSessionSpec
    """What the session should be."""
    status: TrainingSessionStatus = Field(default_factory=TrainingSessionStatus)
    """What the operator saw and did."""
