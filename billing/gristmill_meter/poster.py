"""At-least-once delivery of a session's usage, in producer order. The ledger makes it exactly once."""

import asyncio
import logging
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.errors import (
    FencedError,
    GristmillError,
    LogLostError,
    NotFoundError,
)
from gristmill_contracts.http import RegisterProducer, UsageBatch
from gristmill_contracts.usage import UsageEvent
from gristmill_meter.ports import Ledger, SequenceGapError
from gristmill_meter.pulse import backoff
from gristmill_meter.session import Session

logger = logging.getLogger(__name__)

POST_PAUSE_S: Final = 0.02
"""Between two batches that are not full: under load one request then carries what many would."""


@dataclass(slots=True, kw_only=True)
class Poster:
    session: Session
    ledger: Ledger
    handed_in: bool = False
    """Fenced, and the ledger has what was released before that was known."""
    started: bool = False
    _registered_attempt: int = -1

    @property
    def registered(self) -> bool:
        return self._registered_attempt == self.session.state.attempt

    def heard(self, acked_seq: int | None, told_seq: int) -> None:
        """A heartbeat that told `told_seq` was answered with what the ledger has; None = it knows no log.

        Less than that: it came back from a backup, and a session that is idle would never post again.
        """
        if self.registered and (acked_seq is None or acked_seq < told_seq):
            logger.warning("usage_lost_by_ledger", extra={"session": self.session.state.uid})
            self.register_again()

    def register_again(self) -> None:
        """Ask the ledger how far it is, and send again what it lacks."""
        self._registered_attempt = -1
        self.session.pulse.ring()

    async def run(self) -> None:
        """For ever: nothing is dropped, whatever the ledger answers. A fenced log is handed in, then left."""
        self.started = True
        failures = 0
        while not self.handed_in:
            try:
                await self._deliver()
                failures = 0
            except SequenceGapError as gap:
                await self._move_to(gap.expected_seq)
                await backoff(0, self.session.settings.retry_first_s, 1.0)
            except LogLostError as error:
                self.session.ledger_has_all = True
                self.session.break_off(error)
                return
            except FencedError as error:
                self.session.break_off(error)
            except GristmillError as error:
                if isinstance(error, NotFoundError):
                    self._registered_attempt = (
                        -1
                    )  # A ledger that was restored: it does not know us.
                if failures == 0:
                    logger.warning("usage_not_posted", extra=self._fields(error))
                settings = self.session.settings
                await backoff(failures, settings.retry_first_s, settings.retry_last_s)
                failures += 1

    async def _deliver(self) -> None:
        """Register if need be, then post what is durable and not acknowledged; else wait."""
        session = self.session
        if not self.registered and not session.fenced:
            await self._register()
        batch = self._next_batch()
        if batch is None:
            self.handed_in = session.fenced
            if not session.fenced:
                await session.pulse.wait()
            return
        cursor = await self.ledger.post_batch(batch, session.assignment.attempt)
        self._acknowledged(cursor.acked_seq)
        if cursor.fenced and not session.fenced:
            raise FencedError(
                f"attempt {session.assignment.attempt} of session {session.state.uid} posted usage, but "
                "a newer attempt owns the session"
            )
        if len(batch.events) < limits.BATCH_EVENTS_MAX and not (
            session.stopping or session.draining
        ):
            await asyncio.sleep(POST_PAUSE_S)

    async def _register(self) -> None:
        session, state = self.session, self.session.state
        attempt, head_seq = state.attempt, self._durable_head()
        cursor = await self.ledger.register_producer(
            RegisterProducer(
                producer=state.uid,
                tenant=state.tenant,
                session=state.uid,
                epoch=session.log.epoch,
                attempt=attempt,
                head_seq=head_seq,
                first_seq=self._first_seq(),
            )
        )
        if cursor.acked_seq > state.head_seq:
            raise LogLostError(
                f"the ledger has usage of session {state.uid} up to {cursor.acked_seq} but its log only "
                f"up to {state.head_seq}; restore the newer volume, or create a new session"
            )
        await self._recall_from(cursor.acked_seq + 1)
        self._registered_attempt = attempt
        self._acknowledged(cursor.acked_seq)
        session.admit()

    def _first_seq(self) -> int:
        """What is at hand, or can be read from the log again."""
        events = self.session.state.events
        oldest = events[0][1].producer_seq if events else self.session.state.head_seq + 1
        return min(oldest, self.session.log.first_seq)

    def _durable_head(self) -> int:
        """Highest usage sequence that is durable. Not waited for: a full volume must not hold back the rest."""
        events, durable = self.session.state.events, self.session.log.durable_number
        waiting = takewhile(lambda entry: entry[0] > durable, reversed(events))
        return self.session.state.head_seq - sum(1 for _ in waiting)

    def _next_batch(self) -> UsageBatch | None:
        session = self.session
        events: list[UsageEvent] = []
        for frame, event in session.state.events:
            if frame > session.log.durable_number or len(events) == limits.BATCH_EVENTS_MAX:
                break
            if event.producer_seq > session.acked_seq:
                events.append(event)
        if not events:
            return None
        return UsageBatch(
            producer=session.state.uid,
            epoch=session.log.epoch,
            first_seq=events[0].producer_seq,
            events=events,
        )

    def _acknowledged(self, seq: int) -> None:
        session = self.session
        if seq > session.state.head_seq:
            raise LogLostError(f"the ledger acknowledged {seq} of {session.state.head_seq} events")
        if seq != session.acked_seq:
            session.acked_seq = seq
            session.pulse.ring()
        events = session.state.events
        while events and events[0][1].producer_seq <= seq:
            event = events.popleft()[1]
            session.wallet.posted((event.stream, event.number))

    async def _move_to(self, expected_seq: int) -> None:
        """The ledger knows another number than we thought, as after a restored backup."""
        session = self.session
        logger.warning(
            "usage_cursor_moved",
            extra={"session": session.state.uid, "from": session.acked_seq, "to": expected_seq - 1},
        )
        await self._recall_from(expected_seq)
        session.acked_seq = expected_seq - 1
        self._registered_attempt = -1

    async def _recall_from(self, seq: int) -> None:
        """Have the event `seq` at hand, if the log has it: it may have been acknowledged, and let go."""
        state = self.session.state
        oldest = state.events[0][1].producer_seq if state.events else state.head_seq + 1
        if seq < oldest:
            await self.session.recall_events()

    def _fields(self, error: GristmillError) -> dict[str, str]:
        return {"session": self.session.state.uid, "code": error.code, "error": error.message}
