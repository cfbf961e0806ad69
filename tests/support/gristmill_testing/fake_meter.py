"""A meter without log and worker: it accepts, numbers, answers at once, and remembers what it was told.

Speaks the contract's routes, so that a gateway cannot tell it from a real one. Faults are switched on
by its fields. Safe to be looked at from another thread once a request was answered.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gristmill_contracts.errors import (
    ConflictError,
    FencedError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
    UnauthenticatedError,
)
from gristmill_contracts.http import (
    ATTEMPT_HEADER,
    CONTENT_TYPE,
    OperationView,
    Problem,
    Refuse,
    SessionView,
    StreamChunk,
    Submit,
    Submitted,
)
from gristmill_contracts.ids import CheckpointId, SessionUid
from gristmill_contracts.operations import (
    ComputeLogprobs,
    ComputeLogprobsResult,
    Empty,
    Forward,
    ForwardBackward,
    ForwardResult,
    LoadState,
    LoadStateResult,
    Operation,
    OptimStep,
    OptimStepResult,
    Result,
    Sample,
    SampledSequence,
    SampleResult,
    SaveResult,
    SaveState,
    SaveWeights,
    count_result,
    kind_of,
    tensor,
)
from gristmill_contracts.usage import Counts

SECRET = "attempt-secret"
STATUSES = {
    "invalid_request": 400, "unauthenticated": 401, "not_found": 404, "conflict": 409, "fenced": 421,
    "overloaded": 429, "unavailable": 503, "log_full": 503, "volume_failed": 503,
}  # fmt: skip
TEXT = ["Hello", " there", ", you"]


def answer(operation: Operation) -> Result:
    """A small result of the right shape, with a NaN wherever the contract has one."""
    if isinstance(operation, Forward | ForwardBackward):
        return ForwardResult(
            outputs=[
                {"logprobs": tensor("float32", [-0.5] * d.tokens.size)} for d in operation.datums
            ],
            metrics={
                "loss_sum": 6.0,
                "datums": float(len(operation.datums)),
                "tokens": float(sum(d.tokens.size for d in operation.datums)),
                "kl_q_p_mean": 0.25,
                "ratio_mean": float("nan"),
                "clip_fraction": float("inf"),
            },
        )
    if isinstance(operation, SaveWeights | SaveState):
        return SaveResult(
            checkpoint_id=CheckpointId("00000000-0000-4000-8000-000000000001"),
            kind="state" if isinstance(operation, SaveState) else "weights",
            path=f"{operation.location}/x",
            rank=8,
            alpha=16,
            size_bytes=10,
            manifest_sha256="ab" * 32,
            group="runs",
            version=7,
        )
    if isinstance(operation, Sample):
        return _sampled(operation)
    if isinstance(operation, ComputeLogprobs):
        values = [float("nan"), *[-0.5] * (operation.prompt.size - 1)]
        return ComputeLogprobsResult(logprobs=tensor("float32", values), topk=None)
    plain: dict[type, Result] = {
        OptimStep: OptimStepResult(metrics={"grad_norm": 1.5, "step": 1.0}),
        LoadState: LoadStateResult(rank=8, alpha=16),
    }
    return plain.get(type(operation), Empty())


def _sampled(operation: Sample) -> SampleResult:
    size = operation.prompt.size if operation.prompt is not None else 9
    logprobs = None
    if operation.include_prompt_logprobs:
        logprobs = tensor("float32", [float("nan"), *[-0.5] * (size - 1)])
    k = operation.topk_prompt_logprobs
    rows: list[list[tuple[int, float]]] = [
        [],
        *[[(i, -float(i + 1)) for i in range(k)]] * (size - 1),
    ]
    sequence = SampledSequence(
        tokens=tensor("int64", [5, 6, 2]),
        logprobs=tensor("float32", [-0.1, -0.2, float("-inf")]),
        stop_reason="stop",
        text="".join(TEXT) if operation.include_text else None,
    )
    return SampleResult(
        sequences=[sequence] * operation.num_samples,
        prompt_logprobs=logprobs,
        topk_prompt_logprobs=rows if k else None,
        prompt_tokens=size,
    )


@dataclass(slots=True)
class FakeMeter:
    """Serves the sessions in `attempts` (uid -> attempt number). `fault` is raised at every door."""

    attempts: dict[str, int] = field(default_factory=dict)
    result: Callable[[Operation], Result] = answer
    secrets: dict[str, str] = field(default_factory=dict)
    """Of sessions whose door has a key of its own."""
    fault: GristmillError | None = None
    state: str = "Completed"
    """State of every operation when it is polled."""
    cut_stream_after: int | None = None
    """The stream ends with an error after this many chunks; -1: without a word."""
    budget: Problem | None = None
    """Why the stream's last chunk comes early."""
    submits: list[Submit] = field(default_factory=list)
    refusals: list[Refuse] = field(default_factory=list)
    views: dict[tuple[str, str, int], OperationView] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    doors: list[str] = field(default_factory=list)
    streams_open: int = 0
    never_ends: bool = False
    """A stream stands still behind its first chunk, until its reader leaves."""
    hold_polls: bool = False
    """A poll stands still until its caller leaves."""
    polls_held: int = 0

    def app(self) -> Starlette:
        base = "/v1/sessions/{uid}"
        routes = [
            Route(f"{base}/operations", self._guarded(self._submit), methods=["POST"]),
            Route(f"{base}/refusals", self._guarded(self._refuse), methods=["POST"]),
            Route(f"{base}/streams", self._guarded(self._stream), methods=["POST"]),
            Route(f"{base}/operations/{{stream}}/{{number}}", self._guarded(self._poll)),
            Route(base, self._guarded(self._view)),
        ]
        return Starlette(routes=routes)

    def _guarded(self, door: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def guarded(request: Request) -> Response:
            self.doors.append(f"{request.method} {request.url.path.rsplit('/', 1)[-1]}")
            try:
                self._admit(request)
                response: Response = await door(request)
            except GristmillError as error:
                problem = Problem(code=error.code, message=error.message, retryable=error.retryable)
                return _packed(problem, STATUSES.get(error.code, 500))
            return response

        return guarded

    def _admit(self, request: Request) -> None:
        if self.fault is not None:
            raise self.fault
        uid = request.path_params["uid"]
        if uid not in self.attempts:
            raise NotFoundError(f"session {uid} is not served here")
        if request.headers["authorization"] != f"Bearer {self.secrets.get(uid, SECRET)}":
            raise UnauthenticatedError("the secret is wrong")
        if request.headers[ATTEMPT_HEADER] != str(self.attempts[uid]):
            raise FencedError(f"session {uid} is served as attempt {self.attempts[uid]}")

    async def _submit(self, request: Request) -> Response:
        submit = msgspec.msgpack.decode(await request.body(), type=Submit)
        uid = request.path_params["uid"]
        known = next((s for s in self.submits if _same(s, submit)), None)
        number = submit.number
        if number is None:
            number = sum(s.stream == "log" for s in self.submits) + 1
        if known is not None:
            number = known.number or 0
            if known.body_hash != submit.body_hash:
                if known.client_token == submit.client_token is not None:
                    raise InvalidRequestError("clientToken was used with other parameters")
                raise ConflictError(
                    f"sequence number {number} was already used; the last received number is {number}"
                )
        self.submits.append(submit)
        result = self.result(submit.operation)
        self.views[uid, submit.stream, number] = OperationView(
            stream=submit.stream,
            number=number,
            kind=kind_of(submit.operation),
            state="Completed",
            result=result,
            counts=count_result(submit.operation, result),
        )
        return _packed(
            Submitted(
                stream=submit.stream,
                number=number,
                state="Pending",
                duplicate=known is not None,
            )
        )

    async def _refuse(self, request: Request) -> Response:
        refuse = msgspec.msgpack.decode(await request.body(), type=Refuse)
        if any(s.number == refuse.number for s in self.submits):
            raise ConflictError(f"sequence number {refuse.number} was already used")
        self.refusals.append(refuse)
        return _packed(Submitted(stream="train", number=refuse.number, state="Refused"))

    async def _poll(self, request: Request) -> Response:
        self.waits_s.append(float(request.query_params["wait_s"]))
        if self.hold_polls:
            self.polls_held += 1
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            self.polls_held -= 1
        parts = request.path_params
        view = self.views.get((parts["uid"], parts["stream"], int(parts["number"])))
        if view is None:
            raise NotFoundError("the result of the operation is no longer kept")
        if self.state != "Completed":
            error = Problem(code="operation_failed", message="it did not work")
            ended = self.state in ("Failed", "Skipped")
            view = OperationView(
                stream=view.stream,
                number=view.number,
                kind=view.kind,
                state=self.state,  # type: ignore[arg-type]
                error=error if ended else None,
            )
        return _packed(view)

    async def _view(self, request: Request) -> Response:
        uid = SessionUid(request.path_params["uid"])
        numbers = [s.number or 0 for s in self.submits]
        return _packed(
            SessionView(
                uid=uid,
                attempt=self.attempts[uid],
                last_received_number=max(numbers, default=0),
                next_number=1,
                missing_number=None,
                missing_since_us=None,
                state="Serving",
                error=None,
                counts=Counts(train=4),
                last_activity_us=0,
            )
        )

    async def _stream(self, request: Request) -> Response:
        self.submits.append(msgspec.msgpack.decode(await request.body(), type=Submit))
        return StreamingResponse(self._chunks(), media_type=CONTENT_TYPE)

    async def _chunks(self) -> AsyncIterator[bytes]:
        self.streams_open += 1
        try:
            for index, text in enumerate(TEXT):
                if self.cut_stream_after == -1 and index == 1:
                    return
                if self.cut_stream_after == index:
                    problem = Problem(code="unavailable", message="the worker was lost")
                    yield _framed(_chunk(index, "", error=problem))
                    return
                if index == 1 and self.never_ends:
                    await asyncio.Event().wait()
                final = "stop" if index == len(TEXT) - 1 else None
                budget = self.budget if final else None
                yield _framed(_chunk(index, text, final=final, budget=budget))
        finally:
            self.streams_open -= 1


def _chunk(index: int, text: str, **fields: Any) -> StreamChunk:
    tokens = [10 + index] if text else []
    return StreamChunk(
        tokens=tokens,
        logprobs=[-0.5] * len(tokens),
        text=text,
        prompt_tokens=9,
        number=1,
        **fields,
    )


def _same(known: Submit, submit: Submit) -> bool:
    if submit.stream == "log" or known.stream == "log":
        return False
    token = submit.client_token is not None and known.client_token == submit.client_token
    return token or known.number == submit.number


def _packed(message: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.msgpack.encode(message), status, media_type=CONTENT_TYPE)


def _framed(chunk: StreamChunk) -> bytes:
    content = msgspec.msgpack.encode(chunk)
    return struct.pack("<I", len(content)) + content
