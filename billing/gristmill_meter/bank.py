"""The meter's half of budgets: takes leases from the ledger for what waits, and gives them back."""

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.budgets import Denied, Lease, LeaseAnswer, ReturnLease, TakeLease
from gristmill_contracts.errors import (
    BudgetExhaustedError,
    FencedError,
    GristmillError,
    NotFoundError,
)
from gristmill_contracts.http import Problem
from gristmill_contracts.operations import Sample
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_meter.ports import Ledger, LedgerAwayError
from gristmill_meter.pulse import Pulse
from gristmill_meter.records import Key, Record
from gristmill_meter.session import Session, SessionOverError
from gristmill_meter.wallet import Amounts, Wallet
from gristmill_meter.worst import stream_prompt

logger = logging.getLogger(__name__)

LEASE_OPERATIONS: Final = 400
"""A lease is asked to last for so many operations like the one that waits."""
LEASE_IDLE_S: Final = 30.0
"""A lease that nobody spent from for this long is given back."""


@dataclass(slots=True, kw_only=True)
class Want:
    """What waits for a lease. `operation` None: nothing waits, it is asked ahead."""

    key: str
    operation: Key | None
    need: Counts
    least: Counts | None = None
    asked: TakeLease | None = None
    """Sent, and perhaps answered: it is sent again as it was, so that no lease is lost."""


