"""SampleTrainingSession and its response stream: OpenAI chat bodies in and out."""

import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from starlette.responses import Response, StreamingResponse

from gristmill_contracts import limits
from gristmill_contracts.errors import (
    GristmillError,
    InvalidRequestError,
    InvariantError,
    UnavailableError,
    error_from,
)
from gristmill_contracts.http import TERMINAL_STATES, StreamChunk
from gristmill_contracts.ids import OpId
from gristmill_contracts.operations import Sample, SampleResult
from gristmill_contracts.session import TrainingSession
from gristmill_gateway.call import Call
from gristmill_gateway.caller import Caller
from gristmill_gateway.hold import hold
from gristmill_gateway.sagemaker import chat_answers, packages, runtime
from gristmill_gateway.sagemaker.chat_requests import ChatRequest, read_chat
from gristmill_gateway.sagemaker.context import RuntimeContext
from gristmill_gateway.sagemaker.documents import read_object, text
from gristmill_gateway.sagemaker.runtime_sessions import require_taking, session_facts
from gristmill_gateway.sagemaker.training_requests import ARN_CHARS_MAX, unresolved
from gristmill_sessions.identity import session_uid

logger = logging.getLogger(__name__)

PACKAGE_HEADER: Final = "x-amzn-sagemaker-model-package"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A checked chat request on its session."""

    session: TrainingSession
    request: ChatRequest
    answer_id: str
    model: str
    created_s: int
    key: str
    """Id of the caller's access key."""

    @property
    def head(self) -> dict[str, Any]:
        return {"id": self.answer_id, "created": self.created_s, "model": self.model}


async def sample_training_session(
    context: RuntimeContext, caller: Caller, name: str, body: bytes, call: Call
) -> Response:
    """A `chat.completion`, once all of it is there."""
    chat = await _read(context, caller, name, body, call)
    if chat.request.stream:
        raise InvalidRequestError(
            "stream is true; this operation answers as a whole: use SampleTrainingSessionWithResponseStream"
        )
    result = await hold(call.connection, context.draining, _run(context, chat))
    if result is None:
        raise UnavailableError("the server is going down; send the request again")
    answer = chat_answers.completion(
        result,
        answer_id=chat.answer_id,
        model=chat.model,
        created_s=chat.created_s,
        logprobs=chat.request.logprobs,
    )
    headers = {"x-amzn-requestid": call.request_id}
    return Response(msgspec.json.encode(answer), 200, headers, JSON)


async def sample_training_session_with_response_stream(
    context: RuntimeContext, caller: Caller, name: str, body: bytes, call: Call
) -> Response:
    """Server-sent events. What fails before the first token is an ordinary error of the operation."""
    chat = await _read(context, caller, name, body, call)
    if chat.request.sample.num_samples != 1:
        raise InvalidRequestError(
            f"n is {chat.request.sample.num_samples}; a stream holds one answer: use "
            "SampleTrainingSession for more"
        )
    stack = AsyncExitStack()
    opened = await hold(call.connection, context.draining, _open(context, chat, stack))
    if opened is None:
        await stack.aclose()
        raise UnavailableError("the server is going down; send the request again")
    first, rest = opened
    headers = {"x-amzn-requestid": call.request_id, "cache-control": "no-cache"}
    return StreamingResponse(_events(chat, first, rest, stack), 200, headers, EVENTS)


async def _read(
    context: RuntimeContext, caller: Caller, name: str, body: bytes, call: Call
) -> Chat:
    session = await require_taking(context, caller, name)
    facts = await session_facts(context.directory, caller, session)
    arn = call.request.value(PACKAGE_HEADER)
    adapter = None
    if arn:
        adapter = unresolved(text(arn, "X-Amzn-SageMaker-Model-Package", ARN_CHARS_MAX))
    seed = secrets.randbelow(limits.SEED_MAX + 1)
    request = read_chat(read_object(body), facts, adapter, seed)
    sample = await packages.resolve(context.ledger, caller, facts, request.sample)
    if not isinstance(sample, Sample):
        raise InvariantError(f"a chat request became {type(sample).__name__}")
    return Chat(
        session=session,
        request=replace(request, sample=sample),
        answer_id=f"chatcmpl-{call.request_id}",
        model=request.model or name,
        created_s=int(time.time()),
        key=caller.key,
    )


async def _run(context: RuntimeContext, chat: Chat) -> SampleResult:
    """Submit, then claim. Raises what the operation failed with."""
    submit = runtime.log_submit(chat.request.sample, chat.key, may_wait=False)
    accepted = await context.meters.submit(chat.session, submit)
    operation = OpId(session_uid(chat.session), accepted.stream, accepted.number)
    view = await runtime.wait_for_end(context, chat.session, operation, limits.CHAT_WAIT_S_MAX)
    if view is None or view.state not in TERMINAL_STATES:
        raise UnavailableError(
            f"the answer took longer than {limits.CHAT_WAIT_S_MAX:.0f} s; ask for fewer tokens, or stream"
        )
    if isinstance(view.result, SampleResult):
        return view.result
    problem = view.error
    if problem is None:
        raise UnavailableError("the session ended before the answer was there; send it again")
    raise error_from(problem.code, problem.message)


async def _open(
    context: RuntimeContext, chat: Chat, stack: AsyncExitStack
) -> tuple[StreamChunk, AsyncGenerator[StreamChunk, None]]:
    """The first chunk and the rest; `stack` closes the stream."""
    submit = runtime.log_submit(chat.request.sample, chat.key)
    chunks = await context.meters.open_stream(chat.session, submit, stack)
    try:
        first = await anext(chunks)
        _raise_problem(first)
    except BaseException:
        await stack.aclose()
        raise
    return first, chunks


async def _events(
    chat: Chat,
    first: StreamChunk,
    rest: AsyncGenerator[StreamChunk, None],
    stack: AsyncExitStack,
) -> AsyncIterator[bytes]:
    """The stream's events. A failure in the middle is told as an error, and then there is no [DONE]."""
    head = chat.head
    tokens = 0
    async with stack:
        yield chat_answers.event(chat_answers.first_chunk(head))
        chunk = first
        try:
            while True:
                _raise_problem(chunk)
                tokens += len(chunk.tokens)
                if chunk.text or chunk.tokens:
                    yield chat_answers.event(
                        chat_answers.text_chunk(head, chunk, logprobs=chat.request.logprobs)
                    )
                if chunk.final is not None:
                    break
                chunk = await anext(rest)
        except GristmillError as error:
            logger.info("stream_cut", extra={"code": error.code, "reason": error.message})
            yield chat_answers.error_event(error.message, error.code)
            return
    yield chat_answers.event(chat_answers.last_chunk(head, chunk.final, chunk.budget))
    yield chat_answers.event(
        chat_answers.usage_chunk(
            head, chat_answers.usage(chunk.prompt_tokens, tokens, chunk.cached_tokens)
        )
    )
    yield chat_answers.DONE


def _raise_problem(chunk: StreamChunk) -> None:
    if chunk.error is not None:
        raise error_from(chunk.error.code, chunk.error.message)
