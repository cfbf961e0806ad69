"""A clock that stands still until a test moves it, with timers and sleeps that follow it."""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Alarm:
    """A timer of a HandClock."""

    at: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(slots=True)
class HandClock:
    """`now` in seconds. `pass_s` moves it, and rings what came due on the way, in its order."""

    now: float = 1000.0
    _alarms: list[tuple[float, int, Alarm]] = field(default_factory=list)
    _count: int = 0

    def __call__(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Alarm:
        alarm = Alarm(self.now + delay_s, callback)
        self._count += 1
        heapq.heappush(self._alarms, (alarm.at, self._count, alarm))
        return alarm

    async def sleep(self, delay_s: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self.call_later(delay_s, lambda: woken.done() or woken.set_result(None))
        await woken

    def pass_s(self, seconds: float) -> None:
        until = self.now + seconds
        while self._alarms and self._alarms[0][0] <= until:
            at, _, alarm = heapq.heappop(self._alarms)
            self.now = max(self.now, at)
            if not alarm.cancelled:
                alarm.callback()
        self.now = until

    async def pass_slowly(self, seconds: float, step_s: float = 0.5) -> None:
        """Move on in steps, and let every task run between them."""
        until = self.now + seconds
        while self.now < until:
            await settle()
            self.pass_s(min(step_s, until - self.now))
        await settle()


async def settle(turns: int = 20) -> None:
    """Let every task run that can."""
    for _ in range(turns):
        await asyncio.sleep(0)
