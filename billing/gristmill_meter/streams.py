"""Token streams: every flush is durable as PROGRESS before it leaves, so what left is what is billed."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.errors import (
    BudgetExhaustedError,
    GristmillError,
    InvalidRequestError,
    UnavailableError,
)
from gristmill_contracts.http import Problem, StreamChunk, Submit
from gristmill_contracts.operations import (
    Sample,
    SampledSequence,
    SampleResult,
    stream_counts,
    tensor,
)
from gristmill_contracts.reconciliation import STREAM_KIND, tally_of
from gristmill_meter import frames
from gristmill_meter.bank import Bank
from gristmill_meter.link import WorkerLink
from gristmill_meter.ports import ExecuteCall, WorkerLostError
from gristmill_meter.records import Record
from gristmill_meter.session import Session

logger = logging.getLogger(__name__)

_samples: Final = msgspec.msgpack.Decoder(Sample)


@dataclass(slots=True, kw_only=True)
class TokenStream:
    """One stream on its way from the worker to a client. The reader takes chunks, or abandons it."""

    session: Session
    link: WorkerLink
    bank: Bank
    record: Record
    chunks: asyncio.Queue[StreamChunk] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _started_us: int = 0
    _afforded: int | None = None
    """Tokens that the budgets left afford, where that is less than what was asked for."""

    async def read(self) -> AsyncGenerator[StreamChunk, None]:
        """Chunks up to the final one or an error. Closing the generator abandons the stream."""
        try:
            while True:
                chunk = await self.chunks.get()
                yield chunk
                if chunk.final is not None or chunk.error is not None:
                    return
        finally:
            self.abandoned.set()

    async def run(self) -> None:
        """Move the tokens, then settle: by RESULT at the end, else at the last durable PROGRESS."""
        self._started_us = self.session.now_us()
        leaving = asyncio.create_task(self.abandoned.wait())
        moving = asyncio.create_task(self._move())
        try:
            await asyncio.wait([leaving, moving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            moving.cancel()
            leaving.cancel()
            await asyncio.wait([leaving, moving])
        why = "the client went away"
        error = None if moving.cancelled() else moving.exception()
        if isinstance(error, BudgetExhaustedError) and not self.record.terminal:
            self.session.refuse(self.record, error)
        if isinstance(error, GristmillError):
            why = error.message
        elif error is not None:
            self.session.crashed(error)
            why = "internal error"
        await self._settle(why)

    async def _settle(self, why: str) -> None:
        if not self.record.terminal and not self.session.unwritable:
            self.session.cut_stream(self.record, why)
        if not self.abandoned.is_set():
            try:
                await self.session.log.durable(self.record.settled_frame)
            except GristmillError as error:
                why = error.message
            if self.record.state != "Completed":
                await self._offer(self._error_chunk(why))

    def _error_chunk(self, why: str) -> StreamChunk:
        problem = self.record.error or Problem(code="unavailable", message=why, retryable=True)
        return StreamChunk(
            tokens=[],
            logprobs=[],
            text="",
            prompt_tokens=self.record.progress_prompt,
            error=problem,
            number=self.record.number,
        )

    async def _move(self) -> None:
        session = self.session
        content = await session.log.read_body(_payload(self.record))
        content = await self._covered(content)
        call = ExecuteCall(
            index=0,
            op_id=str(session.state.op_id(self.record)),
            operation=msgspec.Raw(content),
        )
        await self.link.artifacts.prepare(self.record.kind, content)
        generation = await self.link.ensure()
        call.opening = session.witness.begin()
        source = self.link.worker.stream(session.state.uid, call)
        try:
            async for chunk in source:
                if chunk.error is not None:
                    raise UnavailableError(chunk.error.message)
                for part in split_chunk(chunk, limits.STREAM_FLUSH_TOKENS):
                    await session.until_releasable()
                    await self._flush(part)
        except WorkerLostError:
            self.link.lost(generation)
            raise
        finally:
            if self.record.state == "Completed":
                session.witness.end(call.opening, STREAM_KIND, tally_of(self.record.counts))
            else:
                session.witness.cut(call.opening)
            await source.aclose()

    async def _covered(self, content: bytes) -> bytes:
        """The operation with no more tokens than the budgets afford. Raises BudgetExhaustedError."""
        operation = _samples.decode(content)
        most = await self.bank.cover_stream(self.record, operation)
        if most >= self.record.worst.sample:
            return content
        self._afforded = most
        params = msgspec.structs.replace(operation.params, max_tokens=most)
        return msgspec.msgpack.encode(msgspec.structs.replace(operation, params=params))

    def _mark_cut(self, chunk: StreamChunk) -> None:
        """Say why a stream is shorter than was asked for."""
        if chunk.final == "length" and self._afforded == len(self._tokens):
            chunk.budget = Problem(
                code=BudgetExhaustedError.code,
                message=f"the budget affords {self._afforded} tokens of this answer; raise it for more",
            )

    def _check_reserved(self, chunk: StreamChunk) -> None:
        """A prompt that is longer than was reserved for: nothing of it has left, and nothing leaves."""
        used = stream_counts(
            chunk.prompt_tokens, chunk.cached_tokens, len(self._tokens) + len(chunk.tokens)
        )
        if not self.session.wallet.covers(self.record.key, used):
            raise BudgetExhaustedError(
                f"the prompt has {chunk.prompt_tokens} tokens, more than the budgets afford"
            )

    async def _flush(self, chunk: StreamChunk) -> None:
        """Make a chunk durable, then hand it to the reader."""
        session = self.session
        chunk.number = self.record.number
        self._check_reserved(chunk)
        self._tokens += chunk.tokens
        self._logprobs += chunk.logprobs
        self._text.append(chunk.text)
        self._mark_cut(chunk)
        if chunk.final is None:
            frame = session.write(
                frames.Progress(
                    number=self.record.number,
                    prompt_tokens=chunk.prompt_tokens,
                    tokens=len(self._tokens),
                    started_us=self._started_us,
                    at_us=session.now_us(),
                    lease=session.wallet.lease_of(self.record.key),
                    cached_tokens=chunk.cached_tokens,
                )
            )
        else:
            frame = self._complete(chunk)
        await session.log.durable(frame)
        await session.until_releasable()
        await self._offer(chunk)

    def _complete(self, chunk: StreamChunk) -> int:
        session = self.session
        assert chunk.final is not None
        sequence = SampledSequence(
            tokens=tensor("int64", self._tokens),
            logprobs=tensor("float32", self._logprobs),
            stop_reason=chunk.final,
            text="".join(self._text),
        )
        result = SampleResult(
            sequences=[sequence],
            prompt_logprobs=None,
            topk_prompt_logprobs=None,
            prompt_tokens=chunk.prompt_tokens,
            cached_tokens=chunk.cached_tokens,
        )
        body, blob = session.log.make_body(
            f"log-{self.record.number}.result", msgspec.msgpack.encode(result)
        )
        return session.write(
            frames.Result(
                stream="log",
                number=self.record.number,
                result=body,
                counts=stream_counts(chunk.prompt_tokens, chunk.cached_tokens, len(self._tokens)),
                index=0,
                checksum=None,
                fingerprint="",
                wall_us=0,
                default_adapter=None,
                started_us=self._started_us,
                at_us=session.now_us(),
                lease=session.wallet.lease_of(self.record.key),
            ),
            blob,
        )

    async def _offer(self, chunk: StreamChunk) -> None:
        """Wait for the reader, unless it has left."""
        putting = asyncio.create_task(self.chunks.put(chunk))
        leaving = asyncio.create_task(self.abandoned.wait())
        try:
            done, _ = await asyncio.wait(
                [putting, leaving],
                timeout=limits.STREAM_STALL_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            putting.cancel()
            leaving.cancel()
        if not done:
            self.abandoned.set()


def check_streamable(submit: Submit) -> None:
    """Raises InvalidRequestError for what is no sample of one continuation."""
    operation = submit.operation
    if not isinstance(operation, Sample) or operation.num_samples != 1:
        raise InvalidRequestError("only a sample with num_samples 1 can be streamed")


def split_chunk(chunk: StreamChunk, tokens_max: int) -> list[StreamChunk]:
    """Pieces of at most `tokens_max` tokens; the text and the end go with the last."""
    if len(chunk.tokens) <= tokens_max:
        return [chunk]
    pieces = []
    for at in range(0, len(chunk.tokens), tokens_max):
        last = at + tokens_max >= len(chunk.tokens)
        pieces.append(
            StreamChunk(
                tokens=chunk.tokens[at : at + tokens_max],
                logprobs=chunk.logprobs[at : at + tokens_max],
                text=chunk.text if last else "",
                prompt_tokens=chunk.prompt_tokens,
                cached_tokens=chunk.cached_tokens,
                final=chunk.final if last else None,
            )
        )
    return pieces


def _payload(record: Record) -> frames.Body:
    if record.payload is None:
        raise UnavailableError(f"the payload of operation {record.number} is gone")
    return record.payload
