"""Finds the session that a runtime request is about, and whether it takes operations."""

from typing import Final

from gristmill_contracts.errors import (
    ConflictError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from gristmill_contracts.ids import OpId, Stream
from gristmill_contracts.session import State, TrainingSession
from gristmill_gateway import locations
from gristmill_gateway.caller import Caller
from gristmill_gateway.directory import Directory
from gristmill_gateway.operation_ids import read_operation_id
from gristmill_gateway.sagemaker import control_session
from gristmill_gateway.sagemaker.context import RuntimeContext
from gristmill_gateway.sagemaker.model_facts import SessionFacts
from gristmill_sessions.identity import session_name, session_uid

TAKING: Final[frozenset[State]] = frozenset({"Running", "Blocked"})


async def require_session(directory: Directory, caller: Caller, name: str) -> TrainingSession:
    """The caller's session of that name. Raises NotFoundError, also for somebody else's."""
    found = await directory.session(caller.tenant, name, caller.as_of)
    if found is None:
        raise NotFoundError(f"Training session {name[:64]} does not exist")
    return found


async def require_taking(context: RuntimeContext, caller: Caller, name: str) -> TrainingSession:
    """A session that takes the caller's operations.

    Raises NotFoundError, ConflictError, AccessDeniedError, and UnavailableError while its tenant is suspended.
    """
    session = await require_session(context.directory, caller, name)
    namespace = session.metadata.namespace
    await context.access.check(caller.service_account, "update", namespace, lasting=True)
    await _check_not_suspended(context.directory, caller)
    if _takes(session):
        return session
    current = await _fresh(context, session)
    if current is not None and _takes(current):
        return current
    status = "Deleting" if current is None else control_session.reported_status(current, None)
    raise ConflictError(
        f"Training session {name} is {status}; operations are taken while it is Running or Blocked"
    )


async def _check_not_suspended(directory: Directory, caller: Caller) -> None:
    """What was accepted goes on and can be read; nothing new is. The client asks again, with the same number."""
    tenant = await directory.tenant(caller.tenant, caller.as_of)
    if tenant is not None and tenant.spec.suspended:
        raise UnavailableError(
            f"tenant {caller.tenant!r} is suspended: no operation is taken until its spec.suspended is false; "
            "try again then"
        )


def _takes(session: TrainingSession) -> bool:
    return control_session.reported_status(session, None) in TAKING


async def _fresh(context: RuntimeContext, session: TrainingSession) -> TrainingSession | None:
    """As it is this moment, else as it was last known."""
    try:
        return await context.directory.fresh(session)
    except (UnavailableError, OverloadedError):
        return session


async def named_operation(
    context: RuntimeContext, session: TrainingSession, operation_id: str, stream: Stream
) -> tuple[TrainingSession, OpId]:
    """The operation of an id, and its session. Raises NotFoundError where it is none of the session's."""
    key = context.operation_key
    try:
        return session, read_operation_id(key, operation_id, session_uid(session), stream)
    except NotFoundError:
        current = await _fresh(context, session)
        if current is None or session_uid(current) == session_uid(session):
            raise
    # Made again under the same name a moment ago, at another gateway.
    return current, read_operation_id(key, operation_id, session_uid(current), stream)


def has_ended(session: TrainingSession) -> bool:
    return control_session.reported_status(session, None) in control_session.ENDED


async def session_facts(
    directory: Directory, caller: Caller, session: TrainingSession
) -> SessionFacts:
    """What requests to the session are judged by."""
    name = session.spec.base_model_ref.name
    model = await directory.base_model(name, caller.as_of)
    tenant = await directory.tenant(caller.tenant, caller.as_of)
    bucket = tenant.spec.default_bucket if tenant is not None else ""
    output = locations.session_output(
        session.spec.output.path, session_name(session), caller.account_id, bucket
    )
    return SessionFacts(
        model=name,
        vocabulary_size=model.spec.vocabulary_size if model is not None else 0,
        context_length=model.spec.context_length if model is not None else 0,
        location=locations.artifact_folder(caller.tenant, output),
    )
