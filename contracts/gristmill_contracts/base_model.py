"""The BaseModel resource: frozen weights, and the ways to run them."""

from typing import Annotated, Literal

from pydantic import Field

from gristmill_contracts.resources import Condition, Model, ObjectName, Quantity, Resource

DIGEST_PATTERN = r"^([a-z0-9./:_-]+@sha256:[a-f0-9]{64})?$"


class ClaimWeights(Model):
    """Weights on a volume that the platform team filled, in the operator's namespace or the tenant's."""

    claim_name: str = Field(max_length=253)
    sub_path: str = Field(default="", max_length=1024)


class HubWeights(Model):
    """A repository on the Hugging Face hub."""

    repository: str = Field(max_length=253)
    revision: str = Field(default="main", max_length=253)
    token_secret: str = Field(default="", max_length=253)
    """Secret of the operator's namespace whose key `token` opens the repository."""


class ImageWeights(Model):
    """An OCI image whose files are the weights."""

    reference: str = Field(max_length=512, pattern=r"^[a-z0-9./:_-]+@sha256:[a-f0-9]{64}$")


class WeightsSpec(Model):
    """Exactly one of them."""

    path: str = Field(default="", max_length=4096)
    """A prepared folder on the node. Embedded mode, and clusters whose policy allows it."""
    pvc: ClaimWeights | None = None
    hub_ref: HubWeights | None = None
    image: ImageWeights | None = None


class DeviceRequest(Model):
    resource_name: str = Field(max_length=253)
    """Any extended resource: nvidia.com/gpu, amd.com/gpu, ..."""
    count: int = Field(default=1, ge=1, le=64)


class DraRequest(Model):
    device_class_name: str = Field(max_length=253)
    count: int = Field(default=1, ge=1, le=64)
    selectors: list[Annotated[str, Field(max_length=10_240)]] = Field(
        default_factory=list, max_length=8
    )
    """CEL expressions over a device."""


class Resources(Model):
    """What one worker pod asks for; limits equal requests."""

    cpu: Quantity = "1"
    memory: Quantity = "2Gi"


class Toleration(Model):
    key: str = Field(default="", max_length=253)
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str = Field(default="", max_length=63)
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    toleration_seconds: int | None = Field(default=None, ge=0)


class Profile(Model):
    """One way to run the model."""

    name: ObjectName = "default"
    workers: int = Field(default=1, ge=1, le=64)
    """Ranks of a session that names no number."""
    resources: Resources = Field(default_factory=Resources)
    device: DeviceRequest | None = None
    dra: DraRequest | None = None
    node_selector: dict[
        Annotated[str, Field(max_length=253)], Annotated[str, Field(max_length=63)]
    ] = Field(default_factory=dict, max_length=16)
    tolerations: list[Toleration] = Field(default_factory=list, max_length=16)
    shm_size: Quantity = "1Gi"
    """Size of /dev/shm."""
    port: int = Field(default=29_500, ge=1024, le=65_535)
    """Rendezvous port of multi-rank sessions."""


class TenantSelector(Model):
    match_names: list[ObjectName] = Field(default_factory=list, max_length=256)
    """Tenants that may use the model; empty = all."""


class BaseModelSpec(Model):
    image: str = Field(default="", max_length=512, pattern=DIGEST_PATTERN)
    """The worker's image, by digest. Not used in embedded mode."""
    weights: WeightsSpec = Field(default_factory=WeightsSpec)
    source: str = Field(default="", max_length=4096)
    """Where it came from: a folder, a GGUF file or a Hugging Face repository."""
    hugging_face_id: str = Field(default="", max_length=4096)
    """What a client gives AutoTokenizer: a repository, or an absolute folder."""
    architecture: str = Field(default="", max_length=128)
    vocabulary_size: int = Field(default=0, ge=0)
    context_length: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    revision: str = Field(default="", max_length=128)
    """Hash of config and weights: what a checkpoint names as its base."""
    chat_template: str = Field(default="", max_length=65_536)
    """Replaces the tokenizer's own template."""
    profiles: list[Profile] = Field(default_factory=lambda: [Profile()], max_length=16)
    """Ways to run the model; one is named `default`."""
    allowed_tenants: TenantSelector = Field(default_factory=TenantSelector)
    deprecated: bool = False
    """No new sessions; running ones go on."""


class BaseModelStatus(Model):
    observed_generation: int = 0
    conditions: list[Condition] = Field(default_factory=list, max_length=16)


class BaseModelResource(Resource):
    """Frozen weights that sessions train adapters on."""

    kind: Literal["BaseModel"] = "BaseModel"
    spec: BaseModelSpec = Field(default_factory=BaseModelSpec)
    status: BaseModelStatus = Field(default_factory=BaseModelStatus)
