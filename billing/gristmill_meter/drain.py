"""`python -m gristmill_meter drain`: close the logs of a volume and ship them, without a worker.

For a session whose pods are gone, and for logs that an earlier end left unflushed. What waited is
Skipped, a stream is settled at its last durable tokens, results that nobody fetched become attempts:
all as a meter that is told to stop does it. Nothing is settled before the ledger has taken the log's
registration, since a newer attempt may own the session.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from gristmill_contracts.errors import GristmillError, LogLostError, UnavailableError
from gristmill_contracts.http import (
    Assignment,
    Executed,
    OpenedSession,
    OpenSession,
    Snapshotted,
    StreamChunk,
    WorkerStatus,
)
from gristmill_contracts.ids import SessionUid
from gristmill_meter.assignments import AssignmentsFolder, is_folder_name
from gristmill_meter.disk import Disk
from gristmill_meter.driver import Driver
from gristmill_meter.log import SessionLog
from gristmill_meter.meter import Meter
from gristmill_meter.ports import ExecuteCall, Ledger, WorkerLostError
from gristmill_meter.rebuild import rebuild
from gristmill_meter.records import SessionState
from gristmill_meter.settings import MeterSettings

logger = logging.getLogger(__name__)

Outcome = Literal["shipped", "fenced", "log_lost", "volume_failed", "failed", "pending"]

EXITS: Final[dict[Outcome, int]] = {
    "failed": 1,
    "volume_failed": 3,
    "pending": 5,
    "log_lost": 4,
    "fenced": 6,
    "shipped": 0,
}
"""In order of precedence: where another try may help comes first, since whoever runs this retries it."""

REMEDIES: Final[dict[Outcome, str]] = {
    "failed": "this is a bug of ours; keep the volume",
    "volume_failed": "the volume does not take or give data; repair it and drain again",
    "pending": "the ledger did not take everything in time; drain again when it answers",
    "log_lost": "restore the volume's newest copy, or record the gap",
    "fenced": "a newer attempt owns the session, and what was here was handed in",
    "shipped": "",
}


class NoWorker:
    """Implements `ports.Worker` where there is none."""

    async def status(self) -> WorkerStatus:
        raise _nobody()

    async def open_session(self, uid: SessionUid, request: OpenSession) -> OpenedSession:
        raise _nobody()

    async def execute(self, uid: SessionUid, call: ExecuteCall) -> Executed:
        raise _nobody()

    async def stream(self, uid: SessionUid, call: ExecuteCall) -> AsyncGenerator[StreamChunk, None]:
        raise _nobody()
        yield  # Makes it a generator, as the port asks.

    async def snapshot(self, uid: SessionUid) -> Snapshotted:
        raise _nobody()

    async def close_session(self, uid: SessionUid) -> None:
        raise _nobody()


def _nobody() -> WorkerLostError:
    return WorkerLostError("a drain has no worker")


@dataclass(slots=True, kw_only=True)
class Drain:
    """Build, then `run` once."""

    settings: MeterSettings
    disk: Disk
    ledger: Ledger
    timeout_s: float
    _unreadable: list[Outcome] = field(default_factory=list)
    """Of logs that do not even say whose they are: nobody can be told of those but the caller."""

    async def run(self) -> int:
        """Drain everything there is, or until the time is over. Returns the exit status."""
        assignments = await asyncio.to_thread(self._assignments)
        if not assignments and not self._unreadable:
            logger.info("drain_found_nothing", extra={"folder": str(self.settings.data_dir)})
        outcomes = await self._drain(assignments) if assignments else []
        return exit_status([*outcomes, *self._unreadable])

    async def _drain(self, assignments: dict[SessionUid, Assignment]) -> list[Outcome]:
        meter = Meter(
            settings=self.settings.model_copy(update={"stop_wait_s": 0.0}),
            disk=self.disk,
            worker=NoWorker(),
            ledger=self.ledger,
            registers_first=True,
            releases=False,
        )
        await meter.follow(assignments)
        try:
            await self._until_told(meter)
            outcomes = {uid: _final(driver) for uid, driver in meter.drivers.items()}
        finally:
            await meter.abandon()
        for uid, outcome in outcomes.items():
            _report(meter.drivers[uid], outcome)
        return list(outcomes.values())

    def _assignments(self) -> dict[SessionUid, Assignment]:
        """Those that were given, else one for each log; all to stop."""
        given = AssignmentsFolder(self.settings.assignments_dir).scan() or self._found()
        return {
            uid: msgspec.structs.replace(assignment, desired="stop")
            for uid, assignment in given.items()
        }

    def _found(self) -> dict[SessionUid, Assignment]:
        """An assignment from what each log says of itself. A log without a frame has nothing to ship."""
        found: dict[SessionUid, Assignment] = {}
        for name in self.disk.list(""):
            if not is_folder_name(name) or "epoch" not in self.disk.list(name):
                continue
            state = SessionState(uid=SessionUid(name))
            try:
                log = SessionLog(disk=self.disk, folder=name)
                rebuild(state, log, log.recover(0))
            except (GristmillError, OSError) as error:
                outcome: Outcome = "volume_failed" if isinstance(error, OSError) else "log_lost"
                self._unreadable.append(outcome)
                what = {"session": name, "outcome": outcome, "error": str(error)}
                logger.error("drain_failed", extra=what | {"remedy": REMEDIES[outcome]})  # noqa: TRY400
                continue
            if state.tenant:
                found[state.uid] = _assignment_of(state)
        return found

    async def _until_told(self, meter: Meter) -> None:
        """Beat until the ledger has heard how everything ended. Errors are tried again."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.timeout_s
        away = False
        while clock() < deadline:
            ended = all(outcome_of(driver) != "pending" for driver in meter.drivers.values())
            try:
                async with asyncio.timeout_at(deadline):
                    await meter.beat()
                away = False
            except (GristmillError, TimeoutError) as error:
                if not away:
                    logger.warning("drain_waits_for_the_ledger", extra={"error": str(error)})
                away = True
            if ended and not away:
                return
            pause_s = self.settings.retry_last_s if away else self.settings.heartbeat_s
            await meter.changed(min(pause_s, max(0.0, deadline - clock())))


