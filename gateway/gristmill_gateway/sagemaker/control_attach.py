"""Whether a create may have the session that has its name already. Pure."""

from typing import Any

from gristmill_contracts import labels
from gristmill_contracts.errors import ConflictError
from gristmill_contracts.http import SessionView
from gristmill_contracts.session import TrainingSession
from gristmill_gateway import locations
from gristmill_gateway.sagemaker import control_session
from gristmill_sessions.identity import session_name


def created_here(session: TrainingSession) -> bool:
    return session.metadata.annotations.get(labels.CREATED_BY) == labels.CREATED_BY_SAGEMAKER


def check_attach(
    existing: TrainingSession,
    wanted: TrainingSession,
    account_id: str,
    bucket: str,
    view: SessionView | None,
) -> None:
    """Whether a create may have the session of that name. Raises ConflictError naming what is against it.

    A create that the client sent again (same token) has the session it made. An applied session that
    matches may be attached to while it received no operation: a new client counts from 1.
    """
    name = session_name(existing)
    found = differences(existing, wanted, account_id, bucket)
    if created_here(existing):
        if (
            existing.spec.client_token
            and existing.spec.client_token == wanted.spec.client_token
            and not found
        ):
            return
        raise ConflictError(
            f"Training session {name} already exists; choose another TrainingSessionName"
        )
    status = control_session.reported_status(existing, view)
    if status not in ("Created", "Scheduled", "Running"):
        raise ConflictError(
            f"Training session {name} was applied and is {status}, so it cannot be attached to; "
            "choose another TrainingSessionName"
        )
    if found:
        raise ConflictError(
            f"Training session {name} was applied with other values: {'; '.join(found)}; send the same "
            "values to attach to it, or choose another TrainingSessionName"
        )
    if control_session.last_received(existing, view) > 0:
        raise ConflictError(
            f"Training session {name} has received operations up to sequence number "
            f"{control_session.last_received(existing, view)}, and a new client would count from 1; choose another "
            "TrainingSessionName"
        )


def differences(
    applied: TrainingSession, wanted: TrainingSession, account_id: str, bucket: str
) -> list[str]:
    """Where a create disagrees with an applied session, as sentences; empty = it may attach.

    An applied session that names no role agrees with any; its output path defaults as in `locations`.
    """
    name = session_name(applied)
    pairs = [
        ("base model", applied.spec.base_model_ref.name, wanted.spec.base_model_ref.name),
        ("LoraConfig.Rank", applied.spec.lora.rank, wanted.spec.lora.rank),
        ("LoraConfig.Alpha", applied.spec.lora.alpha, wanted.spec.lora.alpha),
        (
            "OutputConfig.S3Location.Path",
            locations.session_output(applied.spec.output.path, name, account_id, bucket).uri,
            locations.session_output(wanted.spec.output.path, name, account_id, bucket).uri,
        ),
        (
            "model package group",
            applied.spec.output.checkpoint_group,
            wanted.spec.output.checkpoint_group,
        ),
        ("RoleArn", applied.spec.role_arn or wanted.spec.role_arn, wanted.spec.role_arn),
        (
            "Tags",
            control_session.kept_request(applied).get("Tags", []),
            control_session.kept_request(wanted).get("Tags", []),
        ),
        (
            "VpcConfig",
            _network(applied, wanted),
            control_session.kept_request(wanted).get("VpcConfig"),
        ),
    ]
    return [f"{field} is {has!r}, not {asked!r}" for field, has, asked in pairs if has != asked]


def _network(applied: TrainingSession, wanted: TrainingSession) -> Any:  # Any: JSON
    """An applied session names its egress profiles in the spec, and has no VpcConfig to compare."""
    kept, asked = (
        control_session.kept_request(applied).get("VpcConfig"),
        wanted.spec.egress_profiles,
    )
    same = sorted(applied.spec.egress_profiles) == sorted(asked)
    return (
        control_session.kept_request(wanted).get("VpcConfig")
        if kept is None and asked and same
        else kept
    )
