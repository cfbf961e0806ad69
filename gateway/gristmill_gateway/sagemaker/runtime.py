"""Answers the operations of the runtime plane: translate, send to the meter, tell what it says."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from gristmill_contracts.http import TERMINAL_STATES, OperationView, Refuse, Submit
from gristmill_contracts.ids import OpId, Stream
from gristmill_contracts.operations import Operation
from gristmill_contracts.session import TrainingSession
from gristmill_gateway.call import Call
from gristmill_gateway.caller import Caller
from gristmill_gateway.hold import hold
from gristmill_gateway.operation_ids import make_operation_id
from gristmill_gateway.sagemaker import packages, results
from gristmill_gateway.sagemaker.context import RuntimeContext
from gristmill_gateway.sagemaker.documents import Document, read_object
from gristmill_gateway.sagemaker.runtime_sessions import (
    has_ended,
    named_operation,
    require_session,
    require_taking,
    session_facts,
)
from gristmill_gateway.sagemaker.sampling_requests import read_sampling_request
from gristmill_gateway.sagemaker.training_requests import (
    read_training_request,
    readable_identity,
)
from gristmill_sessions.identity import session_uid

logger = logging.getLogger(__name__)

Body = dict[str, Any]  # Any: JSON
T = TypeVar("T")

READ_INLINE_BYTES_MAX: Final = 64 * 2**10
"""A larger body is read in a thread, so that other requests go on meanwhile."""
WRITTEN_INLINE_VALUES_MAX: Final = 4096
RETRY_S: Final = 0.2
"""Pause before a meter that did not answer, or is going down, is asked again."""
LOOK_S: Final = 1.0
"""Pause before an operation that waits for a meter is looked for again."""


# --- submit --------------------------------------------------------------------------------------


async def execute_training_operation(
    context: RuntimeContext, caller: Caller, name: str, body: bytes
) -> bytes:
    """Raises what the wire answers; a refused request's number is closed before that."""
    session = await require_taking(context, caller, name)
    facts = await session_facts(context.directory, caller, session)
    document = await _in_thread(body, lambda: read_object(body))
    try:
        request = await _in_thread(body, lambda: read_training_request(document, facts))
        operation = await packages.resolve(context.ledger, caller, facts, request.operation)
    except InvalidRequestError as error:
        await _close_number(context, session, document, error)
        raise
    submit = Submit(
        stream="train",
        number=request.number,
        client_token=request.client_token,
        body_hash=await _in_thread(body, lambda: body_hash(operation)),
        operation=operation,
        key=caller.key,
    )
    return await _submit(context, caller, session, submit)


async def execute_sampling_operation(
    context: RuntimeContext, caller: Caller, name: str, body: bytes
) -> bytes:
    session = await require_taking(context, caller, name)
    facts = await session_facts(context.directory, caller, session)
    document = await _in_thread(body, lambda: read_object(body))
    seed = secrets.randbelow(limits.SEED_MAX + 1)
    request = await _in_thread(body, lambda: read_sampling_request(document, facts, seed))
    operation = await packages.resolve(context.ledger, caller, facts, request)
    return await _submit(context, caller, session, log_submit(operation, caller.key))


def log_submit(operation: Operation, key: str, *, may_wait: bool = True) -> Submit:
    """An operation without a number: the meter gives it one. key: id of the caller's access key.

    may_wait: for a budget that does not afford it now; else it fails at once.
    """
    return Submit(
        stream="log",
        number=None,
        client_token=None,
        body_hash=body_hash(operation),
        operation=operation,
        key=key,
        may_wait=may_wait,
    )


def body_hash(operation: Operation) -> bytes:
    """SHA-256 of the translated request: what makes a resend the same request."""
    return hashlib.sha256(msgspec.msgpack.encode(operation)).digest()


async def _submit(
    context: RuntimeContext, caller: Caller, session: TrainingSession, submit: Submit
) -> bytes:
    accepted = await context.meters.submit(session, submit, caller.as_of)
    operation = OpId(session_uid(session), accepted.stream, accepted.number)
    operation_id = make_operation_id(context.operation_key, operation)
    return msgspec.json.encode({"operationId": operation_id})