def outcome_of(driver: Driver) -> Outcome:
    """How the drain of a session stands."""
    session = driver.session
    if session.log.failure is not None:
        return "volume_failed"
    if session.fenced:
        return "fenced" if driver.poster.handed_in or not driver.poster.started else "pending"
    if isinstance(session.broken, LogLostError):
        return "log_lost"
    if isinstance(session.broken, UnavailableError):
        return "volume_failed"
    if session.broken is not None:
        return "failed"
    return "shipped" if session.shipped else "pending"


def _final(driver: Driver) -> Outcome:
    """A full volume may get room while we wait; at the end it is the volume's fault."""
    outcome = outcome_of(driver)
    return "volume_failed" if outcome == "pending" and driver.session.log.full else outcome


def exit_status(outcomes: list[Outcome]) -> int:
    """0 only where everything was shipped."""
    return next(status for outcome, status in EXITS.items() if outcome in (*outcomes, "shipped"))


def _assignment_of(state: SessionState) -> Assignment:
    return Assignment(
        uid=state.uid,
        tenant=state.tenant,
        project=state.project,
        name="",
        model=state.model,
        attempt=state.attempt,
        secret="",
        rank=1,
        alpha=1,
        seed=0,
        checkpoint_group="",
        desired="stop",
    )


def _report(driver: Driver, outcome: Outcome) -> None:
    session = driver.session
    cursors = {
        "session": session.state.uid,
        "attempt": session.assignment.attempt,
        "acked_seq": session.acked_seq,
        "head_seq": session.state.head_seq,
    }
    if outcome == "shipped":
        logger.info("drain_shipped", extra=cursors)
        return
    error = session.broken or session.log.failure
    what = {
        "outcome": outcome,
        "error": error.message if error else "",
        "remedy": REMEDIES[outcome],
    }
    logger.error("drain_failed", extra=cursors | what)
