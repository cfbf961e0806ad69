"""The keyless operations: several at once, started in order of acceptance."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gristmill_contracts import limits
from gristmill_meter.bank import Bank
from gristmill_meter.decisions import next_samples
from gristmill_meter.execution import Execution
from gristmill_meter.records import Record
from gristmill_meter.session import Session


@dataclass(slots=True, kw_only=True)
class Sampler:
    session: Session
    execution: Execution
    bank: Bank
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Until the session is over; then wait for what runs."""
        session = self.session
        while not session.over:
            slots = limits.DISPATCHED_SAMPLES_MAX - len(self._running) if session.admitted else 0
            durable = session.log.durable_number
            ready = next_samples(
                session.state, session.started, durable, slots, self._covered_in_turn()
            )
            for record in ready:
                session.started.add(record.key)
                task = asyncio.create_task(self.execution.run(record, 0))
                self._running.add(task)
                task.add_done_callback(self._done)
            await session.pulse.wait()
        if self._running:
            await asyncio.wait(self._running)

    def _covered_in_turn(self) -> Callable[[Record], bool]:
        """What one access key cannot afford now holds back its later ones, and nobody else's."""
        waiting: set[str] = set()

        def covered(record: Record) -> bool:
            if record.key_id in waiting:
                return False
            if not self.bank.covers(record):
                waiting.add(record.key_id)
                return False
            return True

        return covered

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.session.pulse.ring()
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.session.unwritable:
            self.session.crashed(error)

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()
