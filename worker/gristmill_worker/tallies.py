"""What ran of each session since it was opened last, to be set beside what others hold of it.

The engine's thread counts; any thread may read, for values are replaced as a whole.
"""

from gristmill_contracts.http import Execute
from gristmill_contracts.operations import Result, count_result, kind_of
from gristmill_contracts.reconciliation import NOTHING, STREAM_KIND, SessionTallies, tally_of


class Book:
    """One for each process: its numbers of openings, and its tallies, only grow."""

    def __init__(self) -> None:
        self._openings = 0
        self._sessions: dict[str, SessionTallies] = {}

    def opened(self, uid: str) -> int:
        """Begin a new opening of a session; returns its number. What runs of earlier ones is not told."""
        self._openings += 1
        self._sessions[uid] = SessionTallies(opening=self._openings, ran={})
        return self._openings

    def closed(self, uid: str) -> None:
        self._sessions.pop(uid, None)

    def ran(
        self,
        uid: str,
        call: Execute,
        result: Result | None,
        device_us: int,
        *,
        stream: bool = False,
    ) -> None:
        """Count a run that completed. Not a replay, and not what was sent under another opening."""
        known = self._sessions.get(uid)
        if result is None or call.replay or known is None or known.opening != call.opening:
            return
        kind = STREAM_KIND if stream else kind_of(call.operation)
        one = tally_of(count_result(call.operation, result), device_us)
        ran = known.ran | {kind: known.ran.get(kind, NOTHING) + one}
        self._sessions[uid] = SessionTallies(opening=known.opening, ran=ran)

    def told(self) -> dict[str, SessionTallies]:
        return dict(list(self._sessions.items()))
