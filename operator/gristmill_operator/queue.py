"""The work queue: each key once, one worker a key, backoff for each key, and keys for later.

After client-go's workqueue: a key that is added while it is worked on is worked on once more.
"""

import asyncio
import contextlib
import heapq
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from gristmill_operator.seams import Key

BACKOFF_FIRST_S: Final = 0.2
BACKOFF_MAX_S: Final = 300.0
TRANSIENT_MAX_S: Final = 30.0
"""Longest pause after what the API server did, not we."""
JITTER: Final = 0.2
FIRST_IN_A_ROW: Final = 3


class Timer(Protocol):
    def cancel(self) -> None: ...


def _call_later(delay_s: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, callback)


@dataclass(slots=True, kw_only=True)
class KeyQueue:
    """On one event loop; `add` may be called from any code on it."""

    clock: Callable[[], float] = time.monotonic
    call_later: Callable[[float, Callable[[], None]], Timer] = _call_later
    jitter: Callable[[], float] = lambda: random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311
    _ready: deque[Key] = field(default_factory=deque)
    _first: deque[Key] = field(default_factory=deque)
    """Keys that go before those of `_ready`. One that is in both is worked on once."""
    _row: int = 0
    """How many of them were given out in a row."""
    _dirty: dict[Key, float] = field(default_factory=dict)
    """Keys to be worked on, with the time since when."""
    _processing: set[Key] = field(default_factory=set)
    _waiters: deque["asyncio.Future[None]"] = field(default_factory=deque)
    _later: list[tuple[float, Key]] = field(default_factory=list)
    _due: dict[Key, float] = field(default_factory=dict)
    """The earliest time that each later key is due: what the heap says otherwise is outdated."""
    _failures: dict[Key, int] = field(default_factory=dict)
    _timer: Timer | None = None
    _timer_at: float = float("inf")

    # --- adding ----------------------------------------------------------------------------------

    def add(self, key: Key, *, first: bool = False) -> None:
        """first: what is nearly done goes before what is to be begun."""
        self._due.pop(key, None)
        if key in self._dirty:
            if first and key not in self._processing:
                self._first.append(key)
            return
        self._dirty[key] = self.clock()
        if key not in self._processing:
            self._push(key, first=first)

    def add_after(self, key: Key, delay_s: float) -> None:
        """Add it then; an earlier time that was asked for stays."""
        if delay_s <= 0:
            self.add(key)
            return
        at = self.clock() + delay_s
        if key in self._dirty or self._due.get(key, float("inf")) <= at:
            return
        self._due[key] = at
        heapq.heappush(self._later, (at, key))
        self._arm()

    def add_limited(self, key: Key, *, longest_s: float = BACKOFF_MAX_S) -> float:
        """Add it after this key's backoff. Returns the pause in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        pause_s: float = min(longest_s, BACKOFF_FIRST_S * 2 ** min(failures, 32)) * self.jitter()
        self.add_after(key, pause_s)
        return pause_s

    def forget(self, key: Key) -> None:
        """It went well: the next failure is the first."""
        self._failures.pop(key, None)

    # --- working ---------------------------------------------------------------------------------

    async def get(self) -> tuple[Key, float]:
        """The next key, and the seconds that it waited. `done` it afterwards."""
        while not self._is_ready():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                # The wake-up that this one got, or would get, belongs to another.
                if waiter.done() and not waiter.cancelled():
                    self._wake()
                else:
                    with contextlib.suppress(ValueError):
                        self._waiters.remove(waiter)
                raise
        key = self._front().popleft()
        self._processing.add(key)
        return key, self.clock() - self._dirty.pop(key)

    def done(self, key: Key) -> None:
        self._processing.discard(key)
        if key in self._dirty:
            self._push(key)

    # --- looking ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Keys that could be worked on now."""
        return len(self._dirty.keys() - self._processing)

    @property
    def in_flight(self) -> int:
        return len(self._processing)

    def oldest_s(self) -> float:
        """How long the key has waited that waits longest; 0 = none does."""
        since = min(
            (self._dirty[key] for key in self._dirty.keys() - self._processing), default=None
        )
        return 0.0 if since is None else self.clock() - since

    # --- within ----------------------------------------------------------------------------------

    def _is_ready(self) -> bool:
        """Whether there is a key at the front. What was worked on already is left out."""
        for keys in (self._first, self._ready):
            while keys and (keys[0] not in self._dirty or keys[0] in self._processing):
                keys.popleft()
        return bool(self._first or self._ready)

    def _front(self) -> deque[Key]:
        """Of those that go first three in a row, then one of the others: they are never forgotten."""
        if self._first and (self._row < FIRST_IN_A_ROW or not self._ready):
            self._row += 1
            return self._first
        self._row = 0
        return self._ready

    def _push(self, key: Key, *, first: bool = False) -> None:
        (self._first if first else self._ready).append(key)
        self._wake()

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _arm(self) -> None:
        """One timer, for the earliest key."""
        if not self._later or self._later[0][0] >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._later[0][0]
        self._timer = self.call_later(max(0.0, self._timer_at - self.clock()), self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        now = self.clock()
        while self._later and self._later[0][0] <= now:
            at, key = heapq.heappop(self._later)
            if self._due.get(key) == at:
                self.add(key)
        self._arm()
