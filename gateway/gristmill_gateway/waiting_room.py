"""Where submits wait while their session's pod is being started, recovered or moved.

Both limits are of one process. Whoever finds no place, or waited long enough, is told to try again: the
official SDK does so, with the same number, for about five minutes.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from gristmill_contracts import limits
from gristmill_contracts.errors import UnavailableError
from gristmill_contracts.ids import SessionUid

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S: Final = 0.1
"""How often a waiting submit looks whether its session is served again: a look at what is in memory."""


class WaitingRoom:
    """hold_s: how long one may wait. draining: set when nobody may wait any longer."""

    def __init__(self, hold_s: float, draining: asyncio.Event) -> None:
        self._hold_s = hold_s
        self._draining = draining
        self._waiting: Counter[SessionUid] = Counter()
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    async def served(
        self,
        session: SessionUid,
        call: Callable[[], Awaitable[T]],
        may_try: Callable[[], Awaitable[bool]],
    ) -> T:
        """What `call` gives; made again while nobody serves the session.

        may_try: whether it looks as if somebody did; it raises what ends the wait. Raises UnavailableError
        of the last try.
        """
        deadline = time.monotonic() + self._hold_s
        try:
            return await call()
        except UnavailableError as error:
            if not is_passing(error):
                raise
            last = error
        with self._place(session, last):
            while time.monotonic() < deadline and not self._draining.is_set():
                await self._pause()
                if not await may_try():
                    continue
                try:
                    return await call()
                except UnavailableError as error:
                    if not is_passing(error):
                        raise
                    last = error
        raise last

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._draining.wait(), LOOK_S)
        except TimeoutError:
            return

    @contextmanager
    def _place(self, session: SessionUid, error: UnavailableError) -> Iterator[None]:
        full = self._total >= limits.HELD_SUBMITS_MAX
        if full or self._waiting[session] >= limits.HELD_SUBMITS_PER_SESSION_MAX:
            raise error
        self._waiting[session] += 1
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            self._waiting[session] -= 1
            if not self._waiting[session]:
                del self._waiting[session]


def is_passing(error: UnavailableError) -> bool:
    """Nobody serves the session just now; a full log, or a failed volume, is something else."""
    return error.code == UnavailableError.code
