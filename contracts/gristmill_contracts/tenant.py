"""The Tenant resource: who pays, where its sessions run, and what they may use."""

from typing import Annotated, Literal

from pydantic import Field

from gristmill_contracts.resources import (
    Condition,
    Decimal,
    Model,
    NameRef,
    ObjectName,
    Quantity,
    Resource,
)

Cidr = Annotated[str, Field(max_length=43, pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")]


class Subject(Model):
    """Who may use the tenant's namespace."""

    kind: Literal["User", "Group", "ServiceAccount"]
    name: str = Field(max_length=253)
    namespace: str = Field(default="", max_length=63)
    """Namespace of a ServiceAccount."""
    role: Literal["view", "edit"] = "edit"
    """view: read sessions. edit: create and change them."""


class TenantQuota(Model):
    """Bounds of the namespace. What is not set is not bounded."""

    max_sessions: int | None = Field(default=None, ge=0, le=100_000)
    """TrainingSession objects."""
    max_running: int | None = Field(default=None, ge=0, le=100_000)
    """Sessions that hold pods at once; the others wait in order of creation."""
    pods: int | None = Field(default=None, ge=0, le=1_000_000)
    cpu: Quantity | None = None
    memory: Quantity | None = None
    storage: Quantity | None = None
    pvcs: int | None = Field(default=None, ge=0, le=1_000_000)
    devices: dict[Annotated[str, Field(max_length=253)], Quantity] = Field(
        default_factory=dict, max_length=16
    )
    """Devices by resource name, as nvidia.com/gpu: 8."""


class TenantBudget(Model):
    currency: str = Field(default="USD", pattern=r"^[A-Z]{3}$")
    hard: Decimal
    """No operation is admitted past this."""
    soft_percent: int = Field(default=80, ge=1, le=100)
    """A warning at this share of it."""


class EgressProfile(Model):
    """A named set of destinations that a session may ask for."""

    name: ObjectName
    cidrs: list[Cidr] = Field(max_length=32)


class TenantNetwork(Model):
    egress_cidrs: list[Cidr] = Field(default_factory=list, alias="egressCIDRs", max_length=32)
    """Where every pod of the tenant may connect to."""
    egress_profiles: list[EgressProfile] = Field(default_factory=list, max_length=16)
    """Where sessions that name the profile may connect to."""
    gateway_ingress: bool = True
    """Whether the gateway reaches the tenant's meters."""


class TenantKey(Model):
    """An access key for clients. Its two parts lie in the Secret gristmill-key-<name>."""

    name: ObjectName
    service_account_name: str = Field(default="gm-client", max_length=63)
    """What the key may do is what this ServiceAccount of the tenant's namespace may do."""
    revoked: bool = False
    """A revoked key is refused at once, and its name is not used again."""


class NodePool(Model):
    """A named set of nodes that a session may ask for."""

    name: ObjectName
    node_selector: dict[
        Annotated[str, Field(max_length=253)], Annotated[str, Field(max_length=63)]
    ] = Field(default_factory=dict, max_length=16)


class TenantSpec(Model):
    display_name: str = Field(default="", max_length=253)
    """What people call it."""
    namespace: str = Field(default="", max_length=63, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")
    """Namespace of its sessions; empty = gm-<name>."""
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    """What becomes of the namespace when the tenant is deleted."""
    subjects: list[Subject] = Field(default_factory=list, max_length=64)
    """Who may use the namespace."""
    suspended: bool = False
    """No new work is accepted, and what runs is blocked."""
    quota: TenantQuota = Field(default_factory=TenantQuota)
    rate_card_ref: NameRef | None = None
    """The prices of its sessions."""
    budget: TenantBudget | None = None
    """What it may spend."""
    queue_name: str = Field(default="", max_length=63)
    """Queue of its sessions."""
    priority_class_name: str = Field(default="", max_length=63)
    """Priority class of its pods."""
    network: TenantNetwork = Field(default_factory=TenantNetwork)
    pod_security: Literal["restricted"] = "restricted"
    """Pod Security level of the namespace."""
    runtime_class_name: str = Field(default="", max_length=63)
    """Runtime class of its pods."""
    keys: list[TenantKey] = Field(default_factory=list, max_length=64)
    """Access keys of its clients."""
    node_pools: list[NodePool] = Field(default_factory=list, max_length=16)
    """Node pools that its sessions may name."""
    default_bucket: str = Field(default="", max_length=63)
    """Bucket of checkpoints whose session names none."""


class TenantStatus(Model):
    observed_generation: int = 0
    account_id: str = Field(default="", max_length=12)
    """12 digits, allocated by the ledger."""
    namespace: str = Field(default="", max_length=63)
    """The namespace in use."""
    conditions: list[Condition] = Field(default_factory=list, max_length=16)


class Tenant(Resource):
    """One paying customer or team, isolated in a namespace of its own."""

    kind: Literal["Tenant"] = "Tenant"
    spec: TenantSpec = Field(default_factory=TenantSpec)
    status: TenantStatus = Field(default_factory=TenantStatus)
