"""Wake everybody who waits for "something changed". Check, then wait: no await between, no lost wake."""

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class Pulse:
    _waiters: list[asyncio.Future[bool]] = field(default_factory=list)

    def ring(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _settle(waiter, rang=True)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True if it rang, False if the time ran out."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters.append(waiter)
        if timeout_s is None:
            return await waiter
        timer = loop.call_later(timeout_s, lambda: _settle(waiter, rang=False))
        try:
            rang = await waiter
        finally:
            timer.cancel()
        if not rang:
            self._waiters = [other for other in self._waiters if other is not waiter]
        return rang


def _settle(waiter: asyncio.Future[bool], *, rang: bool) -> None:
    if not waiter.done():
        waiter.set_result(rang)


async def backoff(attempt: int, first_s: float, last_s: float) -> None:
    """Sleep longer with every attempt (counted from 0), up to `last_s`."""
    await asyncio.sleep(min(last_s, first_s * 2 ** min(attempt, 30)))
