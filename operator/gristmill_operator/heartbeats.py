"""The newest heartbeat of each session, read from the ledger's stream as long as this process lives."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.http import Heartbeat, HeartbeatPage
from gristmill_contracts.ids import SessionUid
from gristmill_operator.ledger import BEAT_WAIT_S

logger = logging.getLogger(__name__)

KEPT_MAX: Final = 50_000
"""The ledger also tells of sessions that are long gone: the oldest are forgotten."""
PAUSE_S: Final = 0.1
PAUSE_PER_BEAT_S: Final = 0.01
PAUSE_S_MAX: Final = 1.0
"""Between two polls: where many sessions beat, each poll takes all that came meanwhile."""
RETRY_FIRST_S: Final = 0.2
RETRY_MAX_S: Final = 5.0


class BeatSource(Protocol):
    async def heartbeats(self, after: int, wait_s: float) -> HeartbeatPage: ...


Told = Callable[[SessionUid, Heartbeat | None, Heartbeat], None]
"""Told of each new heartbeat: session, the one before, the new one."""


@dataclass(slots=True, kw_only=True)
class HeartbeatStream:
    """The implementation of `seams.Heartbeats`; `run` keeps it fresh."""

    source: BeatSource
    told: Told
    ready: Callable[[], None] = lambda: None
    """Told once, when it has caught up."""
    hurried: Callable[[], bool] = lambda: False
    """Somebody may wait for the next heartbeat: pause no longer than PAUSE_S."""
    clock: Callable[[], float] = time.monotonic
    ledger_answers: bool = False
    caught_up: bool = False
    """Everything that the ledger had when this process started was read."""
    _newest: OrderedDict[SessionUid, tuple[Heartbeat, float]] = field(default_factory=OrderedDict)
    _cursor: int = 0

    def newest(self, uid: SessionUid) -> Heartbeat | None:
        known = self._newest.get(uid)
        return None if known is None else known[0]

    def age_s(self, uid: SessionUid) -> float | None:
        known = self._newest.get(uid)
        return None if known is None else self.clock() - known[1]

    def forget(self, uid: SessionUid) -> None:
        self._newest.pop(uid, None)

    async def run(self) -> None:
        """Poll until cancelled. An absent ledger is asked again, ever more slowly."""
        pause_s = RETRY_FIRST_S
        while True:
            try:
                beats = await self.poll()
            except GristmillError as error:
                if self.ledger_answers or pause_s == RETRY_FIRST_S:
                    logger.warning("ledger_away", extra={"error": error.message})
                self.ledger_answers = False
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_MAX_S, pause_s * 2)
                continue
            self.ledger_answers, pause_s = True, RETRY_FIRST_S
            await asyncio.sleep(self._pause_s(beats))

    async def poll(self) -> int:
        """Take one page. Returns how many heartbeats it had."""
        wait_s = BEAT_WAIT_S if self.caught_up else 0.0
        page = await self.source.heartbeats(self._cursor, wait_s)
        if page.cursor < self._cursor:
            # The ledger was restored from a backup, and counts from an earlier number.
            logger.warning("heartbeat_cursor_fell", extra={"cursor": page.cursor})
        self._cursor = page.cursor
        now = self.clock()
        for beat in page.heartbeats:
            uid = beat.view.uid
            before = self.newest(uid)
            self._newest[uid] = (beat, now)
            self._newest.move_to_end(uid)
            if len(self._newest) > KEPT_MAX:
                self._newest.popitem(last=False)
            self.told(uid, before, beat)
        full = len(page.heartbeats) >= limits.HEARTBEAT_PAGE_MAX
        if not full and not self.caught_up:
            self.caught_up = True
            self.ready()
        return len(page.heartbeats)

    def _pause_s(self, beats: int) -> float:
        if beats >= limits.HEARTBEAT_PAGE_MAX:
            return 0.0
        longest_s = PAUSE_S if self.hurried() else PAUSE_S_MAX
        return min(longest_s, PAUSE_PER_BEAT_S * beats)


def is_news(before: Heartbeat | None, beat: Heartbeat) -> bool:
    """Whether what a session is or needs may have changed: look at it at once."""
    return before is None or _essence(before) != _essence(beat)


def informs(before: Heartbeat | None, beat: Heartbeat) -> bool:
    """Whether there is something to show, some time: tokens, activity."""
    return before is None or _numbers(before) != _numbers(beat)


def _essence(beat: Heartbeat) -> tuple[object, ...]:
    view = beat.view
    flushed = beat.acked_seq >= beat.head_seq
    return (view.attempt, view.state, view.error, view.missing_number, beat.worker_ready) + (
        (flushed,) if view.state in ("Draining", "Closed") else ()
    )


def _numbers(beat: Heartbeat) -> tuple[object, ...]:
    view = beat.view
    return (view.counts, view.last_received_number, view.last_activity_us, beat.cost)