@dataclass(slots=True, kw_only=True)
class Bank:
    """Of one session. `covers` is asked before each dispatch; `run` does the talking."""

    session: Session
    ledger: Ledger
    wallet: Wallet
    pulse: Pulse = field(default_factory=Pulse)
    _wants: dict[str | Key, Want] = field(default_factory=dict)
    """By access key: the first that waits; each stream by itself."""
    _answers: dict[Key, LeaseAnswer] = field(default_factory=dict)
    """What the ledger said to streams."""
    _denied: dict[str, Denied] = field(default_factory=dict)
    _paused: set[str | Key] = field(default_factory=set)
    """Access keys that were denied since the last heartbeat: not asked again before the next."""
    _older: dict[str, Amounts] = field(default_factory=dict)
    """Leases of an earlier process or attempt, with what is still held."""
    _older_known: bool = False
    _last_seq: int = 0
    _away: bool = False

    # --- asked before a dispatch -----------------------------------------------------------------

    def covers(self, record: Record) -> bool:
        """Whether the operation may be dispatched: its worst case is off a lease. Else ask again later."""
        now_us, key = self.session.boottime_us(), record.key_id
        if self.wallet.reserve(record.key, key, record.worst, now_us):
            if self._denied.pop(key, None) is not None:
                self._tell_blocked()
            if self.wallet.needs_more(key, now_us):
                self._want(key, Want(key=key, operation=None, need=record.worst))
            return True
        if self._away and self.wallet.soft.get(key, False):
            logger.warning("budget_not_reserved", extra={"session": self.session.state.uid})
            self.wallet.go_unreserved(record.key)
            return True
        self._want(key, Want(key=key, operation=record.key, need=record.worst))
        return False

    async def cover_stream(self, record: Record, operation: Sample) -> int:
        """Reserve a stream, or what is left for it. Returns how many tokens it may sample.

        Raises BudgetExhaustedError where not one can be afforded, SessionOverError.
        """
        session, key, most = self.session, record.key_id, record.worst.sample
        prompt = stream_prompt(operation, record.worst)
        whole, least = prompt + Counts(sample=most), prompt + Counts(sample=1)
        while True:
            now_us = session.boottime_us()
            if self.wallet.reserve(record.key, key, whole, now_us):
                return most
            answer = self._answers.pop(record.key, None)
            if answer is not None:
                part = self.wallet.reserve_part(record.key, key, prompt, most, now_us)
                if part is not None:
                    return part
            if isinstance(answer, Denied):
                raise BudgetExhaustedError(answer.message)
            if session.over or session.unwritable:
                raise SessionOverError(f"session {session.state.uid} runs nothing any more")
            want = Want(key=key, operation=record.key, need=whole, least=least)
            self._want(record.key, want)
            await session.pulse.wait()

    def _want(self, place: str | Key, want: Want) -> None:
        known = self._wants.get(place)
        if known is None:
            self._wants[place] = want
            self.pulse.ring()
        elif known.operation is None:
            known.operation = want.operation  # Now something waits for what was asked ahead.

    # --- what a heartbeat brings -----------------------------------------------------------------

    def heard(self, leases: dict[str, float], asked: list[str], version: int, sent_us: int) -> None:
        """A heartbeat, sent at `sent_us`, was answered: which leases live on, and whether budgets changed."""
        for lease, seconds in leases.items():
            self.wallet.renew(lease, sent_us + int(seconds * 1e6))
        for lease in asked:
            if lease not in leases:
                self.wallet.close(lease)
        self.wallet.supersede(version, sent_us + int(limits.BUDGET_ASK_S * 1e6))
        self._paused.clear()
        self.pulse.ring()

    # --- talking ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        settings, failures = self.session.settings, 0
        while True:
            try:
                await self._look()
                failures = 0
                self._set_away(away=False)
            except FencedError as error:
                self.session.break_off(error)
                return
            except GristmillError as error:
                if failures == 0 and not isinstance(error, LedgerAwayError):
                    what = {"session": self.session.state.uid, "error": error.message}
                    logger.warning("lease_not_taken", extra=what)
                self._set_away(away=True)
                failures += 1
            pause_s = min(settings.retry_last_s, settings.retry_first_s * 2 ** min(failures, 20))
            await self.pulse.wait(pause_s if failures else settings.heartbeat_s)

    def _set_away(self, *, away: bool) -> None:
        if away != self._away:
            self._away = away
            self.session.pulse.ring()  # Only told budgets do not wait for the ledger.

    async def _look(self) -> None:
        session = self.session
        if not session.admitted:
            return
        now_us = session.boottime_us()
        for place, want in list(self._wants.items()):
            if want.operation is not None and want.operation not in session.state.open_keys:
                self._forget(place)
            elif place not in self._paused:
                await self._take(place, want)
        self.wallet.close_idle(now_us - int(LEASE_IDLE_S * 1e6), now_us)
        await self.give_back()
        await self._give_back_older()

    def _forget(self, place: str | Key) -> None:
        want = self._wants.pop(place)
        self._denied.pop(want.key, None)
        self._tell_blocked()

    async def _take(self, place: str | Key, want: Want) -> None:
        session = self.session
        answer = await self._ask(want)
        if (
            want.operation is not None
            and not is_whole(answer)
            and self.wallet.close_rests(want.key)
        ):
            # Together with what our own leases have left it may suffice.
            await self.give_back()
            answer = await self._ask(want)
        self._wants.pop(place, None)
        if isinstance(answer, Lease):
            self._denied.pop(want.key, None)
        elif isinstance(place, str):
            self._paused.add(place)
            if want.operation is not None:
                self._deny(place, want.operation, answer)
        if isinstance(place, tuple):
            self._answers[place] = answer
        self._tell_blocked()
        session.pulse.ring()

    async def _ask(self, want: Want) -> LeaseAnswer:
        session, attempt = self.session, self.session.assignment.attempt
        if want.asked is None or want.asked.attempt != attempt:
            self._last_seq = max(self._last_seq + 1, session.now_us())
            want.asked = TakeLease(
                session=session.state.uid,
                attempt=attempt,
                seq=self._last_seq,
                key=want.key,
                model=session.state.model,
                need=want.need,
                least=want.least,
                want=times(want.need, LEASE_OPERATIONS),
            )
        sent_us = session.boottime_us()
        answer = await self.ledger.take_lease(want.asked)
        want.asked = None
        if isinstance(answer, Lease):
            self.wallet.add(answer, want.key, sent_us, session.boottime_us())
        return answer

    def _deny(self, key: str, operation: Key, denied: Denied) -> None:
        session = self.session
        record = session.state.records.get(operation)
        if record is not None and not record.may_wait and operation in session.state.open_keys:
            session.refuse(record, BudgetExhaustedError(denied.message))
            self._paused.discard(key)
            return
        if key not in self._denied:
            logger.warning(
                "budget_exhausted",
                extra={"session": self.session.state.uid, "budget": denied.budget,
                       "reason": denied.reason, "wanted": denied.wanted},
            )  # fmt: skip
        self._denied[key] = denied

    def _tell_blocked(self) -> None:
        denied = next(iter(self._denied.values()), None)
        code = BudgetExhaustedError.code
        self.session.blocked = (
            None if denied is None else Problem(code=code, message=denied.message, retryable=True)
        )
        self.session.announce()

    # --- giving back -----------------------------------------------------------------------------

    async def give_back(self) -> None:
        """Return what is closed, and what was posted of it meanwhile. Raises LedgerAwayError."""
        while returns := self.wallet.to_return():
            for lease, keep in returns:
                await self._return(lease, keep)
                self.wallet.returned(lease, keep)

    async def give_back_all(self) -> None:
        """The session or the process ends: nothing more is dispatched. Raises LedgerAwayError."""
        session = self.session
        for operation in session.state.open_keys:
            if not session.state.records[operation].streaming:
                self.wallet.void(operation)  # It has not ended: the next process reserves it anew.
        self.wallet.close_all()
        await self.give_back()
        await self._give_back_older()

    async def _return(self, lease: str, keep: Amounts) -> None:
        a = self.session.assignment
        message = ReturnLease(session=a.uid, attempt=a.attempt, keep=keep)
        with suppress(NotFoundError):  # A ledger that was restored holds nothing for it.
            await self.ledger.return_lease(lease, message)

    async def _give_back_older(self) -> None:
        """Leases of an earlier process: what the log does not name will never be posted under them."""
        session = self.session
        if not self._older_known:
            a = session.assignment
            known = await self.ledger.open_leases(a.uid, a.attempt)
            own = self.wallet.purses
            self._older = {each.id: each.rest for each in known if each.id not in own}
            self._older_known = True
        if not self._older:
            return
        named = {event.lease for _, event in session.state.events}
        named |= {session.state.records["log", n].lease for n in session.state.unclaimed}
        named |= {session.state.records[key].lease for key in session.state.open_keys}
        for lease in [lease for lease in self._older if lease not in named]:
            await self._return(lease, {})
            del self._older[lease]


def is_whole(answer: LeaseAnswer) -> bool:
    """Granted, and with all that was needed."""
    return isinstance(answer, Lease) and all(hold.amount >= hold.floor for hold in answer.holds)


def times(counts: Counts, factor: int) -> Counts:
    return Counts(**{name: getattr(counts, name) * factor for name in TOKEN_TYPES})
