"""Takes what was accepted while no meter served into the log: in order, before any call is taken.

Claim, write, make durable, acknowledge. Whoever dies between finds the same entries again, and the log
says which of them it has; the ledger sees to it that only the newest attempt asks.
"""

import logging
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.errors import (
    ConflictError,
    FencedError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
)
from gristmill_contracts.http import Refuse, Submit
from gristmill_contracts.inbox import AckInbox, ClaimInbox, InboxEntry, InboxPage, InboxSkip
from gristmill_meter.decisions import Accept, on_taken, on_taken_refusal
from gristmill_meter.intake import room_of, write_intent, write_refusal
from gristmill_meter.ports import Ledger
from gristmill_meter.poster import Poster
from gristmill_meter.pulse import backoff
from gristmill_meter.session import Session

logger = logging.getLogger(__name__)

_submits: Final = msgspec.msgpack.Decoder(Submit)
_refusals: Final = msgspec.msgpack.Decoder(Refuse)
_encoder: Final = msgspec.msgpack.Encoder()


@dataclass(slots=True, kw_only=True)
class Inbox:
    """The inbox of one session, as its meter sees it. `run` it as a task."""

    session: Session
    ledger: Ledger
    poster: Poster
    _told: bool = field(default=True)
    """Something may wait."""

    def look(self) -> None:
        """The ledger says that something waits, although we serve."""
        self._told = True
        self.session.pulse.ring()

    async def run(self) -> None:
        """Take what waits, now and whenever the ledger says so, until the session is over."""
        session = self.session
        failures = 0
        while not session.over:
            if not self._told or not self.poster.registered:
                await session.pulse.wait()
                continue
            self._told = False
            try:
                await self._empty()
                failures = 0
            except FencedError as error:
                session.break_off(error)
            except NotFoundError as error:  # A ledger of the release before has no inboxes.
                logger.warning("inbox_missing", extra=self._fields(error))
                session.serve()
            except GristmillError as error:
                self._told = True
                if failures == 0:
                    logger.warning("inbox_not_taken", extra=self._fields(error))
                settings = session.settings
                await backoff(failures, settings.retry_first_s, settings.retry_last_s)
                failures += 1

    async def _empty(self) -> None:
        session = self.session
        while not session.over:
            request = ClaimInbox(attempt=session.state.attempt)
            page = await self.ledger.claim_inbox(session.state.uid, request)
            if page.served:
                session.serve()
                return
            await self._take(page)

    async def _take(self, page: InboxPage) -> None:
        """Raises LogFullError once it has acknowledged what did find room."""
        session = self.session
        ack = AckInbox(attempt=session.state.attempt, taken=[])
        full: GristmillError | None = None
        for entry in page.entries:
            if session.over:
                break
            try:
                self._write(entry)
                ack.taken.append(entry.position)
            except (ConflictError, InvalidRequestError) as error:
                self._close_number(entry, error)
                ack.skipped.append(InboxSkip(position=entry.position, reason=error.message))
            except GristmillError as error:
                full = error
                break
        await session.log.durable(session.log.appended_number)
        if ack.taken or ack.skipped:
            await self.ledger.ack_inbox(session.state.uid, ack)
            logger.info(
                "inbox_taken",
                extra={
                    "session": session.state.uid,
                    "taken": len(ack.taken),
                    "skipped": len(ack.skipped),
                },
            )
        if full is not None:
            raise full

    def _write(self, entry: InboxEntry) -> None:
        """Into the log, unless it is there. Raises what the log refuses it for."""
        session = self.session
        if entry.kind == "refuse":
            refuse = _refusals.decode(entry.body)
            if isinstance(on_taken_refusal(session.state, refuse), Accept):
                write_refusal(session, refuse)
            return
        submit = _submits.decode(entry.body)
        room = room_of(session, len(entry.body))
        decision = on_taken(session.state, submit, entry.number, session.started, room)
        if isinstance(decision, Accept):
            encoded = _encoder.encode(submit.operation)
            write_intent(session, submit, encoded, decision, streaming=False)

    def _close_number(self, entry: InboxEntry, error: GristmillError) -> None:
        """What comes behind a number that cannot be taken must not wait for it."""
        state = self.session.state
        gone = state.closed or state.failure is not None or self.session.unwritable
        if gone or entry.stream != "train" or ("train", entry.number) in state.records:
            return
        refuse = Refuse(
            number=entry.number,
            client_token=None,
            message=error.message[: limits.DESCRIPTION_CHARS_MAX],
            breaks_accumulation=True,
        )
        write_refusal(self.session, refuse)

    def _fields(self, error: GristmillError) -> dict[str, str]:
        uid = self.session.state.uid
        return {"session": uid, "code": error.code, "error": error.message}
