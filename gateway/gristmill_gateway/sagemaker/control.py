"""Answers the training session operations. Decides in `control_session`, does here."""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from gristmill_contracts import limits
from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from gristmill_contracts.http import SessionView
from gristmill_contracts.ids import new_session_uid
from gristmill_contracts.session import State, TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_contracts.usage import Counts
from gristmill_gateway import locations
from gristmill_gateway.access import Verb
from gristmill_gateway.object_names import object_name
from gristmill_gateway.sagemaker import (
    arns,
    control_attach,
    control_build,
    control_pages,
    control_session,
    hub,
)
from gristmill_gateway.sagemaker.control_context import Caller, Context
from gristmill_gateway.sagemaker.control_fields import check_tags, read_request
from gristmill_gateway.sagemaker.control_validate import (
    CreateTrainingSession,
    ListTrainingSessions,
    NamedSession,
)
from gristmill_gateway.sagemaker.hub_calls import list_models
from gristmill_gateway.sagemaker.registry_calls import ensure_group, require_group
from gristmill_sessions.identity import session_name, session_uid

Body = dict[str, Any]  # Any: JSON

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.05
"""How often a held create looks whether the store changed: one read of a number."""
UPDATE_TRIES_MAX = 20


# --- create --------------------------------------------------------------------------------------


async def create_training_session(context: Context, caller: Caller, body: Body) -> Body:
    """Create or attach, then hold the answer until the session takes operations or the wait is over."""
    request = read_request(CreateTrainingSession, "CreateTrainingSession", body)
    _check_request(request)
    namespace = await context.namespace(caller.tenant)
    await context.access.check(caller.service_account, "create", namespace)
    tenant = await find_tenant(context, caller.tenant)
    if tenant is not None and tenant.spec.suspended:
        raise ForbiddenError(
            f"tenant {caller.tenant!r} is suspended: no session can be created until an operator lifts it"
        )
    egress = control_build.egress_of(request, tenant) if context.in_cluster else []
    wanted = await _wanted_session(context, caller, request, namespace)
    if egress:
        wanted = control_build.with_egress(wanted, egress)
    session = await _create_or_attach(context, caller, wanted, default_bucket(tenant))
    await _hold_until_it_serves(context, session)
    return {"TrainingSessionArn": arns.session_arn(caller.scope, session_name(session))}


def _check_request(request: CreateTrainingSession) -> None:
    """What no shape can say. Raises InvalidRequestError; nothing asked for is left out in silence."""
    check_tags(request.tags)
    locations.parse_s3_uri(request.output_config.s3_location.path)
    if request.output_config.s3_location.kms_key_arn is not None:
        raise InvalidRequestError(
            "OutputConfig.S3Location.KmsKeyArn: the account has no encryption keys, and checkpoints would be "
            "written unencrypted; leave it out"
        )


async def _wanted_session(
    context: Context, caller: Caller, request: CreateTrainingSession, namespace: str
) -> TrainingSession:
    base = arns.parse_base_model(request.model_config_.base_model_arn)
    model = hub.find_model(base, await list_models(context))
    if request.model_package_group_arn is None:
        group = control_build.DEFAULT_GROUP
        await ensure_group(context, caller.tenant, group)
    else:
        group = arns.parse_group(request.model_package_group_arn, caller.scope.account_id)
        await require_group(context, caller.tenant, group)
    return control_build.build_session(
        request,
        tenant=caller.tenant,
        namespace=namespace,
        model=model.metadata.name,
        group=group,
        uid=new_session_uid(),
        token=_token(caller.invocation_id),
    )


def _token(invocation_id: str) -> str:
    """A retry of one call carries the id of its first try. It is a header, so it may hold anything."""
    usable = invocation_id.isascii() and invocation_id.isprintable()
    return invocation_id if usable and len(invocation_id) <= limits.CLIENT_TOKEN_CHARS_MAX else ""


