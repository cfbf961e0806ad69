"""A token bucket: how many requests may go out, in a burst and in the long run."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

ROUNDING: Final = 1e-6
"""Of a token, in sums of seconds."""


@dataclass(slots=True, kw_only=True)
class TokenBucket:
    """`take` before each request. Those who wait are served in their order."""

    rate: float
    """Tokens a second."""
    burst: int
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], "asyncio.Future[None]"] = asyncio.sleep  # type: ignore[assignment]
    _free_at: float = field(default=float("-inf"))
    """When the next token would be due if none had been saved up."""

    async def take(self) -> float:
        """Wait for a token. Returns the seconds waited."""
        wait_s = self._reserve()
        if wait_s > 0:
            await self.sleep(wait_s)
        return wait_s

    def try_take(self) -> bool:
        """A token now, or none."""
        saved = (self.clock() - max(self._free_at, self._floor())) * self.rate
        if saved < 1 - ROUNDING:
            return False
        self._reserve()
        return True

    def _reserve(self) -> float:
        self._free_at = max(self._free_at, self._floor()) + 1 / self.rate
        return max(0.0, self._free_at - self.clock())

    def _floor(self) -> float:
        """No more than a full bucket is saved up."""
        return self.clock() - self.burst / self.rate
