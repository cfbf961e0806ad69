"""Wake everybody who waits for "something changed". Check, then wait: no await between, no lost wake."""

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class Pulse:
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def ring(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True if it rang, False if the time ran out."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        done, _ = await asyncio.wait([waiter], timeout=timeout_s)
        if not done:
            self._waiters = [other for other in self._waiters if other is not waiter]
        return bool(done)


async def backoff(attempt: int, first_s: float, last_s: float) -> None:
    """Sleep longer with every attempt (counted from 0), up to `last_s`."""
    await asyncio.sleep(min(last_s, first_s * 2 ** min(attempt, 30)))
