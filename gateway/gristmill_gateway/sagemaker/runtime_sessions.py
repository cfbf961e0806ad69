"""Finds the session that a runtime request is about, and whether it takes operations."""

from typing import Final

from gristmill_contracts.errors import ConflictError, NotFoundError
from gristmill_contracts.session import State, TrainingSession
from gristmill_gateway import locations
from gristmill_gateway.caller import Caller
from gristmill_gateway.directory import Directory
from gristmill_gateway.sagemaker import control_session
from gristmill_gateway.sagemaker.context import RuntimeContext
from gristmill_gateway.sagemaker.model_facts import SessionFacts
from gristmill_sessions.identity import session_name

TAKING: Final[frozenset[State]] = frozenset({"Running", "Blocked"})


async def require_session(directory: Directory, caller: Caller, name: str) -> TrainingSession:
    """The caller's session of that name. Raises NotFoundError, also for somebody else's."""
    found = await directory.session(caller.tenant, name, caller.as_of)
    if found is None:
        raise NotFoundError(f"Training session {name[:64]} does not exist")
    return found


async def require_taking(context: RuntimeContext, caller: Caller, name: str) -> TrainingSession:
    """A session that takes the caller's operations. Raises NotFoundError, ConflictError, AccessDeniedError."""
    session = await require_session(context.directory, caller, name)
    namespace = session.metadata.namespace
    await context.access.check(caller.service_account, "update", namespace, lasting=True)
    status = control_session.reported_status(session, None)
    if status not in TAKING:
        raise ConflictError(
            f"Training session {name} is {status}; operations are taken while it is Running or Blocked"
        )
    return session


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
