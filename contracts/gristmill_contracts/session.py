"""Spec and status of our resources. The CRDs are generated from these models.

Field names are camelCase on the wire (YAML) and snake_case here.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from gristmill_contracts import limits

GROUP_VERSION: Literal["gristmill.dev/v1alpha1"] = "gristmill.dev/v1alpha1"

State = Literal[
    "Created", "Scheduled", "Running", "Blocked", "Failed", "Stopping", "Stopped", "Expired", "Deleting",
    "DeletionFailed",
]  # fmt: skip
TERMINAL_STATES: frozenset[State] = frozenset({"Failed", "Expired", "Stopped"})


class Model(BaseModel):
    """Base of all resource parts: camelCase outside, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")


class Metadata(Model):
    name: Annotated[
        str,
        Field(max_length=limits.OBJECT_NAME_CHARS_MAX, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
    ]
    namespace: str = "default"
    """The tenant's namespace. Embedded, it is the tenant's name; "" for cluster-wide kinds."""
    uid: str = ""
    resource_version: int = 0
    generation: int = 0
    creation_time_us: int = 0
    deletion_time_us: int | None = None
    finalizers: list[str] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class Resource(Model):
    """Base of all kinds: what the store needs to know of each."""

    api_version: Literal["gristmill.dev/v1alpha1"] = GROUP_VERSION
    kind: str
    metadata: Metadata


class Condition(Model):
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = Field(default="", max_length=32768)
    last_transition_time_us: int = 0
    observed_generation: int = 0


class LoraSpec(Model):
    rank: int = Field(default=32, ge=1, le=limits.LORA_RANK_MAX)
    alpha: int = Field(default=64, ge=1, le=limits.LORA_ALPHA_MAX)


class BaseModelRef(Model):
    name: str = Field(max_length=63)
    profile: str = Field(default="default", max_length=63)


OUTPUT_PATH_PATTERN: Final = (
    r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
    r"(/+[^/.\x00-\x1f][^/\x00-\x1f]*(/[^/.\x00-\x1f][^/\x00-\x1f]*)*)?/*)?$"
)
"""No part begins with a dot: neither `..`, nor the names under which files are still being written."""


class OutputSpec(Model):
    path: str = Field(default="", max_length=1024, pattern=OUTPUT_PATH_PATTERN)
    """s3:// location of checkpoints; empty = the tenant's default bucket and the session's name."""
    checkpoint_group: str = Field(default="sagemaker-default", max_length=63)


class IdleSpec(Model):
    park_after_seconds: int = Field(default=900, ge=0, le=604_800)


class SessionLimits(Model):
    pending_seconds: int = Field(default=86_400, ge=30, le=604_800)
    wake_seconds: int = Field(default=600, ge=30, le=3600)
    lifetime_seconds: int | None = Field(default=None, ge=60, le=2_592_000)


class FailurePolicy(Model):
    max_restarts: int = Field(default=3, ge=0, le=20)
    backoff_seconds: int = Field(default=10, ge=1, le=600)
    backoff_max_seconds: int = Field(default=300, ge=1, le=3600)
    fatal_exit_codes: list[int] = Field(default_factory=list, max_length=16)


class TrainingSessionSpec(Model):
    display_name: str = Field(default="", max_length=limits.SESSION_NAME_CHARS_MAX)
    client_token: str = Field(default="", max_length=limits.CLIENT_TOKEN_CHARS_MAX)
    base_model_ref: BaseModelRef
    lora: LoraSpec = Field(default_factory=LoraSpec)
    workers: int = Field(default=1, ge=1, le=64)
    desired_state: Literal["Running", "Parked", "Stopped"] = "Running"
    idle: IdleSpec = Field(default_factory=IdleSpec)
    limits: SessionLimits = Field(default_factory=SessionLimits)
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    project: str = Field(default="", max_length=63)
    output: OutputSpec = Field(default_factory=OutputSpec)
    role_arn: str = Field(default="", max_length=2048)
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=31_536_000)


class UsageStatus(Model):
    prefill: int = 0
    cached_prefill: int = 0
    sample: int = 0
    train: int = 0


class LastFailure(Model):
    reason: str = ""
    message: str = Field(default="", max_length=1024)
    exit_code: int | None = None


class TrainingSessionStatus(Model):
    state: State = "Created"
    observed_generation: int = 0
    conditions: list[Condition] = Field(default_factory=list, max_length=16)
    attempt: int = 0
    restarts: int = 0
    endpoint: str = ""
    start_time_us: int | None = None
    end_time_us: int | None = None
    last_activity_time_us: int | None = None
    usage: UsageStatus = Field(default_factory=UsageStatus)
    last_failure: LastFailure | None = None
    last_received_sequence: int = 0


class TrainingSession(Resource):
    kind: Literal["TrainingSession"] = "TrainingSession"
    spec: TrainingSessionSpec
    status: TrainingSessionStatus = Field(default_factory=TrainingSessionStatus)


class TenantSpec(Model):
    display_name: str = ""
    suspended: bool = False
    default_bucket: str = ""


class TenantStatus(Model):
    account_id: str = ""
    """12 digits, allocated by the ledger."""
    conditions: list[Condition] = Field(default_factory=list)


class Tenant(Resource):
    kind: Literal["Tenant"] = "Tenant"
    spec: TenantSpec = Field(default_factory=TenantSpec)
    status: TenantStatus = Field(default_factory=TenantStatus)


class BaseModelSpec(Model):
    path: str = Field(default="", max_length=4096)
    """A prepared folder (config.json, safetensors, tokenizer). Embedded mode and trusting clusters."""
    source: str = Field(default="", max_length=4096)
    """Where it came from: a folder, a GGUF file or a Hugging Face repository."""
    hugging_face_id: str = Field(default="", max_length=4096)
    """What a client gives AutoTokenizer: a repository, or an absolute folder."""
    architecture: str = ""
    vocabulary_size: int = Field(default=0, ge=0)
    context_length: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    revision: str = ""
    """Hash of config and weights: what a checkpoint names as its base."""


class BaseModelResource(Resource):
    kind: Literal["BaseModel"] = "BaseModel"
    spec: BaseModelSpec
    status: dict[str, Any] = Field(default_factory=dict)  # Any: free-form until CLUSTER fills it


class AccessKeySpec(Model):
    """A credential of a tenant. Embedded, it lies in the local store (mode 0600); a Secret in the cluster."""

    access_key_id: str
    secret_access_key: str
    tenant: str
    description: str = ""
    revoked_us: int | None = None


class AccessKey(Resource):
    kind: Literal["AccessKey"] = "AccessKey"
    spec: AccessKeySpec


class EndpointSecretSpec(Model):
    """Per-attempt secret between gateway and meter, and where the meter listens."""

    session_uid: str
    attempt: int
    endpoint: str
    secret: str


class EndpointSecret(Resource):
    kind: Literal["EndpointSecret"] = "EndpointSecret"
    spec: EndpointSecretSpec
