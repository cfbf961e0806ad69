"""The BaseModel resource: frozen weights, and the ways to run them."""

from typing import Annotated, Literal

from pydantic import Field

from gristmill_contracts.resources import (
    SET,
    ClusterResource,
    Conditions,
    Count,
    LabelValue,
    Model,
    ObjectName,
    QualifiedKey,
    Quantity,
    list_map,
)

DIGEST_PATTERN = r"^([a-z0-9./:_-]+@sha256:[a-f0-9]{64})?$"


class ClaimWeights(Model):
    """Weights on a volume that the platform team filled: a claim of this name in each tenant's namespace."""

    claim_name: str = Field(min_length=1, max_length=253)
    """Name of the PersistentVolumeClaim."""
    sub_path: str = Field(default="", max_length=1024)
    """Folder of the volume that holds config.json and the weights; empty = its root."""


class HubWeights(Model):
    """A repository on the Hugging Face hub."""

    repository: str = Field(min_length=1, max_length=253)
    """The repository, as HuggingFaceTB/SmolLM2-135M-Instruct."""
    revision: str = Field(default="main", min_length=1, max_length=253)
    """Commit, tag or branch. A commit is fetched the same for ever."""
    token_secret: str = Field(default="", max_length=253)
    """Secret of the operator's namespace whose key `token` opens the repository; empty = none is needed."""


class ImageWeights(Model):
    """An OCI image whose files are the weights."""

    reference: str = Field(max_length=512, pattern=r"^[a-z0-9./:_-]+@sha256:[a-f0-9]{64}$")
    """The image, by digest: registry/name@sha256:<64 hex digits>."""


class WeightsSpec(Model):
    """Where the weights come from: exactly one of path, pvc, hubRef and image."""

    path: str = Field(default="", max_length=4096)
    """A prepared folder on the node. Embedded mode, and clusters whose policy allows it."""
    pvc: ClaimWeights | None = None
    """Weights on a volume that the platform team filled: a claim of this name in each tenant's namespace."""
    hub_ref: HubWeights | None = None
    """A repository on the Hugging Face hub, fetched once for each tenant."""
    image: ImageWeights | None = None
    """An OCI image whose files are the weights, mounted where the cluster serves image volumes."""


class DeviceRequest(Model):
    """Devices that a device plugin offers."""

    resource_name: QualifiedKey
    """Any extended resource: nvidia.com/gpu, nvidia.com/mig-1g.10gb, amd.com/gpu, ..."""
    count: int = Field(default=1, ge=1, le=64)
    """How many of them each pod gets."""


class DraRequest(Model):
    """Devices that are claimed by dynamic resource allocation."""

    device_class_name: str = Field(min_length=1, max_length=253)
    """Name of the DeviceClass."""
    count: int = Field(default=1, ge=1, le=64)
    """How many devices each pod gets."""
    selectors: list[Annotated[str, Field(max_length=10_240)]] = Field(
        default_factory=list, max_length=8
    )
    """CEL expressions over a device, all of which must hold."""


class Resources(Model):
    """What one worker pod asks for; limits equal requests."""

    cpu: Quantity = "1"
    """Processors, as 4 or 500m."""
    memory: Quantity = "2Gi"
    """Memory, as 16Gi; /dev/shm counts against it."""


class Toleration(Model):
    """A taint that the pods bear, as in every pod's tolerations."""

    key: Annotated[str, Field(max_length=316)] = ""
    """Key of the taint; empty with Exists = every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Whether the taint's value must be equal, or the key alone counts."""
    value: LabelValue = ""
    """Value of the taint, with Equal."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Effect of the taint; empty = every effect."""
    toleration_seconds: int | None = Field(default=None, ge=0, le=2_592_000)
    """How long a NoExecute taint is borne; not set = for ever."""


class Profile(Model):
    """One way to run the model."""

    name: ObjectName = "default"
    """What a session's baseModelRef.profile names. A session that names none takes `default`."""
    workers: int = Field(default=1, ge=1, le=64)
    """Ranks of a session that names no number."""
    resources: Resources = Field(default_factory=Resources)
    """What each worker pod asks for; limits equal requests."""
    device: DeviceRequest | None = None
    """Devices of each pod from a device plugin; not with dra."""
    dra: DraRequest | None = None
    """Devices of each pod by dynamic resource allocation; not with device."""
    node_selector: dict[QualifiedKey, LabelValue] = Field(default_factory=dict, max_length=16)
    """Labels that a node must have."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=16)
    """Taints that the pods bear."""
    shm_size: Quantity = "1Gi"
    """Size of /dev/shm."""
    port: int = Field(default=29_500, ge=1024, le=65_535)
    """Rendezvous port of multi-rank sessions."""


class TenantSelector(Model):
    """Which tenants."""

    match_names: list[ObjectName] = Field(
        default_factory=list, max_length=256, json_schema_extra=SET
    )
    """Tenants that may use the model; empty = all."""


class BaseModelSpec(Model):
    """The weights, the image that runs them, and the ways to run it. Other weights are another BaseModel."""

    image: str = Field(default="", max_length=512, pattern=DIGEST_PATTERN)
    """The worker's image, by digest: registry/name@sha256:<64 hex digits>. It never changes. Embedded mode
    does not use it."""
    weights: WeightsSpec = Field(default_factory=WeightsSpec)
    """Where the weights come from: exactly one of path, pvc, hubRef and image. It never changes."""
    source: str = Field(default="", max_length=4096)
    """Where it came from: a folder, a GGUF file or a Hugging Face repository."""
    hugging_face_id: str = Field(default="", max_length=4096)
    """What a client gives AutoTokenizer: a repository, or an absolute folder."""
    architecture: str = Field(default="", max_length=128)
    """Class of the model, as LlamaForCausalLM. It never changes."""
    vocabulary_size: int = Field(default=0, ge=0, le=16_777_216)
    """Token ids are below this; 0 = not known."""
    context_length: int = Field(default=0, ge=0, le=16_777_216)
    """Tokens that one sequence may have; 0 = not known."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the frozen weights are kept and computed in."""
    revision: str = Field(default="", max_length=128)
    """Hash of config and weights: what a checkpoint names as its base."""
    chat_template: str = Field(default="", max_length=65_536)
    """Replaces the tokenizer's own template. Not served yet."""
    profiles: list[Profile] = Field(
        default_factory=lambda: [Profile()],
        min_length=1,
        max_length=16,
        json_schema_extra=list_map("name"),
    )
    """Ways to run the model, each with a name of its own."""
    allowed_tenants: TenantSelector = Field(default_factory=TenantSelector)
    """Which tenants may use the model; not set = all."""
    deprecated: bool = False
    """No new sessions; running ones go on."""


class BaseModelStatus(Model):
    """What the operator saw and did. It can be rebuilt at any time."""

    observed_generation: Count = 0
    """The metadata.generation that this status is of."""
    conditions: Conditions = Field(default_factory=list)
    """Ready, WeightsAvailable, and DevicesOffered: some node has what a profile asks for."""


class BaseModelResource(ClusterResource):
    """Frozen weights that sessions train adapters on."""

    kind: Literal["BaseModel"] = "BaseModel"
    spec: BaseModelSpec = Field(default_factory=BaseModelSpec)
    """The model."""
    status: BaseModelStatus = Field(default_factory=BaseModelStatus)
    """What the operator saw and did."""
