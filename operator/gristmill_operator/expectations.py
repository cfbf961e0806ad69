"""What a session's own writes should bring into the cache: until it is there, the session is not planned.

Without this a create whose answer was lost, or a watch that lags, would let it be done twice.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gristmill_operator.cache import ObjectCache
from gristmill_operator.kinds import Kind

EXPECTED_S: Final = 30.0
"""After this the cache is believed again, whatever it says."""

Owner = tuple[str, str]
"""Namespace and name of a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    kind: Kind
    namespace: str
    name: str
    gone_uid: str = ""
    """The object with this uid ends, or begins to; "" = an object of this name appears."""

    def is_seen(self, cache: ObjectCache) -> bool:
        if not self.gone_uid:
            return cache.get(self.kind, self.namespace, self.name) is not None
        known = cache.by_uid(self.kind, self.gone_uid)
        return known is None or bool(known["metadata"].get("deletionTimestamp"))


@dataclass(slots=True, kw_only=True)
class Expectations:
    cache: ObjectCache
    clock: Callable[[], float] = time.monotonic
    _open: dict[Owner, dict[Expected, float]] = field(default_factory=dict)
    """Until when each is waited for."""

    def expect(self, owner: Owner, expected: Expected) -> None:
        self._open.setdefault(owner, {})[expected] = self.clock() + EXPECTED_S

    def drop(self, owner: Owner, expected: Expected) -> None:
        """It is known that it will not come."""
        left = self._open.get(owner)
        if left is not None:
            left.pop(expected, None)
            if not left:
                del self._open[owner]

    def unseen(self, owner: Owner) -> Sequence[Expected]:
        """What is still waited for. Forgets what was seen, and what took too long."""
        left = self._open.get(owner)
        if left is None:
            return ()
        now = self.clock()
        kept = {
            expected: until_s
            for expected, until_s in left.items()
            if until_s > now and not expected.is_seen(self.cache)
        }
        if kept:
            self._open[owner] = kept
        else:
            del self._open[owner]
        return [*kept]

    def forget(self, owner: Owner) -> None:
        self._open.pop(owner, None)
