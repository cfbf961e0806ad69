"""The train stream: one operation at a time, strictly in number order, with snapshots between."""

import logging
from dataclasses import dataclass
from typing import Final

from gristmill_contracts.errors import GristmillError
from gristmill_meter import frames
from gristmill_meter.bank import Bank
from gristmill_meter.decisions import next_train, snapshot_due
from gristmill_meter.execution import Execution
from gristmill_meter.link import WorkerLink
from gristmill_meter.session import Session, SessionOverError

logger = logging.getLogger(__name__)

SNAPSHOT_RETRY_S: Final = 10.0


@dataclass(slots=True, kw_only=True)
class Trainer:
    session: Session
    link: WorkerLink
    execution: Execution
    bank: Bank
    _no_snapshot_before_us: int = 0

    async def run(self) -> None:
        """Until the session is over. What runs then is finished first."""
        session = self.session
        while not session.over:
            if not session.admitted:
                await session.pulse.wait()
                continue
            try:
                await self.link.ensure()
            except SessionOverError:
                continue
            await self._snapshot_if_due()
            decision = next_train(session.state, session.log.durable_number)
            if session.over:
                continue
            if decision is None:
                await self._idle()
            elif decision.verb == "skip":
                session.skip([decision.record.key], decision.reason)
            elif not self.bank.covers(decision.record):
                await self._idle()
            else:
                await self.execution.run(decision.record, session.state.executed_count + 1)

    async def _idle(self) -> None:
        """Until something changes. A lost worker is opened again at once, not at the next operation."""
        await self.session.pulse.wait()

    async def _snapshot_if_due(self) -> None:
        session = self.session
        settings = session.settings
        due = snapshot_due(
            session.state, settings.snapshot_replay_s, settings.snapshot_payload_bytes
        )
        if due and session.now_us() >= self._no_snapshot_before_us:
            await self.snapshot()

    async def snapshot(self) -> bool:
        """Have the worker keep its state. Never ahead of the log: RESULTs are made durable first."""
        session = self.session
        try:
            await session.log.durable(session.log.appended_number)
            taken = await self.link.worker.snapshot(session.state.uid)
        except GristmillError as error:
            logger.warning(
                "snapshot_failed", extra={"session": session.state.uid, "error": error.message}
            )
            self._no_snapshot_before_us = session.now_us() + int(SNAPSHOT_RETRY_S * 1e6)
            return False
        session.write(frames.Snapshot(applied=taken.applied, at_us=session.now_us()))
        return True
