"""One session at the meter: its log, the state that the log says, and who waits for it."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.errors import FencedError, GristmillError, InvariantError, UnavailableError
from gristmill_contracts.http import Assignment, OperationState, Problem, SessionView
from gristmill_meter import frames, own_frames
from gristmill_meter.checkpoints import encode_state
from gristmill_meter.clocks import boottime_us
from gristmill_meter.disk import Disk
from gristmill_meter.frames import Frame, checked_frame
from gristmill_meter.log import SessionLog
from gristmill_meter.log_files import Start
from gristmill_meter.metrics import Metrics
from gristmill_meter.pulse import Pulse
from gristmill_meter.rebuild import rebuild
from gristmill_meter.records import Key, Record, SessionState
from gristmill_meter.settings import MeterSettings
from gristmill_meter.state import apply
from gristmill_meter.views import ServiceState, session_view
from gristmill_meter.wallet import Wallet
from gristmill_meter.witness import Witness

logger = logging.getLogger(__name__)

REOPEN_AFTER_S: Final = 2.0
"""Pause before a session that a bug of ours broke is opened again from its log."""
SKIP_BATCH_MAX: Final = 1000
"""Operations named in one frame."""


class SessionOverError(GristmillError):
    """Control flow: nothing runs in this session any more."""

    code = "conflict"


@dataclass(slots=True, kw_only=True)
class Session:
    """`open` it, then use it on the event loop alone."""

    assignment: Assignment
    settings: MeterSettings
    disk: Disk
    log: SessionLog
    state: SessionState
    metrics: Metrics
    now_us: Callable[[], int]
    boottime_us: Callable[[], int] = boottime_us
    others_bytes: Callable[[], int] = lambda: 0  # What other logs may still write to the volume.
    started: set[Key] = field(default_factory=set)
    """Dispatched to the worker, not ended."""
    pulse: Pulse = field(default_factory=Pulse)
    worker_ready: bool = False
    context_length: int = 0
    opened_us: int = 0
    draining: bool = False
    """The process goes down: no new work, held polls are let go."""
    stopping: bool = False
    """The session is to end: no new work, what waits is Skipped."""
    shipped: bool = False
    """Closed, and all usage acknowledged."""
    admitted: bool = True
    """The ledger has taken our registration, or it was not asked: only then is anything taken, run or
    released. In a cluster another attempt may own the session."""
    release_until_us: int = 0
    """By CLOCK_BOOTTIME: until then this attempt alone may release results."""
    gave_up_release: bool = False
    """We end, and said so: the next attempt may have the grant by now."""
    serves: bool = False
    """What waited in the ledger's inbox is in the log: calls are taken."""
    told_to_stop: bool = False
    """By a directive of the ledger; an assignment says the same with `desired`."""
    acked_seq: int = 0
    ledger_has_all: bool = False
    """The ledger knows more than this log: nothing of it is left to ship."""
    broken: GristmillError | None = None
    """The log could not be opened, or the ledger knows more than it holds."""
    crashed_us: int = 0
    """When a bug of ours broke the session; 0 = never."""
    on_change: Callable[[], None] = lambda: None
    polls_held: int = 0
    wallet: Wallet = field(default_factory=Wallet)
    witness: Witness = field(default_factory=Witness)
    blocked: Problem | None = None
    """No budget affords the operation that waits."""
    _announced: ServiceState | None = None
    _held: dict[Key, list[asyncio.Future[None]]] = field(default_factory=dict)
    _ending: deque[tuple[int, Key]] = field(default_factory=deque)

    # --- opening and writing ---------------------------------------------------------------------

    async def open(self) -> None:
        """Recover the log. Errors make the session `broken`; the process goes on with the others."""
        self.opened_us = self.now_us()
        self.log.on_durable = self._on_durable
        try:
            kept = await asyncio.to_thread(self.log.recover, self.opened_us)
            rebuild(self.state, self.log, kept)
        except OSError as error:
            self.broken = UnavailableError(f"the log cannot be opened: {error}")
            self.crashed_us = self.now_us()  # It may be a passing trouble of the volume: try again.
            return
        except GristmillError as error:
            self.broken = error
            return
        if self.state.attempt > self.assignment.attempt:
            self.broken = FencedError(
                f"attempt {self.assignment.attempt} of session {self.state.uid} meets a log of attempt "
                f"{self.state.attempt}"
            )
            return
        if not self.state.closed:
            self.note_owner()
            self._cut_streams()

    def note_owner(self) -> None:
        """Log who the session belongs to, where that is new."""
        a, s = self.assignment, self.state
        if (a.tenant, a.project, a.model, a.attempt) != (s.tenant, s.project, s.model, s.attempt):
            self.write(own_frames.opened(a, self.now_us()))

    def write(self, frame: Frame, blob: tuple[str, bytes] | None = None) -> int:
        """Apply a frame and queue it for the log. What it says is released once it is durable."""
        self.check_log()
        payload = checked_frame(frame)
        try:
            ended = apply(self.state, frame)
        except InvariantError as error:
            self.crashed(error)  # What is in memory cannot be trusted; the log can.
            raise
        number = self.log.append(payload, blob)
        self._settle(frame, ended)
        for record in ended:
            self.started.discard(record.key)
            self._ending.append((number, record.key))
            self.metrics.operation_ended(self.state, record)
        self.metrics.frame_written(self.state, frame)
        if self.log.start_due and not self.state.closed:
            self._write_checkpoint()
        self.announce()
        self.pulse.ring()
        return number

    def _settle(self, frame: Frame, ended: list[Record]) -> None:
        """Put back what was reserved and not used."""
        for record in ended:
            if record.counts.total:
                self.wallet.settle(record.key, record.counts)
            else:
                self.wallet.void(record.key)
        if isinstance(frame, frames.Expired):
            for number in frame.numbers:
                self.wallet.void(("log", number))

    def _write_checkpoint(self) -> None:
        """Begin a segment with all that the log says so far, so that older ones can go.

        It must not take the room of results that are on their way: then it has time.
        """
        state = self.state
        content = encode_state(state)
        reserved = state.room_bytes + self.log.unwritten_bytes + self.others_bytes()
        if self.disk.free_bytes() - reserved < len(content) + limits.FRAME_BYTES_MAX:
            return
        first_seq = state.events[0][1].producer_seq if state.events else state.head_seq + 1
        body, blob = self.log.make_body(f"checkpoint-{state.frames + 1}.state", content)
        frame = frames.Checkpoint(state=body, first_seq=first_seq, at_us=self.now_us())
        apply(state, frame)
        start = Start(frame=state.frames, first_seq=first_seq)
        self.log.append(checked_frame(frame), blob, start=start)

    def _on_durable(self) -> None:
        """The log's durable number has grown, or the log has failed."""
        while self._ending and self._ending[0][0] <= self.log.durable_number:
            key = self._ending.popleft()[1]
            if self._has_ended(key):  # Else its polls wait for the grant.
                self._let_go(key)
        if self.log.failure is not None:
            for key in list(self._held):
                self._let_go(key)
        self.announce()
        self.pulse.ring()

    def _cut_streams(self) -> None:
        """Token streams end with the process that served them, at the last durable PROGRESS."""
        for key in list(self.state.open_keys):
            if self.state.records[key].streaming:
                self.cut_stream(self.state.records[key], "the meter was restarted")

    def cut_stream(self, record: Record, why: str) -> None:
        """Settle a stream that did not reach its end."""
        self.write(own_frames.cut(record, why, self.now_us()))

    def refuse(self, record: Record, error: GristmillError) -> None:
        """Fail an operation that was never dispatched."""
        self.write(own_frames.never_dispatched(record, error, self.now_us()))

    # --- held polls ------------------------------------------------------------------------------

    async def hold(self, key: Key, wait_s: float) -> None:
        """Wait until the operation's end is durable, at most `wait_s`, and not while going down."""
        if wait_s <= 0 or self.draining or self.ended(self.state.records[key]):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.setdefault(key, []).append(waiter)
        try:
            await asyncio.wait([waiter], timeout=min(wait_s, limits.RESULT_WAIT_S_MAX))
        finally:
            waiters = self._held.get(key, [])
            if waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._held[key]
        self.check_log()

    def let_polls_go(self) -> None:
        for key in list(self._held):
            self._let_go(key)

    def _let_go(self, key: Key) -> None:
        for waiter in self._held.pop(key, []):
            if not waiter.done():
                waiter.set_result(None)

    # --- what is told ----------------------------------------------------------------------------

    @property
    def to_stop(self) -> bool:
        return self.told_to_stop or self.assignment.desired == "stop"

    @property
    def fenced(self) -> bool:
        """A newer attempt owns the session: nothing is released any more."""
        return isinstance(self.broken, FencedError)

    @property
    def may_release(self) -> bool:
        """The ledger has granted us the release of results, and the grant still runs."""
        granted = not self.gave_up_release and self.boottime_us() < self.release_until_us
        return granted and self.admitted

    def granted(self, sent_us: int, seconds: float) -> None:
        """A heartbeat that was sent at `sent_us` (boot time) was answered with a grant."""
        may = self.may_release
        self.release_until_us = max(self.release_until_us, sent_us + int(seconds * 1e6))
        if self.may_release and not may:
            self._let_ended_go()

    def _let_ended_go(self) -> None:
        """Polls waited for an end that could not be told before."""
        for key in [key for key in self._held if self._has_ended(key)]:
            self._let_go(key)
        self.pulse.ring()

    async def until_releasable(self) -> None:
        """Wait for a grant. Raises the session's failure, if it has failed meanwhile."""
        while not self.may_release:
            self.check_log()
            await self.pulse.wait()

    def ended(self, record: Record) -> bool:
        """Ended, and its end may be told."""
        durable = record.terminal and record.settled_frame <= self.log.durable_number
        return durable and self.may_release

    def _has_ended(self, key: Key) -> bool:
        record = self.state.records.get(key)
        return record is None or self.ended(record)

    def visible(self, record: Record) -> OperationState:
        """The state that may be told: an end only once it is durable."""
        if self.ended(record):
            return record.state
        return "InProgress" if record.terminal or record.key in self.started else "Pending"

    @property
    def service(self) -> ServiceState:
        if self.shipped:
            return "Closed"
        if self.failed:
            return "Draining" if self.stopping and self.broken is None else "Failed"
        if self.stopping or self.draining or self.state.closed:
            return "Draining"
        if not (self.admitted and self.serves):
            return "Recovering"
        if self.blocked is not None or self.state.missing_number is not None:
            return "Blocked"
        return "Serving" if self.worker_ready else "Recovering"

    def announce(self) -> None:
        """Have a heartbeat sent at once if the session's state has changed."""
        service = self.service
        if service != self._announced:
            self._announced = service
            self.on_change()

    def fail(self, error: GristmillError) -> None:
        """The session cannot go on: record why, and skip what waits."""
        if self.state.failure is not None or self.log.failure is not None:
            return
        waiting = [key for key in self.state.open_keys if key not in self.started]
        problem = Problem(code=error.code, message=error.message)
        self.write(
            frames.SessionFailed(
                error=problem, skipped=waiting[:SKIP_BATCH_MAX], at_us=self.now_us()
            )
        )
        self.skip(waiting[SKIP_BATCH_MAX:], f"the session failed: {error.message}")

    def skip(self, keys: list[Key], reason: str) -> None:
        for at in range(0, len(keys), SKIP_BATCH_MAX):
            batch = keys[at : at + SKIP_BATCH_MAX]
            self.write(frames.Skipped(operations=batch, reason=reason, at_us=self.now_us()))

    @property
    def over(self) -> bool:
        """Nothing may be started any more."""
        return self.stopping or self.draining or self.state.closed or self.failed

    @property
    def failed(self) -> bool:
        return self.unwritable or self.state.failure is not None

    @property
    def unwritable(self) -> bool:
        return self.broken is not None or self.log.failure is not None

    @property
    def restart_due(self) -> bool:
        return self.crashed_us > 0 and self.now_us() - self.crashed_us >= REOPEN_AFTER_S * 1e6

    def admit(self) -> None:
        """The ledger has taken our registration."""
        self.admitted = True
        self.on_change()  # A heartbeat at once: it brings the grant to release.
        self._let_ended_go()

    def serve(self) -> None:
        """Nothing waits in the inbox any more."""
        self.serves = True
        self.announce()
        self.pulse.ring()

    def crashed(self, error: BaseException) -> None:
        """Our own bug: nothing more is released; the meter opens the session again, from its log."""
        logger.error("session_crashed", extra={"session": self.state.uid}, exc_info=error)
        self.crashed_us = self.now_us()
        self.break_off(InvariantError(f"internal error in session {self.state.uid}: {error}"))

    def break_off(self, error: GristmillError) -> None:
        """Stop serving: the log cannot be trusted, or is not ours any more."""
        if self.broken is None:
            logger.error(
                "session_broken", extra={"session": self.state.uid, "error": error.message}
            )
            self.broken = error
        self.let_polls_go()
        self.announce()
        self.pulse.ring()

    async def wait_for_claims(self, at_most_s: float) -> None:
        """Let held polls claim what has just ended."""
        await self.log.durable(self.log.appended_number)
        deadline_us = self.now_us() + int(at_most_s * 1e6)
        while self.polls_held and self.now_us() < deadline_us:
            if not await self.pulse.wait(at_most_s):
                return

    async def recall_events(self) -> None:
        """Bring usage back that was acknowledged once and that the ledger has lost since."""
        await self.log.durable(self.log.appended_number)
        again = SessionState(uid=self.state.uid)
        rebuild(again, self.log, await asyncio.to_thread(self.log.read_frames))
        kept = (
            self.state.events[0][1].producer_seq if self.state.events else self.state.head_seq + 1
        )
        older = [entry for entry in again.events if entry[1].producer_seq < kept]
        self.state.events.extendleft(reversed(older))

    def view(self) -> SessionView:
        view = session_view(self.state, self.service, self.assignment.attempt)
        error = self.broken or self.log.failure
        if error is not None and view.error is None:
            view.error = Problem(code=error.code, message=error.message, retryable=error.retryable)
        if view.error is None and view.state == "Blocked":
            view.error = self.blocked
        return view

    def check_log(self) -> None:
        if self.broken is not None:
            raise self.broken
        if self.log.failure is not None:
            raise self.log.failure