async def _create_or_attach(
    context: Context, caller: Caller, wanted: TrainingSession, bucket: str
) -> TrainingSession:
    """Raises ConflictError naming what differs from the session that has the name."""
    name, namespace = session_name(wanted), wanted.metadata.namespace
    existing = await find_session(context, namespace, name)
    if existing is not None:
        existing = await context.fresh(existing)  # a watch may not have told of its end yet
    if existing is None:
        try:
            created = await asyncio.to_thread(context.store.create, wanted)
        except ConflictError:
            # Somebody else was faster: judge against what they made.
            existing = await find_session(context, namespace, name)
            if existing is None:
                raise
        else:
            logger.info("session_created", extra=_extra(caller, created))
            return created
    view = await context.session_view(existing)
    control_attach.check_attach(existing, wanted, caller.scope.account_id, bucket, view)
    logger.info("session_attached", extra=_extra(caller, existing))
    return existing


async def _hold_until_it_serves(context: Context, session: TrainingSession) -> None:
    """Return once Describe will say Running (or the session ended), or after CREATE_WAIT_S_MAX.

    The SDK polls only every 10 s, so an answer that comes too early costs its user that much.
    """
    deadline = time.monotonic() + limits.CREATE_WAIT_S_MAX
    seen = -1
    while time.monotonic() < deadline:
        revision = await asyncio.to_thread(context.store.revision)
        if revision != seen:
            seen = revision
            try:
                session = await _read(context, session)
            except NotFoundError:
                return
            if control_session.reported_status(session, None) not in ("Created", "Scheduled"):
                return
        await asyncio.sleep(POLL_S)


# --- describe and list ---------------------------------------------------------------------------


async def describe_training_session(context: Context, caller: Caller, body: Body) -> Body:
    request = read_request(NamedSession, "DescribeTrainingSession", body)
    session = await _permitted_session(context, caller, "get", request.training_session_name)
    tenant = await find_tenant(context, caller.tenant)
    view = await context.session_view(session)
    usage = await settled_usage(context, caller.tenant, session, view)
    detail = control_session.describe(session, caller.scope, default_bucket(tenant), view, usage)
    if view is None:  # Then it may be the ledger's inbox that received the last one.
        received = await context.last_received_number(session)
        detail["LastReceivedSequenceNumber"] = max(received, detail["LastReceivedSequenceNumber"])
    return {"TrainingSessionDetail": detail}


async def settled_usage(
    context: Context, tenant: str, session: TrainingSession, view: SessionView | None
) -> Counts | None:
    """Exact tokens of the session so far: what its meter settled, posted or about to be.

    Without a meter everything was posted, so the ledger knows. None = unknown now: a meter that cannot
    be asked may hold more than was posted, and a number that is too small is worse than none.
    """
    if view is not None:
        return view.counts
    if control_session.holds_usage(session):
        return None
    uid = session_uid(session)
    try:
        return await context.ledger.session_usage(tenant, uid)
    except UnavailableError:
        return None


async def list_training_sessions(context: Context, caller: Caller, body: Body) -> Body:
    """Newest first."""
    request = read_request(ListTrainingSessions, "ListTrainingSessions", body)
    plain = request.model_copy(update={"next_token": None, "max_results": None})
    question = (caller.tenant, "ListTrainingSessions", plain)
    namespace = await context.namespace(caller.tenant)
    await context.access.check(caller.service_account, "list", namespace)
    found = control_session.choose(await _list(context, namespace), request)
    if request.next_token is not None:
        kinds = (int, str)
        place = control_pages.read_token(context.token_key, question, request.next_token, kinds)
        found = [each for each in found if control_session.place(each) < place]
    shown = found[: request.max_results or limits.LIST_PAGE_MAX]
    answer: Body = {
        "TrainingSessionSummaries": [control_session.summary(each, caller.scope) for each in shown]
    }
    if shown and len(found) > len(shown):
        place = control_session.place(shown[-1])
        answer["NextToken"] = control_pages.make_token(context.token_key, question, place)
    return answer


