"""The Tenant resource: who pays, where its sessions run, and what they may use."""

from typing import Annotated, Literal

from pydantic import Field

from gristmill_contracts.resources import (
    LABEL_PATTERN,
    SET,
    ClusterResource,
    Conditions,
    Count,
    CurrencyCode,
    Decimal,
    LabelValue,
    Model,
    NameRef,
    ObjectName,
    OptionalName,
    QualifiedKey,
    Quantity,
    list_map,
)

PriorityClass = Annotated[str, Field(min_length=1, max_length=63)]
Cidr = Annotated[str, Field(max_length=43, pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")]


class Subject(Model):
    """Who may use the tenant's namespace."""

    kind: Literal["User", "Group", "ServiceAccount"]
    """What the name is a name of."""
    name: str = Field(min_length=1, max_length=253)
    """Name of the user, group or ServiceAccount, as the API server knows it."""
    namespace: OptionalName = ""
    """Namespace of a ServiceAccount; empty for users and groups."""
    role: Literal["view", "edit"] = "edit"
    """view: read sessions. edit: create and change them."""


class TenantQuota(Model):
    """Bounds of the namespace. What is not set is not bounded."""

    max_sessions: int | None = Field(default=None, ge=0, le=100_000)
    """TrainingSession objects."""
    max_running: int | None = Field(default=None, ge=0, le=100_000)
    """Sessions that hold pods at once; the others wait in order of creation."""
    pods: int | None = Field(default=None, ge=0, le=1_000_000)
    """Pods at once."""
    cpu: Quantity | None = None
    """Processors that all pods request together."""
    memory: Quantity | None = None
    """Memory that all pods request together."""
    storage: Quantity | None = None
    """Size of all volumes together."""
    pvcs: int | None = Field(default=None, ge=0, le=1_000_000)
    """PersistentVolumeClaims."""
    devices: dict[QualifiedKey, Quantity] = Field(default_factory=dict, max_length=16)
    """Devices by resource name, as nvidia.com/gpu: 8."""


class TenantBudget(Model):
    """What the tenant may spend."""

    currency: CurrencyCode = "USD"
    """ISO 4217 code; that of the tenant's rate card."""
    hard: Decimal
    """No operation is started that could pass this amount, as 250.00."""
    soft_percent: int = Field(default=80, ge=1, le=100)
    """A warning at this share of it."""


class EgressProfile(Model):
    """A named set of destinations that a session may ask for."""

    name: ObjectName
    """What a session's egressProfiles name."""
    cidrs: list[Cidr] = Field(max_length=32)
    """Address ranges that the session's pods may connect to, as 198.51.100.0/24."""


class TenantNetwork(Model):
    """Where the tenant's pods may connect to. Nothing is allowed that is not named here or needed by us."""

    egress_cidrs: list[Cidr] = Field(default_factory=list, alias="egressCIDRs", max_length=32)
    """Where every pod of the tenant may connect to; never to nodes, their pods or the API server, which a range
    around them leaves out."""
    egress_profiles: list[EgressProfile] = Field(
        default_factory=list, max_length=16, json_schema_extra=list_map("name")
    )
    """Where sessions that name the profile may connect to."""
    gateway_ingress: bool = True
    """Whether the gateway reaches the tenant's meters."""


class TenantKey(Model):
    """An access key for clients. Its two parts lie in the Secret gristmill-key-<name>."""

    name: Annotated[str, Field(max_length=49, pattern=LABEL_PATTERN)]
    """Name of the key. Its two parts lie in the Secret gristmill-key-<name> of the tenant's namespace."""
    service_account_name: ObjectName = "gm-client"
    """What the key may do is what this ServiceAccount of the tenant's namespace may do."""
    revoked: bool = False
    """A revoked key is refused at once, and its name is not used again."""


class NodePool(Model):
    """A named set of nodes that a session may ask for."""

    name: ObjectName
    """What a session names it by."""
    node_selector: dict[QualifiedKey, LabelValue] = Field(default_factory=dict, max_length=16)
    """Labels that a node of the pool has."""


class TenantSpec(Model):
    """Who the tenant is, where its sessions run, and what they may use."""

    display_name: str = Field(default="", max_length=253)
    """What people call it."""
    namespace: OptionalName = ""
    """Namespace of its sessions; empty = gm-<name>. It never changes, and is no namespace of the system."""
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    """What becomes of the namespace when the tenant is deleted: it stays, or it goes with all in it."""
    subjects: list[Subject] = Field(default_factory=list, max_length=64)
    """Who may use the namespace."""
    suspended: bool = False
    """No new work is accepted, and what runs is blocked."""
    quota: TenantQuota = Field(default_factory=TenantQuota)
    """Bounds of the namespace. What is not set is not bounded."""
    rate_card_ref: NameRef | None = None
    """The prices of sessions that name none; not set = their tokens are counted and not priced."""
    budget: TenantBudget | None = None
    """What it may spend; not set = no bound. Operations that could pass it wait, and go on when it is raised."""
    queue_name: OptionalName = ""
    """Queue of sessions that name none. Not served yet."""
    priority_class_name: str = Field(default="", max_length=63)
    """Priority class of the pods of sessions that name none."""
    priority_classes: list[PriorityClass] = Field(
        default_factory=list, max_length=16, json_schema_extra=SET
    )
    """Priority classes that sessions may name beside priorityClassName. One that names another does not start:
    its pods would push those of others aside."""
    network: TenantNetwork = Field(default_factory=TenantNetwork)
    """Where its pods may connect to."""
    pod_security: Literal["restricted"] = "restricted"
    """Pod Security level of the namespace."""
    runtime_class_name: str = Field(default="", max_length=63)
    """Runtime class of its pods, as gvisor; empty = the cluster's."""
    keys: list[TenantKey] = Field(
        default_factory=list, max_length=64, json_schema_extra=list_map("name")
    )
    """Access keys of its clients."""
    node_pools: list[NodePool] = Field(
        default_factory=list, max_length=16, json_schema_extra=list_map("name")
    )
    """Node pools that its sessions may name. Not served yet."""
    default_bucket: str = Field(default="", max_length=63)
    """Bucket of checkpoints whose session names none; empty = gristmill-<account id>."""


class TenantStatus(Model):
    """What the operator saw and did. It can be rebuilt at any time."""

    observed_generation: Count = 0
    """The metadata.generation that this status is of."""
    account_id: str = Field(default="", max_length=12)
    """The tenant's account in ARNs: 12 digits, allocated by the ledger."""
    namespace: str = Field(default="", max_length=63)
    """The namespace in use."""
    conditions: Conditions = Field(default_factory=list)
    """Ready, NamespaceReady, NetworkReady, QuotaReady and BudgetAvailable."""


class Tenant(ClusterResource):
    """One paying customer or team, isolated in a namespace of its own."""

    kind: Literal["Tenant"] = "Tenant"
    spec: TenantSpec = Field(default_factory=TenantSpec)
    """Who the tenant is, where its sessions run, and what they may use."""
    status: TenantStatus = Field(default_factory=TenantStatus)
    """What the operator saw and did."""
