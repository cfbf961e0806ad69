"""Run one operation at the worker, whatever happens to the worker, and log how it ended."""

import logging
from dataclasses import dataclass
from typing import Final

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.errors import (
    ConflictError,
    FencedError,
    ForbiddenError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
    OperationFailedError,
    VolumeFailedError,
)
from gristmill_contracts.http import Executed, Problem, RegisterCheckpoint
from gristmill_contracts.operations import (
    CheckpointRef,
    LoadState,
    LoadWeightsForSampling,
    Operation,
    Result,
    SaveResult,
    SaveState,
    SaveWeights,
    count_result,
)
from gristmill_contracts.reconciliation import tally_of
from gristmill_meter import frames
from gristmill_meter.artifacts import Artifacts
from gristmill_meter.link import WorkerLink
from gristmill_meter.ports import ExecuteCall, Ledger, LedgerAwayError, WorkerLostError
from gristmill_meter.pulse import backoff
from gristmill_meter.records import Record
from gristmill_meter.session import Session, SessionOverError

logger = logging.getLogger(__name__)

WORKER_DEATHS_MAX: Final = 8
"""Losses of the worker during one operation, after which the operation is taken for their cause."""

_operations: Final = msgspec.msgpack.Decoder(Operation)


@dataclass(slots=True, kw_only=True)
class Execution:
    """Everything that one run needs; `run` may be called many times, for train operations one at a time."""

    session: Session
    link: WorkerLink
    ledger: Ledger
    artifacts: Artifacts

    async def run(self, record: Record, index: int) -> None:
        """Run until a RESULT or FAILED frame is written. Skipped instead where the session is over."""
        session = self.session
        session.started.add(record.key)
        session.pulse.ring()
        started_us = session.now_us()
        try:
            content = await session.log.read_body(_payload(record))
        except VolumeFailedError as error:
            if not session.unwritable:
                self._failed(record, _problem(error), 0, 0, started_us)
            return
        try:
            await self._run(record, index, content, started_us)
        except GristmillError as error:
            if not isinstance(error, SessionOverError) and not session.unwritable:
                raise
            if record.terminal or session.unwritable:
                return
            if session.stopping or session.state.failure is not None:
                session.skip([record.key], error.message)
            else:
                session.started.discard(record.key)  # The next process runs it.

    async def _run(self, record: Record, index: int, content: bytes, started_us: int) -> None:
        session = self.session
        call = ExecuteCall(
            index=index, op_id=str(session.state.op_id(record)), operation=msgspec.Raw(content)
        )
        try:
            await self.artifacts.prepare(record.kind, content)
        except SessionOverError:
            raise
        except GristmillError as error:
            self._failed(record, _problem(error), 0, 0, started_us)
            return
        losses = busy = 0
        while True:
            generation = await self.link.ensure()
            call.opening = session.witness.begin()
            try:
                executed = await self.link.worker.execute(session.state.uid, call)
                break
            except (InvalidRequestError, ForbiddenError) as error:
                session.witness.end(call.opening)
                self._failed(record, _problem(error), 0, 0, started_us)
                return
            except GristmillError as error:
                session.witness.end(call.opening)
                lost = isinstance(error, WorkerLostError)
                if error.retryable and not lost:
                    await backoff(
                        busy, session.settings.retry_first_s, session.settings.retry_last_s
                    )
                    busy += 1
                    continue
                # Unknown session, another index, or no answer: open again, from the log.
                if not lost and not isinstance(error, NotFoundError | ConflictError):
                    logger.warning(
                        "worker_error", extra={"code": error.code, "error": error.message}
                    )
                self.link.lost(generation)
                losses += 1
                if losses >= WORKER_DEATHS_MAX:
                    self._failed(record, _given_up(losses, error), 0, 0, started_us)
                    return
        await self._settle(record, index, content, executed, started_us)
        one = None
        if executed.error is None:  # It completed there, whatever became of its checkpoint here.
            one = tally_of(record.counts, executed.wall_us)
        session.witness.end(call.opening, record.kind, one)

    async def _settle(
        self, record: Record, index: int, content: bytes, executed: Executed, started_us: int
    ) -> None:
        """Turn the worker's answer into the frame that ends the operation."""
        result, error = executed.result, executed.error
        operation = None
        if record.kind not in ("forward", "forward_backward", "optim_step"):
            operation = _operations.decode(content)
        if error is None and isinstance(result, SaveResult):
            try:
                result = await self._register(record, operation, result)
            except FencedError as fence:
                self.session.break_off(fence)  # The owner runs it again: it did not fail.
                raise
            except GristmillError as refusal:
                error = _problem(refusal)
        if result is None or error is not None:
            error = error or Problem(code="internal", message="the worker answered nothing")
            error.message = error.message[: limits.MESSAGE_CHARS_MAX]
            self._failed(record, error, index, executed.wall_us, started_us)
            return
        session = self.session
        body, blob = session.log.make_body(
            f"{record.stream}-{record.number}.result", msgspec.msgpack.encode(result)
        )
        session.write(
            frames.Result(
                stream=record.stream,
                number=record.number,
                result=body,
                counts=record.counts if operation is None else count_result(operation, result),
                index=index,
                checksum=executed.checksum,
                fingerprint=executed.fingerprint,
                wall_us=executed.wall_us,
                default_adapter=_new_default(operation, result),
                started_us=started_us,
                at_us=session.now_us(),
                lease=session.wallet.lease_of(record.key),
            ),
            blob,
        )

    def _failed(
        self, record: Record, error: Problem, index: int, wall_us: int, started_us: int
    ) -> None:
        session = self.session
        session.write(
            frames.Failed(
                stream=record.stream,
                number=record.number,
                error=error,
                index=index,
                wall_us=wall_us,
                started_us=started_us,
                at_us=session.now_us(),
            )
        )

    async def _register(
        self, record: Record, operation: Operation | None, saved: SaveResult
    ) -> SaveResult:
        """Have the ledger keep the checkpoint and know it; idempotent by its id, tried until it answers."""
        session, a = self.session, self.session.assignment
        description = ""
        if isinstance(operation, SaveWeights | SaveState):
            description = operation.description
        request = RegisterCheckpoint(
            id=saved.checkpoint_id,
            tenant=a.tenant,
            session=a.uid,
            group=a.checkpoint_group,
            kind=saved.kind,
            path=saved.path,
            model=a.model,
            rank=saved.rank,
            alpha=saved.alpha,
            size_bytes=saved.size_bytes,
            manifest_sha256=saved.manifest_sha256,
            description=description,
            created_us=record.accepted_us,
        )
        attempt = 0
        while True:
            try:
                await self.artifacts.upload(saved)
                known = await self.ledger.register_checkpoint(request, a.attempt)
            except LedgerAwayError:
                if session.failed:
                    raise
                await backoff(
                    attempt, session.settings.retry_first_s, session.settings.retry_last_s
                )
                attempt += 1
            else:
                return msgspec.structs.replace(saved, group=known.group, version=known.version)


def _payload(record: Record) -> frames.Body:
    if record.payload is None:
        raise VolumeFailedError(f"the payload of operation {record.number} is gone")
    return record.payload


def _new_default(operation: Operation | None, result: Result) -> CheckpointRef | None:
    """The checkpoint that samples without one use from here on, if this operation chose it."""
    if isinstance(operation, LoadWeightsForSampling):
        return operation.adapter
    if isinstance(operation, LoadState):
        return operation.checkpoint
    if isinstance(result, SaveResult):
        return CheckpointRef(id=result.checkpoint_id, path=result.path, name=result.path)
    return None


def _problem(error: GristmillError) -> Problem:
    message = error.message[: limits.MESSAGE_CHARS_MAX]
    return Problem(code=error.code, message=message, retryable=error.retryable)


def _given_up(losses: int, error: GristmillError) -> Problem:
    return Problem(
        code=OperationFailedError.code,
        message=f"the worker was lost {losses} times while it ran this operation: {error.message}",
    )