async def _close_number(
    context: RuntimeContext, session: TrainingSession, document: Document, error: GristmillError
) -> None:
    """Tell the meter that a number's request was refused: the SDK never sends it again.

    Raises UnavailableError or OverloadedError where the meter cannot take it now. The client then
    sends the request again, and it is refused again; answering the refusal would leave a gap.
    """
    identity = readable_identity(document)
    if identity is None:
        return
    refuse = Refuse(
        number=identity.number,
        client_token=identity.client_token,
        message=error.message[: limits.DESCRIPTION_CHARS_MAX],
        breaks_accumulation=identity.breaks_accumulation,
    )
    try:
        await context.meters.refuse(session, refuse)
    except (ConflictError, InvalidRequestError) as kept:
        # The number is another operation's already, or cannot be one: there is no gap to close.
        logger.info("refusal_not_recorded", extra={"reason": kept.message})
        return
    context.metrics.refused_numbers.inc()


async def _in_thread(body: bytes, work: Callable[[], T]) -> T:
    if len(body) <= READ_INLINE_BYTES_MAX:
        return work()
    return await asyncio.to_thread(work)


# --- results -------------------------------------------------------------------------------------


async def get_training_operation_result(
    context: RuntimeContext, caller: Caller, name: str, operation_id: str, call: Call
) -> bytes:
    view = await _held_view(context, caller, (name, operation_id, "train"), call)
    return await _written(view, lambda ended: results.training_answer(ended, caller.scope))


async def get_sampling_operation_result(
    context: RuntimeContext, caller: Caller, name: str, operation_id: str, call: Call
) -> bytes:
    view = await _held_view(context, caller, (name, operation_id, "log"), call)
    return await _written(view, results.sampling_answer)


async def _written(view: OperationView | None, tell: Callable[[OperationView], Body]) -> bytes:
    """The JSON of a result; a large one is written in a thread."""
    if view is None or view.state not in TERMINAL_STATES:
        return msgspec.json.encode({"status": _running(view)})
    ended = view
    if results.values_in(ended.result) <= WRITTEN_INLINE_VALUES_MAX:
        return msgspec.json.encode(tell(ended))
    return await asyncio.to_thread(lambda: msgspec.json.encode(tell(ended)))


def _running(view: OperationView | None) -> str:
    return view.state if view is not None and view.state == "Pending" else "InProgress"


async def _held_view(
    context: RuntimeContext, caller: Caller, which: tuple[str, str, Stream], call: Call
) -> OperationView | None:
    """The operation once it ended, or as it is when the wait is over; None = not known now."""
    name, operation_id, stream = which
    known = await require_session(context.directory, caller, name)
    session, operation = await named_operation(context, known, operation_id, stream)
    work = wait_for_end(context, session, operation, context.result_wait_s, caller.as_of)
    return await hold(call.connection, context.draining, work)


async def wait_for_end(
    context: RuntimeContext,
    session: TrainingSession,
    operation: OpId,
    wait_s: float,
    as_of: float | None = None,
) -> OperationView | None:
    """Poll the meter until the operation ended or `wait_s` is over; None = nobody could tell.

    An accepted operation is never told to be lost: while no meter answers it goes on.
    Raises NotFoundError for a result that is kept no longer.
    """
    deadline = time.monotonic() + wait_s
    view: OperationView | None = None
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            view = await context.meters.poll(session, operation, left_s, as_of)
        except (UnavailableError, OverloadedError) as error:
            view = None
            await _check_still_there(context, session, error)
        except (NotFoundError, ForbiddenError):
            raise
        except GristmillError as error:
            logger.warning("poll_failed", extra={"code": error.code, "reason": error.message})
            view = None
        left_s = deadline - time.monotonic()
        if (view is not None and view.state in TERMINAL_STATES) or left_s <= 0:
            return view
        await asyncio.sleep(min(RETRY_S if view is None else LOOK_S, left_s))
        as_of = None


async def _check_still_there(
    context: RuntimeContext, session: TrainingSession, error: GristmillError
) -> None:
    """Raises NotFoundError where waiting is in vain: the session ended and nobody serves its results."""
    meta = session.metadata
    current = await context.directory.session_object(meta.namespace, meta.name)
    if current is None or (has_ended(current) and await _has_no_meter(context, current)):
        raise NotFoundError(
            f"Training session {meta.name} has ended, and its results are served no longer"
        ) from error


async def _has_no_meter(context: RuntimeContext, session: TrainingSession) -> bool:
    return await context.directory.endpoint(session) is None
