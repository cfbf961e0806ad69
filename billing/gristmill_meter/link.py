"""A session's tie to the worker: opened, and brought to where the log is, before anything runs there."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gristmill_contracts.errors import (
    GristmillError,
    LogLostError,
    ReplayDivergedError,
    UnavailableError,
    VolumeFailedError,
)
from gristmill_contracts.http import Executed, OpenedSession, OpenSession
from gristmill_contracts.operations import SaveState
from gristmill_meter.artifacts import Artifacts
from gristmill_meter.decisions import ReplayStep, replay_step
from gristmill_meter.ports import ExecuteCall, Worker, WorkerLostError
from gristmill_meter.pulse import backoff
from gristmill_meter.records import Record
from gristmill_meter.session import Session, SessionOverError

logger = logging.getLogger(__name__)

SKIPPED: Final = msgspec.msgpack.encode(SaveState(location="", description=""))
"""Stands in for an operation that is only counted again: the worker reads every message as a whole,
and the log may no longer hold what was sent."""
REOPEN_MAX: Final = 4
"""Openings in a row that may end in a worker that is ahead of the log, or fails what once succeeded."""


class ReplayFailedError(UnavailableError):
    """An operation that once succeeded failed in replay: open again, replay again."""


@dataclass(slots=True, kw_only=True)
class WorkerLink:
    session: Session
    worker: Worker
    artifacts: Artifacts
    boot_id: str = ""
    generation: int = 0
    """Grows with every loss, so that a late loss is not taken for a new one."""
    oldest_replayable: int = 0
    _opened: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def ensure(self) -> int:
        """The generation of a worker that is where the log is. Waits for ever for a worker that is away.

        Raises SessionOverError once the session can run nothing any more.
        """
        async with self._lock:
            if not self._opened:
                await self._open()
            return self.generation

    def lost(self, generation: int) -> None:
        """What ran in this generation was lost with its worker."""
        if generation == self.generation:
            self.generation += 1
            self._opened = False
            self.session.witness.lost()
            self._tell(ready=False)

    def seen_boot(self, boot_id: str | None) -> None:
        """A status answer: another boot than ours (None = no answer) means that ours is gone."""
        if self._opened and boot_id != self.boot_id:
            self.lost(self.generation)

    async def _open(self) -> None:
        attempt = reopened = 0
        waiting_since_us = self.session.now_us()
        while True:
            self._check_over(waiting_since_us)
            try:
                opened = await self._open_and_replay()
            except (ReplayDivergedError, LogLostError) as error:
                reopened += 1
                if reopened >= REOPEN_MAX or isinstance(error, LogLostError):
                    self.session.fail(error)
                    raise SessionOverError(error.message) from error
                await self._drop()
            except ReplayFailedError as error:
                reopened += 1
                logger.warning("replay_failed", extra=self._fields(error))
                if reopened >= REOPEN_MAX:
                    self.session.fail(ReplayDivergedError(error.message))
                    raise SessionOverError(error.message) from error
                await self._drop()
            except GristmillError as error:
                if not isinstance(error, WorkerLostError):
                    logger.warning("worker_refused_session", extra=self._fields(error))
                settings = self.session.settings
                await backoff(attempt, settings.retry_first_s, settings.retry_last_s)
                attempt += 1
            else:
                self.boot_id = opened.boot_id
                self.session.witness.opened(opened.boot_id, opened.opening)
                self._opened = True
                self._tell(ready=True)
                return

    def _check_over(self, waiting_since_us: int) -> None:
        session = self.session
        waited_s = (session.now_us() - waiting_since_us) / 1e6
        if session.failed or (session.over and waited_s > session.settings.stop_wait_s):
            raise SessionOverError(f"session {session.state.uid} runs nothing any more")

    async def _open_and_replay(self) -> OpenedSession:
        a, state = self.session.assignment, self.session.state
        request = OpenSession(
            tenant=a.tenant,
            rank=a.rank,
            alpha=a.alpha,
            seed=a.seed,
            state_dir=f"{self.session.settings.worker_state_dir}/{a.uid}",
            applied_max=state.executed_count,
        )
        opened = await self.worker.open_session(a.uid, request)
        if opened.applied > state.executed_count:
            raise ReplayDivergedError(
                f"the worker holds {opened.applied} operations of session {a.uid} and its log only "
                f"{state.executed_count}; the worker's snapshots are newer than the log"
            )
        if opened.applied < state.executed_count:
            logger.info(
                "replay_begun",
                extra={"session": a.uid, "from": opened.applied, "to": state.executed_count},
            )
        if opened.applied < state.executed_before:
            raise LogLostError(
                f"the worker holds {opened.applied} operations of session {a.uid}, and the log begins "
                f"behind {state.executed_before}: both snapshots are gone; restore the worker's folder"
            )
        elsewhere: list[str] = []
        for index in range(opened.applied + 1, state.executed_count + 1):
            step = replay_step(state, index)
            if not await self._feed_again(step):
                elsewhere.append(step.record.fingerprint)
        if elsewhere:
            # Not told from the numbers of before: no checksum holds between two fingerprints.
            fields = {"session": a.uid, "operations": len(elsewhere), "first": elsewhere[0]}
            logger.warning("replay_approximate", extra=fields | {"now": opened.fingerprint})
        return opened

    async def _feed_again(self, step: ReplayStep) -> bool:
        """Replay one executed operation; its answer is compared and discarded, never billed.

        False = it ran on another execution fingerprint than at first: the same numbers but for rounding.
        """
        session, record = self.session, step.record
        content = SKIPPED
        if record.payload is None:
            if not step.skip:
                raise LogLostError(
                    f"operation {record.number} is needed for replay but lies below the snapshots"
                )
        elif not step.skip:
            try:
                content = await session.log.read_body(record.payload)
            except VolumeFailedError as error:
                raise LogLostError(f"replay is impossible: {error.message}") from error
        call = ExecuteCall(
            index=record.index,
            op_id=str(session.state.op_id(record)),
            operation=msgspec.Raw(content),
            replay=True,
            skip=step.skip,
            expected_checksum=record.checksum,
            expected_fingerprint=record.fingerprint,
        )
        if not step.skip:
            await self.artifacts.prepare(record.kind, content)
        executed = await self.worker.execute(session.state.uid, call)
        session.metrics.replayed.inc()
        if step.skip:
            return True
        if executed.error is not None:
            if executed.error.code == ReplayDivergedError.code:
                raise ReplayDivergedError(executed.error.message)
            raise ReplayFailedError(
                f"operation {record.number} failed in replay: {executed.error.message}"
            )
        return _ran_alike(record, executed)

    async def _drop(self) -> None:
        """Have the worker forget its live state, so that the next opening starts from a snapshot."""
        try:
            await self.worker.close_session(self.session.state.uid)
        except GristmillError as error:
            logger.info("worker_close_failed", extra=self._fields(error))

    def _tell(self, *, ready: bool) -> None:
        self.session.worker_ready = ready
        self.session.announce()
        self.session.pulse.ring()

    def _fields(self, error: GristmillError) -> dict[str, str]:
        return {"session": self.session.state.uid, "code": error.code, "error": error.message}


def _ran_alike(record: Record, executed: Executed) -> bool:
    """Whether it ran on the execution fingerprint of the log; raises ReplayDivergedError if its numbers differ there."""
    if executed.fingerprint != record.fingerprint:
        return False
    if record.checksum not in {None, executed.checksum}:
        raise ReplayDivergedError(
            f"replay of operation {record.number} gave checksum {executed.checksum} where the log has "
            f"{record.checksum}, both on the execution fingerprint {record.fingerprint}"
        )
    return True
