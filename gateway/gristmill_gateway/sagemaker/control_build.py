"""The resource that a create asks for. Pure."""

from typing import Final

from gristmill_contracts import labels
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import (
    BaseModelRef,
    LoraSpec,
    OutputSpec,
    TrainingSession,
    TrainingSessionSpec,
)
from gristmill_contracts.tenant import Tenant
from gristmill_gateway.object_names import object_name
from gristmill_gateway.sagemaker.control_validate import CreateTrainingSession, KeptRequest

DEFAULT_GROUP: Final = "sagemaker-default"


def build_session(
    request: CreateTrainingSession,
    *,
    tenant: str,
    namespace: str,
    model: str,
    group: str,
    uid: SessionUid,
    token: str,
) -> TrainingSession:
    """The resource of a checked request. model, group: plain names. token: makes a resend the same."""
    name = request.training_session_name
    kept = KeptRequest(
        ModelConfig=request.model_config_, VpcConfig=request.vpc_config, Tags=request.tags
    )
    annotations = {
        labels.SESSION_ID: uid,
        labels.CREATED_BY: labels.CREATED_BY_SAGEMAKER,
        labels.SAGEMAKER_REQUEST: kept.model_dump_json(by_alias=True, exclude_none=True),
    }
    return TrainingSession(
        metadata=Metadata(
            name=object_name(name),
            namespace=namespace,
            labels={labels.TENANT: tenant},
            annotations=annotations,
        ),
        spec=TrainingSessionSpec(
            display_name=name,
            client_token=token,
            base_model_ref=BaseModelRef(name=model),
            lora=LoraSpec(rank=request.lora_config.rank, alpha=request.lora_config.alpha),
            output=OutputSpec(path=request.output_config.s3_location.path, checkpoint_group=group),
            role_arn=request.role_arn,
        ),
    )


def egress_of(request: CreateTrainingSession, tenant: Tenant | None) -> list[str]:
    """The tenant's egress profiles that a create asks for. Raises InvalidRequestError."""
    chosen = [] if request.vpc_config is None else request.vpc_config.security_group_ids
    profiles = [] if tenant is None else tenant.spec.network.egress_profiles
    known = [profile.name for profile in profiles]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise InvalidRequestError(
            f"VpcConfig.SecurityGroupIds: {unknown[0]!r} is no egress profile of the tenant, which has "
            f"{', '.join(known) or 'none'}; name one of them, or leave VpcConfig out"
        )
    return chosen


def with_egress(session: TrainingSession, profiles: list[str]) -> TrainingSession:
    spec = session.spec.model_copy(update={"egress_profiles": profiles})
    return session.model_copy(update={"spec": spec})
