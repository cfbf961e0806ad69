"""Requests of the training session operations, bounded as in the service model."""

from typing import Annotated

from pydantic import Field

from gristmill_contracts import limits
from gristmill_contracts.session import State
from gristmill_gateway.sagemaker.control_fields import (
    EntityName,
    EpochSeconds,
    MaxResults,
    NameContains,
    NextToken,
    Request,
    Tag,
)

_NETWORK_ID = Annotated[str, Field(max_length=32, pattern=r"^[-0-9a-zA-Z]+$")]
_KMS_KEY_ARN = r"^arn:aws[a-z\-]*:kms:[a-z0-9\-]+:[0-9]{12}:key/(mrk-)?[a-f0-9\-]+$"
_ROLE_ARN = r"^arn:aws[a-z\-]*:iam::[0-9]{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+$"


class LoraConfig(Request):
    rank: Annotated[int, Field(ge=1, le=limits.LORA_RANK_MAX)]
    alpha: Annotated[int, Field(ge=1, le=limits.LORA_ALPHA_MAX)]


class VpcConfig(Request):
    security_group_ids: Annotated[list[_NETWORK_ID], Field(min_length=1, max_length=5)]
    subnets: Annotated[list[_NETWORK_ID], Field(min_length=1, max_length=16)]


class ModelConfig(Request):
    base_model_arn: Annotated[str, Field(min_length=1, max_length=2048)]
    """Its form is read by `arns.parse_base_model`."""
    accept_eula: bool | None = None


class S3Location(Request):
    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Its form is read by `locations.parse_s3_uri`."""
    kms_key_arn: (
        Annotated[str, Field(min_length=1, max_length=2048, pattern=_KMS_KEY_ARN)] | None
    ) = None


class OutputConfig(Request):
    s3_location: S3Location


class CreateTrainingSession(Request):
    training_session_name: EntityName
    model_package_group_arn: Annotated[str, Field(min_length=1, max_length=2048)] | None = None
    lora_config: LoraConfig
    role_arn: Annotated[str, Field(min_length=20, max_length=2048, pattern=_ROLE_ARN)]
    vpc_config: VpcConfig | None = None
    model_config_: Annotated[ModelConfig, Field(alias="ModelConfig")]
    """`model_config` is pydantic's own name."""
    output_config: OutputConfig
    tags: Annotated[list[Tag], Field(max_length=50)] | None = None


class KeptRequest(Request):
    """What a create sent that the resource's spec has no field for.

    vpc_config: the tenant's egress profiles and node pools by name, for whoever places the session. On
    one machine there are neither, and it is only told back.
    """

    model_config_: Annotated[ModelConfig, Field(alias="ModelConfig")]
    vpc_config: VpcConfig | None = None
    tags: Annotated[list[Tag], Field(max_length=50)] | None = None


class NamedSession(Request):
    """DescribeTrainingSession, StopTrainingSession, DeleteTrainingSession."""

    training_session_name: EntityName


class ListTrainingSessions(Request):
    next_token: NextToken | None = None
    max_results: MaxResults | None = None
    creation_time_after: EpochSeconds | None = None
    creation_time_before: EpochSeconds | None = None
    name_contains: NameContains | None = None
    status_equals: State | None = None
