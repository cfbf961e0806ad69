"""The keyless operations: several at once, started in order of acceptance."""

import asyncio
from dataclasses import dataclass, field

from gristmill_contracts import limits
from gristmill_meter.decisions import next_samples
from gristmill_meter.execution import Execution
from gristmill_meter.session import Session


@dataclass(slots=True, kw_only=True)
class Sampler:
    session: Session
    execution: Execution
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Until the session is over; then wait for what runs."""
        session = self.session
        while not session.over:
            slots = limits.DISPATCHED_SAMPLES_MAX - len(self._running) if session.admitted else 0
            ready = next_samples(session.state, session.started, session.log.durable_number, slots)
            for record in ready:
                session.started.add(record.key)
                task = asyncio.create_task(self.execution.run(record, 0))
                self._running.add(task)
                task.add_done_callback(self._done)
            await session.pulse.wait()
        if self._running:
            await asyncio.wait(self._running)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.session.pulse.ring()
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.session.unwritable:
            self.session.crashed(error)

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()
