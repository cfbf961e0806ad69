"""Many sessions in one process: follows the assignments, beats, and watches the worker."""

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.cluster_http import HeartbeatAnswer
from gristmill_contracts.errors import (
    FencedError,
    GristmillError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from gristmill_contracts.http import Assignment, Heartbeat, WorkerStatus
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.units import now_us
from gristmill_meter.assignments import AssignmentsFolder
from gristmill_meter.clocks import boottime_us
from gristmill_meter.disk import Disk
from gristmill_meter.driver import Driver, make_driver
from gristmill_meter.log import SessionLog
from gristmill_meter.metrics import Metrics
from gristmill_meter.ports import Ledger, LedgerAwayError, Worker
from gristmill_meter.pulse import Pulse
from gristmill_meter.records import SessionState
from gristmill_meter.session import Session
from gristmill_meter.settings import MeterSettings

logger = logging.getLogger(__name__)

LAST_BEAT_S: Final = 2.0
SERVING: Final = frozenset({"Serving", "Blocked"})


@dataclass(slots=True, kw_only=True)
class Meter:
    settings: MeterSettings
    disk: Disk
    worker: Worker
    ledger: Ledger
    metrics: Metrics = field(default_factory=Metrics)
    clock: Callable[[], int] = now_us
    boottime_us: Callable[[], int] = boottime_us
    releases: bool = True
    """False for a drain: it gives up every grant to release results."""
    registers_first: bool = False
    """Sessions take, run and settle nothing before the ledger has taken their registration."""
    drivers: dict[SessionUid, Driver] = field(default_factory=dict)
    worker_status: WorkerStatus | None = None
    ledger_answers: bool = False
    scanned: bool = False
    draining: bool = False
    _opening: set[str] = field(default_factory=set)
    _beat: Pulse = field(default_factory=Pulse)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Serve what is assigned now, and keep following."""
        self.metrics.watch(
            lambda: sum(
                d.session.state.head_seq - d.session.acked_seq for d in self.drivers.values()
            ),
            self._oldest_unacked_s,
            lambda: sum(d.session.log.bytes_written for d in self.drivers.values()),
            self.disk.free_bytes,
        )
        folder = AssignmentsFolder(self.settings.assignments_dir)
        await self.follow(folder.scan())
        self._tasks = [
            asyncio.create_task(self._scan(folder)),
            asyncio.create_task(self._heartbeats()),
            asyncio.create_task(self._watch_worker()),
        ]

    async def follow(self, assignments: dict[SessionUid, Assignment]) -> None:
        """Bring the served sessions in line with the assignments."""
        for uid, assignment in assignments.items():
            driver = self.drivers.get(uid)
            if driver is not None and driver.session.restart_due:
                logger.warning("session_reopened", extra={"session": uid})
                await driver.abandon()
                driver = None
            if driver is None:
                await self._open(assignment)
            elif driver.session.assignment != assignment:
                driver.reassign(assignment)
        for uid in [uid for uid in self.drivers if uid not in assignments]:
            await self.drivers.pop(uid).abandon()
            logger.info("session_left", extra={"session": uid})
        self.scanned = True

    async def _open(self, assignment: Assignment) -> None:
        """Recover a session; it is there for nobody before. One that is opened again stays broken till then."""
        driver = self._make(assignment)
        self._opening.add(assignment.uid)
        try:
            await driver.start()
        except asyncio.CancelledError:
            await driver.abandon()
            raise
        finally:
            self._opening.discard(assignment.uid)
        self.drivers[assignment.uid] = driver
        self._beat.ring()

    def _make(self, assignment: Assignment) -> Driver:
        session = Session(
            assignment=assignment,
            settings=self.settings,
            disk=self.disk,
            log=SessionLog(disk=self.disk, folder=assignment.uid),
            state=SessionState(uid=assignment.uid),
            metrics=self.metrics,
            now_us=self.clock,
            on_change=self._beat.ring,
            boottime_us=self.boottime_us,
            admitted=not self.registers_first,
            gave_up_release=not self.releases,
            others_bytes=lambda: self._promised_bytes(assignment.uid),
        )
        if self.worker_status is not None:
            session.context_length = self.worker_status.context_length
        return make_driver(session, self.worker, self.ledger)

    def _promised_bytes(self, but: SessionUid) -> int:
        """What the logs of all sessions but one may still write to the volume."""
        others = [driver.session for uid, driver in self.drivers.items() if uid != but]
        return sum(each.state.room_bytes + each.log.unwritten_bytes for each in others)

    def admit(self, uid: str, authorization: str, attempt: str) -> Driver:
        """The session's driver, for a caller with its secret and attempt.

        Raises NotFoundError, UnavailableError while it is being opened, UnauthenticatedError, FencedError
        for another attempt.
        """
        driver = self.drivers.get(SessionUid(uid))
        if driver is None and uid in self._opening:
            raise UnavailableError(f"session {uid} is being opened; send the request again")
        if driver is None:
            raise NotFoundError(f"session {uid} is not served here")
        assignment = driver.session.assignment
        expected = f"Bearer {assignment.secret}"
        if not hmac.compare_digest(authorization.encode(), expected.encode()):
            raise UnauthenticatedError(f"the secret for session {uid} is wrong")
        if attempt != str(assignment.attempt):
            raise FencedError(
                f"session {uid} is served as attempt {assignment.attempt}, not {attempt or 'none'}; "
                "read its endpoint again"
            )
        return driver

    # --- loops -----------------------------------------------------------------------------------

    async def _scan(self, folder: AssignmentsFolder) -> None:
        while True:
            await asyncio.sleep(self.settings.scan_s)
            try:
                await self.follow(await asyncio.to_thread(folder.scan))
            except OSError as error:
                logger.error("assignments_unreadable", extra={"error": str(error)})  # noqa: TRY400

    async def _heartbeats(self) -> None:
        told = ""
        while True:
            try:
                await self.beat()
                self.ledger_answers = True
                told = ""
            except GristmillError as error:
                if error.code != told and (self.ledger_answers or not _is_away(error)):
                    logger.warning("heartbeat_not_posted", extra={"error": error.message})
                    told = error.code
                self.ledger_answers = False
                await asyncio.sleep(min(self.settings.heartbeat_s, self.settings.retry_last_s))
                continue
            await self._beat.wait(self.settings.heartbeat_s)

    async def beat(self) -> None:
        """Tell the ledger how the sessions are, and do what it answers."""
        beats = [driver.heartbeat(self.clock()) for driver in self.drivers.values()]
        if beats:
            sent_us = self.boottime_us()
            self._obey(beats, await self.ledger.post_heartbeats(beats), sent_us)

    async def changed(self, at_most_s: float) -> None:
        """Wait until the state of a session changes, or the time is over."""
        await self._beat.wait(at_most_s)

    def _obey(self, beats: list[Heartbeat], answer: HeartbeatAnswer, sent_us: int) -> None:
        """Do what the ledger says of the attempts that beat; another one may have come since."""
        grants = answer.release_until_s
        if grants is None:  # A ledger of the release before knows none: fencing is all it has.
            grants = {beat.view.uid: limits.RELEASE_GRANT_S for beat in beats}
        for beat in beats:
            driver = self.drivers.get(beat.view.uid)
            if driver is None or driver.session.assignment.attempt != beat.view.attempt:
                continue
            if beat.view.uid in answer.fenced:
                driver.fence()
            elif beat.view.uid in grants:
                driver.session.granted(sent_us, grants[beat.view.uid])
            if answer.acked is not None and beat.view.uid not in answer.fenced:
                driver.poster.heard(answer.acked.get(beat.view.uid), beat.acked_seq)
            if beat.view.uid in answer.inbox:
                driver.inbox.look()
            if answer.release_until_s is not None:
                version = answer.budgets.get(beat.view.uid, 0)
                driver.bank.heard(answer.leases, beat.leases, version, sent_us)
            driver.direct(answer.directives.get(beat.view.uid, "serve"))

    async def _watch_worker(self) -> None:
        """Notice a worker that died while nothing ran, so that it is opened again at once."""
        while True:
            marks = {uid: each.session.witness.mark() for uid, each in self.drivers.items()}
            try:
                self.worker_status = await self.worker.status()
            except GristmillError:
                self.worker_status = None
            status = self.worker_status
            for uid, driver in self.drivers.items():
                session, witness = driver.session, driver.session.witness
                driver.link.seen_boot(status.boot_id if status is not None else None)
                if status is not None:
                    session.context_length = status.context_length
                    witness.heard(marks.get(uid, (-1, -1)), uid, status, self.clock())
                witness.look(self.boottime_us(), self.clock(), ready=session.worker_ready)
            await asyncio.sleep(self.settings.heartbeat_s / 2)

    # --- the end ---------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Refuse new work and let held polls go; `close` does the rest."""
        self.draining = True
        for driver in self.drivers.values():
            driver.session.draining = True
            driver.session.let_polls_go()
            driver.session.pulse.ring()

    async def close(self) -> None:
        """Let what runs end within bounds, ship what can be shipped, close the logs."""
        self.begin_drain()
        drains = [driver.drain(self.settings.drain_s) for driver in self.drivers.values()]
        await asyncio.gather(*drains)
        await self._cancel()
        await self._last_beat()

    async def _last_beat(self) -> None:
        """Tell how far the shipping came, and leave the release of results to the next attempt.

        Whoever waits for either need not wait for the process to be gone.
        """
        for driver in self.drivers.values():
            driver.session.gave_up_release = True
        if not self.ledger_answers:
            return
        try:
            async with asyncio.timeout(LAST_BEAT_S):
                await self.beat()
        except (GristmillError, TimeoutError) as error:
            logger.warning("heartbeat_not_posted", extra={"error": str(error)})

    async def abandon(self) -> None:
        """Stop at once, as a crash would."""
        await self._cancel()
        for driver in self.drivers.values():
            await driver.abandon()

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def volume_failed(self) -> bool:
        return any(driver.session.log.failure is not None for driver in self.drivers.values())

    def missing(self) -> list[str]:
        """What `/readyz` names: dependencies that do not answer, and sessions that do not serve."""
        absent = []
        sessions = [driver.session for driver in self.drivers.values()]
        if not self.scanned:
            absent.append("assignments")
        if self.worker_status is None:
            absent.append("worker")
        if not self.ledger_answers:
            absent.append("ledger")
        if self.volume_failed:
            absent.append("volume")
        if any(session.service not in SERVING for session in sessions):
            absent.append("session")
        if any(session.fenced for session in sessions):
            absent.append("fenced")
        return absent

    @property
    def ready(self) -> bool:
        """Whether operations are taken, or served, as the settings ask."""
        needed = {"assignments", "volume"}
        if self.settings.ready_when == "serving":
            needed |= {"worker", "session"}
        some = bool(self.drivers) or self.settings.ready_when == "open"
        return some and not needed & set(self.missing()) and not self.draining

    def _oldest_unacked_s(self) -> float:
        ends = [
            driver.session.state.events[0][1].op_end_us
            for driver in self.drivers.values()
            if driver.session.state.events
        ]
        return max(0.0, time.time() - min(ends) / 1e6) if ends else 0.0


def _is_away(error: GristmillError) -> bool:
    """Expected at a start, and told elsewhere."""
    return isinstance(error, LedgerAwayError)
