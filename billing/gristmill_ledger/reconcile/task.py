"""Compares everything once an hour, and a part of it whenever somebody asks.

One task of each ledger process. Replicas look at the same hour, and one of them records it. What is read is
read in pages, each of one moment, so that writers and readers go on beside it.
"""

import asyncio
import hashlib
import logging
import uuid
from dataclasses import dataclass, field
from functools import partial

import msgspec
from sqlalchemy import Connection

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.units import now_us
from gristmill_ledger.chain.heads import hour_slot
from gristmill_ledger.database import Database
from gristmill_ledger.reconcile.compare import Difference, Session, Verdict, judge
from gristmill_ledger.reconcile.sources import (
    PAGE,
    Scope,
    beats_after,
    own_differences,
    session_of,
)
from gristmill_ledger.reconcile.store import Recorded, Run, record, slot_is_taken

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a run has seen so far."""

    sessions: int = 0
    in_flight: int = 0
    silent: int = 0
    found: list[Difference] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.sessions += 0 if verdict.in_flight else 1
        self.in_flight += 1 if verdict.in_flight else 0
        self.found += verdict.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run, and all that differs now."""

    run: Run
    found: list[Difference]
    recorded: Recorded | None
    """None: another replica was first."""


@dataclass(slots=True, kw_only=True)
class Reconciler:
    """`run` it as a task; cancel it to end it."""

    database: Database
    even: dict[str, bytes] = field(default_factory=dict)
    """Sessions without a difference -> hash of what was compared: facts do not change, so the hourly run
    need not add up the same ones again."""

    async def run(self) -> None:
        """Never ends by itself: what fails is tried again."""
        while True:
            await asyncio.sleep(limits.RECON_LOOK_S)
            try:
                await self.hourly(now_us())
            except GristmillError as error:
                log.warning("reconciliation_waits", extra={"reason": error.message})
            except Exception:
                log.exception("reconciliation_failed")

    async def hourly(self, at_us: int) -> Report | None:
        """Compare everything, unless that was done in the hour of `at_us`."""
        slot = hour_slot(at_us)
        if await self.database.read(partial(slot_is_taken, slot=slot)):
            return None
        return await self.reconcile(Scope(), slot=slot, asked_by="", skip_even=True)

    async def reconcile(
        self, scope: Scope, *, asked_by: str, slot: str = "", skip_even: bool = False
    ) -> Report:
        """Compare what is in the scope, and record what differs."""
        identity, started_us = str(uuid.uuid4()), now_us()
        seen = Seen()
        after: str | None = ""
        while after is not None:
            after = await self._page(scope, after, seen, skip_even=skip_even)
        seen.found += await self.database.read(partial(own_differences, scope=scope))
        ended_us = now_us()
        run = Run(
            id=identity,
            slot=slot or f"asked {identity}",
            scope=scope.text,
            asked_by=asked_by,
            started_us=started_us,
            ended_us=ended_us,
            sessions=seen.sessions,
            in_flight=seen.in_flight,
            silent=seen.silent,
            differences=len(seen.found),
        )
        recorded = await self.database.write(lambda c: record(c, run, seen.found, ended_us))
        self._tell(run, recorded)
        return Report(run=run, found=seen.found, recorded=recorded)

    async def _page(self, scope: Scope, after: str, seen: Seen, *, skip_even: bool) -> str | None:
        """Compare a page of sessions; returns where the next one begins."""

        def work(
            connection: Connection,
        ) -> tuple[str | None, list[tuple[Heartbeat, Session | None]]]:
            beats = beats_after(connection, after, scope.session)
            wanted = [
                beat
                for beat in beats
                if scope.covers(beat.tenant, beat.view.uid)
                and not (skip_even and self._is_even(beat))
            ]
            last = beats[-1].view.uid if len(beats) == PAGE else None
            return last, [(beat, session_of(connection, beat)) for beat in wanted]

        last, sessions = await self.database.read(work)
        for beat, session in sessions:
            if session is None:
                seen.silent += 1
                continue
            verdict = judge(session, now_us())
            seen.add(verdict)
            if not (verdict.in_flight or verdict.differences):
                self.even[session.uid] = _digest(beat)
        return last

    def _is_even(self, beat: Heartbeat) -> bool:
        return beat.recon is not None and self.even.get(beat.view.uid) == _digest(beat)

    def _tell(self, run: Run, recorded: Recorded | None) -> None:
        if recorded is None:
            return
        for each in recorded.new:
            log.error(
                "reconciliation_difference",
                extra={"difference": each.id, "pair": each.pair, "kind": each.kind,
                       "tenant": each.tenant, "session": each.session, "subject": each.subject,
                       "detail": each.detail},
            )  # fmt: skip
        log.info(
            "reconciled",
            extra={"scope": run.scope, "sessions": run.sessions, "in_flight": run.in_flight,
                   "differences": run.differences, "new": len(recorded.new)},
        )  # fmt: skip


def _digest(beat: Heartbeat) -> bytes:
    """Of all that is compared, but for the time."""
    return hashlib.sha256(msgspec.msgpack.encode(beat.recon)).digest()
