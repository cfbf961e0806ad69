"""The tasks of one session: trainer, sampler, poster, clockwork; and its orderly end."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.errors import FencedError, GristmillError, OperationFailedError
from gristmill_contracts.http import Assignment, Heartbeat, StreamChunk, Submit
from gristmill_meter import frames
from gristmill_meter.archive import Archiver
from gristmill_meter.artifacts import Artifacts
from gristmill_meter.bank import Bank
from gristmill_meter.decisions import (
    gap_overdue,
    next_train,
    unclaimed_overdue,
)
from gristmill_meter.execution import Execution
from gristmill_meter.inbox import Inbox
from gristmill_meter.intake import accept_stream
from gristmill_meter.link import WorkerLink
from gristmill_meter.ports import Ledger, Worker
from gristmill_meter.poster import Poster
from gristmill_meter.retention import blob_is_needed, forget, needed_from, trim_results
from gristmill_meter.sampler import Sampler
from gristmill_meter.session import SKIP_BATCH_MAX, Session
from gristmill_meter.shared_folder import SharedFolder
from gristmill_meter.streams import TokenStream, check_streamable
from gristmill_meter.trainer import Trainer

logger = logging.getLogger(__name__)

CLOCKWORK_S_MAX: Final = 1.0
"""How often timeouts are looked at; a tenth of the shortest one, if that is shorter."""
SWEEP_S: Final = 10.0
"""How often blob files are looked through."""
WORKER_CLOSE_S_MAX: Final = 30.0
WORKER_AWAY_S: Final = 2.0
"""How long an end waits for operations whose worker is away."""
LEASES_RETURN_S: Final = 2.0
CLAIM_GRACE_S: Final = 1.0
"""How long a stopping session waits for held polls to claim what has just ended."""


@dataclass(slots=True, kw_only=True)
class Driver:
    """Build, `start`, then `stop` (the session ends) or `drain` (the process ends)."""

    session: Session
    worker: Worker
    ledger: Ledger
    link: WorkerLink
    trainer: Trainer
    sampler: Sampler
    poster: Poster
    bank: Bank
    inbox: Inbox
    archiver: Archiver
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _streams: set[asyncio.Task[None]] = field(default_factory=set)
    _stopping: asyncio.Task[None] | None = None
    _sweep_us: int = 0

    async def start(self) -> None:
        """Recover the log and begin. A broken session stays visible and does nothing."""
        session = self.session
        await session.open()
        if session.broken is not None:
            logger.error(
                "session_broken",
                extra={"session": session.state.uid, "error": session.broken.message},
            )
            session.announce()
            return
        self._spawn("poster", self.poster.run())
        self._spawn("bank", self.bank.run())
        session.stopping = session.to_stop  # Before anything is started.
        if session.state.closed:
            session.stopping = True
            self._spawn("shipping", self._ship())
        else:
            self._spawn("trainer", self.trainer.run())
            self._spawn("sampler", self.sampler.run())
            self._spawn("inbox", self.inbox.run())
            self._spawn("clockwork", self._clockwork())
        session.announce()
        if session.to_stop:
            self.stop()

    def _spawn(self, name: str, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.create_task(work, name=f"{name}:{self.session.state.uid}")
        self._tasks[name] = task
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self.session.unwritable:
            self.session.crashed(error)
        self._end_lost()

    def reassign(self, assignment: Assignment) -> None:
        """Take a changed assignment: another attempt, another secret, or the wish to stop."""
        session = self.session
        session.assignment = assignment
        if isinstance(session.broken, FencedError):
            session.crashed_us = 1  # Perhaps it is ours again: open it anew.
        if not session.unwritable and not session.state.closed:
            session.note_owner()
        if session.to_stop:
            self.stop()

    def direct(self, desired: str) -> None:
        """Obey a directive of the ledger, as an assignment that says the same."""
        if desired == "stop" and not self.session.told_to_stop:
            logger.info("session_told_to_stop", extra={"session": self.session.state.uid})
            self.session.told_to_stop = True
            self.stop()

    def fence(self) -> None:
        """A newer attempt has registered: release nothing more. The poster hands in what was released."""
        session = self.session
        if session.broken is None:
            session.break_off(
                FencedError(
                    f"a newer attempt than {session.assignment.attempt} of session {session.state.uid} "
                    "has registered at the ledger"
                )
            )

    async def stream(self, submit: Submit, encoded: bytes) -> AsyncGenerator[StreamChunk, None]:
        """Accept a stream; the caller then reads the chunks."""
        check_streamable(submit)
        record = await accept_stream(self.session, submit, encoded)
        stream = TokenStream(session=self.session, link=self.link, bank=self.bank, record=record)
        task = asyncio.create_task(stream.run())
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        return stream.read()

    # --- clockwork -------------------------------------------------------------------------------

    async def _clockwork(self) -> None:
        settings = self.session.settings
        period_s = min(CLOCKWORK_S_MAX, settings.gap_timeout_s / 10, settings.claim_timeout_s / 10)
        session = self.session
        while not (session.stopping or session.draining or session.unwritable):
            self._expire_gap()
            self._expire_unclaimed()
            await self._remove_blobs()
            await asyncio.sleep(period_s)

    def _expire_gap(self) -> None:
        session = self.session
        if not session.serves:
            return  # What is missing may wait in the inbox.
        busy = any(stream == "train" for stream, _ in session.started)
        if busy or next_train(session.state, session.log.durable_number) is not None:
            return  # What lies before the gap may still run.
        missing = gap_overdue(
            session.state, session.now_us(), session.opened_us, session.settings.gap_timeout_s
        )
        if missing is not None:
            session.fail(
                OperationFailedError(
                    f"sequence number {missing} did not arrive within "
                    f"{session.settings.gap_timeout_s:g} s, while {session.state.last_received_number} "
                    "was received; create a new session, from a saved state if there is one"
                )
            )

    def _expire_unclaimed(self) -> None:
        session = self.session
        overdue = unclaimed_overdue(
            session.state, session.now_us(), session.settings.claim_timeout_s, SKIP_BATCH_MAX
        )
        if overdue:
            session.write(frames.Expired(numbers=overdue, at_us=session.now_us()))

    async def _remove_blobs(self) -> None:
        """Delete segments and blob files that nobody can need any more. What makes them so is durable first."""
        session = self.session
        kept_us = int(session.settings.result_retention_s * 1e6)
        forget(session.state, session.now_us() - kept_us, session.log.durable_number)
        await session.log.durable(session.log.appended_number)
        trim_results(session.state, limits.INLINE_RESULTS_BYTES_MAX)
        if session.now_us() < self._sweep_us:
            return
        self._sweep_us = session.now_us() + int(SWEEP_S * 1e6)
        names = await asyncio.to_thread(session.log.blob_names)
        if await session.log.trim(needed_from(session.state)):
            logger.info(
                "log_trimmed",
                extra={"session": session.state.uid, "first_frame": session.log.first_number},
            )
        first = session.log.first_number
        unneeded = [name for name in names if not blob_is_needed(session.state, name, first)]
        if unneeded:
            await session.log.remove_blobs(unneeded)

    # --- the end ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin to end the session; `service` tells how far it is."""
        session = self.session
        if session.broken is not None:
            self._end_lost()
        elif self._stopping is None and not session.state.closed:
            self._stopping = asyncio.create_task(self._stop())
            self._stopping.add_done_callback(self._ended)

    def _end_lost(self) -> None:
        """A session whose log is older than the ledger's knowledge has nothing to finish or ship."""
        session = self.session
        if session.ledger_has_all and session.to_stop:
            session.stopping = session.shipped = True
            session.announce()

    async def _stop(self) -> None:
        session = self.session
        session.stopping = True
        session.announce()
        while not session.admitted:
            if session.broken is not None:
                return  # Perhaps another attempt goes on with this log: nothing is settled here.
            await session.pulse.wait()
        waiting = [key for key in session.state.open_keys if key not in session.started]
        session.skip(waiting, "the session is stopping")
        session.pulse.ring()
        await self._wait_for_running()
        await session.wait_for_claims(CLAIM_GRACE_S)
        unclaimed = list(session.state.unclaimed)
        for at in range(0, len(unclaimed), SKIP_BATCH_MAX):
            batch = unclaimed[at : at + SKIP_BATCH_MAX]
            session.write(frames.Expired(numbers=batch, at_us=session.now_us()))
        await self._leave_worker()
        await session.log.durable(session.write(frames.Closed(at_us=session.now_us())))
        await self._ship()

    async def _wait_for_running(self) -> None:
        tasks = [self._tasks[name] for name in ("trainer", "sampler") if name in self._tasks]
        tasks += self._streams
        if tasks:
            await asyncio.wait(tasks)

    async def _leave_worker(self) -> None:
        """Last snapshot, then close, if the worker is there; a lost one has nothing to keep."""
        if not self.session.worker_ready:
            return
        try:
            async with asyncio.timeout(WORKER_CLOSE_S_MAX):
                if not self.session.failed:
                    await self.trainer.snapshot()
                await self.ask_worker()
                await self.worker.close_session(self.session.state.uid)
        except (GristmillError, TimeoutError) as error:
            logger.warning(
                "worker_close_failed",
                extra={"session": self.session.state.uid, "error": str(error)},
            )

    async def ask_worker(self) -> None:
        """Hear for the last time what the worker ran: once it closes the session it tells no more."""
        witness, uid = self.session.witness, self.session.state.uid
        mark = witness.mark()
        witness.heard(mark, uid, await self.worker.status(), self.session.now_us())

    async def _ship(self) -> None:
        session = self.session
        # Only the ledger's word of now lets the log go: it may have been restored since its last one.
        self.poster.register_again()
        while session.acked_seq < session.state.head_seq or not self.poster.registered:
            await session.pulse.wait()
        await self.archiver.ship()
        await self._return_leases()
        session.shipped = True
        session.announce()

    async def _return_leases(self) -> None:
        """What is not returned now is in suspense until its session is closed."""
        try:
            async with asyncio.timeout(LEASES_RETURN_S):
                await self.bank.give_back_all()
        except (GristmillError, TimeoutError) as error:
            what = {"session": self.session.state.uid, "error": str(error)}
            logger.warning("leases_not_returned", extra=what)

    async def drain(self, deadline_s: float) -> None:
        """The process goes down: let what runs end, within bounds; the log keeps the rest."""
        session = self.session
        clock = asyncio.get_running_loop().time
        deadline = clock() + deadline_s
        session.draining = True
        session.let_polls_go()
        session.pulse.ring()
        running = [self._tasks[n] for n in ("trainer", "sampler") if n in self._tasks]
        running += self._streams
        if running:
            # In a pod the worker has ended before us: what ran there ends in another attempt.
            patience_s = deadline_s if session.worker_ready else min(deadline_s, WORKER_AWAY_S)
            await asyncio.wait(running, timeout=patience_s)
        if session.worker_ready and not session.unwritable and not session.state.closed:
            try:
                async with asyncio.timeout_at(deadline):
                    await self.trainer.snapshot()
            except TimeoutError:
                logger.warning("snapshot_abandoned", extra={"session": session.state.uid})
        while self._ships and clock() < deadline:
            await session.pulse.wait(deadline - clock())
        if self.poster.registered and not session.shipped:
            await self.archiver.ship_some()
        await self._return_leases()
        await self._cancel()
        await session.log.close()

    @property
    def _ships(self) -> bool:
        """The ledger has not everything, and may still get it."""
        session, poster = self.session, self._tasks.get("poster")
        if poster is None or poster.done() or session.log.failure is not None:
            return False
        return session.fenced or session.acked_seq < session.state.head_seq

    async def abandon(self) -> None:
        """Stop at once, as a crash would, and close the files."""
        self.session.draining = True
        self.session.let_polls_go()
        await self._cancel()
        await self.session.log.close()

    async def _cancel(self) -> None:
        tasks = [*self._tasks.values(), *self._streams]
        if self._stopping is not None:
            tasks.append(self._stopping)
        self.sampler.cancel()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def heartbeat(self, at_us: int) -> Heartbeat:
        session = self.session
        return Heartbeat(
            view=session.view(),
            tenant=session.assignment.tenant,
            acked_seq=session.acked_seq,
            head_seq=session.state.head_seq,
            snapshot_applied=session.state.snapshots[1],
            worker_ready=session.worker_ready,
            at_us=at_us,
            released=session.gave_up_release and self.poster.registered,
            leases=list(session.wallet.purses),
            recon=session.witness.recon_point(session.state, session.log.durable_number),
            device=session.witness.device_time(),
        )


def make_driver(session: Session, worker: Worker, ledger: Ledger) -> Driver:
    """Wire the parts of one session. Nothing starts."""
    root = session.settings.artifacts_dir
    shared = None if root is None else SharedFolder(root=root)
    artifacts = Artifacts(session=session, ledger=ledger, shared=shared)
    link = WorkerLink(session=session, worker=worker, artifacts=artifacts)
    execution = Execution(session=session, link=link, ledger=ledger, artifacts=artifacts)
    bank = Bank(session=session, ledger=ledger, wallet=session.wallet)
    poster = Poster(session=session, ledger=ledger)
    return Driver(
        session=session,
        worker=worker,
        ledger=ledger,
        link=link,
        trainer=Trainer(session=session, link=link, execution=execution, bank=bank),
        sampler=Sampler(session=session, execution=execution, bank=bank),
        bank=bank,
        poster=poster,
        inbox=Inbox(session=session, ledger=ledger, poster=poster),
        archiver=Archiver(session=session, ledger=ledger),
    )
