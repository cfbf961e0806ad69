"""What all of our resources share: metadata, conditions, references, times and quantities.

Field names are camelCase on the wire (YAML) and snake_case here. A field's docstring is its description
in the custom resource definition, so it is written for `kubectl explain`.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator
from pydantic.alias_generators import to_camel

from gristmill_contracts import limits

GROUP: Final = "gristmill.dev"
VERSION: Final = "v1alpha1"
GROUP_VERSION: Literal["gristmill.dev/v1alpha1"] = "gristmill.dev/v1alpha1"


def parse_time(value: object) -> object:
    """RFC 3339 text to microseconds since 1970; anything else is left to the validator."""
    if not isinstance(value, str):
        return value
    moment = datetime.fromisoformat(value)
    if moment.tzinfo is None:
        raise ValueError(f"the time {value!r} has no time zone; write it as 2026-01-31T12:00:00Z")
    delta = moment - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def format_time(time_us: int) -> str:
    """Microseconds since 1970 as RFC 3339 text in UTC; a fraction only where there is one."""
    moment = datetime.fromtimestamp(time_us // 1_000_000, UTC)
    fraction = time_us % 1_000_000
    return f"{moment:%Y-%m-%dT%H:%M:%S}{f'.{fraction:06d}' if fraction else ''}Z"


_EPOCH: Final = datetime.fromtimestamp(0, UTC)

TimeUs = Annotated[
    int,
    BeforeValidator(parse_time, json_schema_input_type=str),
    PlainSerializer(format_time, return_type=str, when_used="json"),
    Field(json_schema_extra={"format": "date-time"}),
]
"""Microseconds since 1970 here, RFC 3339 on the wire."""

Version = Annotated[
    int,
    BeforeValidator(
        lambda value: int(value) if isinstance(value, str) and value.isdecimal() else value
    ),
    PlainSerializer(str, return_type=str, when_used="json"),
]
"""A resourceVersion: text on the wire, and comparable."""

QUANTITY_PATTERN: Final = r"^[0-9]+(\.[0-9]{1,9})?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"
Quantity = Annotated[str, Field(max_length=32, pattern=QUANTITY_PATTERN)]
"""A Kubernetes quantity: 500m, 2, 16Gi."""

DECIMAL_PATTERN: Final = r"^[0-9]{1,9}(\.[0-9]{1,9})?$"
Decimal = Annotated[str, Field(max_length=19, pattern=DECIMAL_PATTERN)]
"""An amount of money: decimal text, never a float."""

LABEL_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
ObjectName = Annotated[str, Field(max_length=63, pattern=LABEL_PATTERN)]
OptionalName = Annotated[str, Field(max_length=63, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")]
"""The name of another object, or empty."""

QUALIFIED_KEY_PATTERN: Final = (
    r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[a-zA-Z0-9]([-a-zA-Z0-9_.]*[a-zA-Z0-9])?$"
)
QualifiedKey = Annotated[str, Field(max_length=316, pattern=QUALIFIED_KEY_PATTERN)]
"""The key of a label, taint or resource: nvidia.com/gpu."""
LabelValue = Annotated[
    str, Field(max_length=63, pattern=r"^([a-zA-Z0-9]([-a-zA-Z0-9_.]*[a-zA-Z0-9])?)?$")
]
CurrencyCode = Annotated[str, Field(max_length=3, pattern=r"^[A-Z]{3}$")]

Count = Annotated[int, Field(ge=0, le=limits.RESOURCE_INTEGER_MAX)]


class Model(BaseModel):
    """Base of all resource parts: camelCase outside, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )


_NOT_OURS: Final = frozenset(
    {
        "managedFields",
        "ownerReferences",
        "generateName",
        "selfLink",
        "deletionGracePeriodSeconds",
    }
)
"""Metadata of Kubernetes that nobody here reads; an exported manifest has it."""


class Metadata(Model):
    name: Annotated[
        str,
        Field(max_length=limits.OBJECT_NAME_CHARS_MAX, pattern=LABEL_PATTERN),
    ]
    namespace: str = "default"
    """The tenant's namespace. Embedded, it is the tenant's name; "" for cluster-wide kinds."""
    uid: str = ""
    resource_version: Version = 0
    generation: int = 0
    creation_time_us: TimeUs = Field(default=0, alias="creationTimestamp")
    deletion_time_us: TimeUs | None = Field(default=None, alias="deletionTimestamp")
    finalizers: list[str] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def leave_out_what_is_not_ours(cls, value: Any) -> Any:  # Any: what a YAML file or a server has
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if name not in _NOT_OURS}


class Resource(Model):
    """Base of all kinds: what the store needs to know of each."""

    cluster_wide: ClassVar[bool] = False
    """Whether the kind has no namespace."""

    api_version: Literal["gristmill.dev/v1alpha1"] = GROUP_VERSION
    kind: str
    metadata: Metadata


class Condition(Model):
    """One observation about the resource, as in every Kubernetes API."""

    type: str = Field(max_length=316)
    """What is observed; at most one condition of each type."""
    status: Literal["True", "False", "Unknown"]
    """Whether it is so."""
    reason: str = Field(max_length=1024)
    """Why, in one word for programs."""
    message: str = Field(default="", max_length=limits.CONDITION_MESSAGE_CHARS_MAX)
    """Why, and what happens next, for people."""
    last_transition_time_us: TimeUs = Field(default=0, alias="lastTransitionTime")
    """When the status last changed."""
    observed_generation: Count = 0
    """The metadata.generation that this was observed of."""


def list_map(*keys: str) -> dict[str, Any]:  # Any: JSON schema
    """Extensions of a list's schema: its items are known by `keys`, so that two writers do not collide."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


SET: Final[dict[str, Any]] = {"x-kubernetes-list-type": "set"}  # Any: JSON schema
"""Extension of a list's schema: no item twice."""

Conditions = Annotated[list[Condition], Field(max_length=16, json_schema_extra=list_map("type"))]
"""At most one of each type."""


class ClusterResource(Resource):
    """Base of the kinds that have no namespace."""

    cluster_wide: ClassVar[bool] = True

    @model_validator(mode="before")
    @classmethod
    def be_in_no_namespace(cls, value: Any) -> Any:  # Any: as above
        metadata = value.get("metadata") if isinstance(value, dict) else None
        if not isinstance(metadata, dict):
            return value
        return {**value, "metadata": {**metadata, "namespace": ""}}


class NameRef(Model):
    """Another resource of ours, by name."""

    name: ObjectName
    """Name of the resource."""
