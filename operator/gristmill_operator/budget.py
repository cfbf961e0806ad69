"""How often a status may be written that only informs: tokens, cost, activity. The ledger is the truth."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gristmill_contracts import limits
from gristmill_operator.bucket import TokenBucket
from gristmill_operator.seams import Key


@dataclass(slots=True, kw_only=True)
class WriteBudget:
    """Once in `every_s` for a session, and so many a second for all together."""

    every_s: float = limits.STATUS_USAGE_EVERY_S
    rate: float = limits.STATUS_WRITES_PER_S
    clock: Callable[[], float] = time.monotonic
    _written: dict[Key, float] = field(default_factory=dict)
    _bucket: TokenBucket | None = None

    def written(self, key: Key) -> None:
        """The status was written, for whatever reason."""
        self._written[key] = self.clock()

    def since_s(self, key: Key) -> float:
        return self.clock() - self._written.get(key, float("-inf"))

    def wait_s(self, key: Key) -> float:
        """0 = it may be written now, and counts; else seconds after which to ask again."""
        left_s = self.every_s - self.since_s(key)
        if left_s > 0:
            return left_s
        return 0.0 if self._all().try_take() else 1.0

    def forget(self, key: Key) -> None:
        self._written.pop(key, None)

    def _all(self) -> TokenBucket:
        if self._bucket is None:
            self._bucket = TokenBucket(
                rate=self.rate, burst=max(1, int(self.rate)), clock=self.clock
            )
        return self._bucket