# --- stop and delete -----------------------------------------------------------------------------


async def stop_training_session(context: Context, caller: Caller, body: Body) -> Body:
    request = read_request(NamedSession, "StopTrainingSession", body)
    name = request.training_session_name
    for _ in range(UPDATE_TRIES_MAX):
        session = await _permitted_session(context, caller, "patch", name)
        session, _ = await _checked(context, session, control_session.check_stop)
        wish = control_session.with_stop_wish(
            session, by_annotation=context.in_cluster, now=datetime.now(UTC)
        )
        try:
            await asyncio.to_thread(context.store.update, wish)
        except ConflictError:
            continue
        logger.info("session_stop_requested", extra=_extra(caller, session))
        return {}
    raise UnavailableError(
        f"training session {name} is changing too fast to be stopped now; try again"
    )


async def delete_training_session(context: Context, caller: Caller, body: Body) -> Body:
    request = read_request(NamedSession, "DeleteTrainingSession", body)
    name = request.training_session_name
    session = await _permitted_session(context, caller, "delete", name)
    session, wanted = await _checked(context, session, control_session.check_delete)
    if wanted:
        meta = session.metadata
        try:
            await asyncio.to_thread(
                context.store.delete, TrainingSession, meta.namespace, meta.name
            )
        except NotFoundError:
            return {}
        logger.info("session_delete_requested", extra=_extra(caller, session))
    return {}


async def _checked(
    context: Context, session: TrainingSession, check: Callable[[str, State], T]
) -> tuple[TrainingSession, T]:
    """The session, and what a check of its status says. Refused only as it is this moment."""
    name = session_name(session)
    status = control_session.reported_status(session, await context.session_view(session))
    try:
        return session, check(name, status)
    except InvalidRequestError:
        current = await context.fresh(session)
        if current is None or current == session:
            raise
    status = control_session.reported_status(current, await context.session_view(current))
    return current, check(name, status)


def _extra(caller: Caller, session: TrainingSession) -> dict[str, str]:
    return {
        "tenant": caller.tenant,
        "session": session_name(session),
        "session_uid": session_uid(session),
    }


# --- store ---------------------------------------------------------------------------------------


async def _permitted_session(
    context: Context, caller: Caller, verb: Verb, name: str
) -> TrainingSession:
    """The caller's session of that name, if it may do this to it. Raises ForbiddenError, NotFoundError."""
    namespace = await context.namespace(caller.tenant)
    found = await find_session(context, namespace, name)
    # Asked before it is told whether there is one: who may not look is told nothing.
    about = object_name(name) if found is None else found.metadata.name
    await context.access.check(caller.service_account, verb, namespace, about)
    if found is None:
        raise NotFoundError(
            f"Training session {name} does not exist; ListTrainingSessions shows what does"
        )
    return found


async def find_session(context: Context, namespace: str, name: str) -> TrainingSession | None:
    """The session of that name on this wire."""
    try:
        session = await asyncio.to_thread(
            context.store.get, TrainingSession, namespace, object_name(name)
        )
        if session_name(session) == name:
            return session
    except NotFoundError:
        pass
    # An applied session may have a display name that its object name does not follow from.
    return control_session.find_session(await _list(context, namespace), name)


async def find_tenant(context: Context, name: str) -> Tenant | None:
    tenants = await asyncio.to_thread(context.store.list, Tenant, None)
    return next((tenant for tenant in tenants if tenant.metadata.name == name), None)


def default_bucket(tenant: Tenant | None) -> str:
    """The tenant's own choice; empty where it made none."""
    return "" if tenant is None else tenant.spec.default_bucket


async def _list(context: Context, namespace: str) -> list[TrainingSession]:
    return await asyncio.to_thread(context.store.list, TrainingSession, namespace)


async def _read(context: Context, session: TrainingSession) -> TrainingSession:
    meta = session.metadata
    return await asyncio.to_thread(context.store.get, TrainingSession, meta.namespace, meta.name)
