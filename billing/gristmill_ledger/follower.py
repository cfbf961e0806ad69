"""Rates what was stored, behind the writers: one task of each ledger process.

Never in the transaction of a batch: an acknowledgement must not wait for it. Whatever it has not reached
yet is read from the rows themselves, so that no answer depends on how far it is.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.units import now_us
from gristmill_ledger.database import Database
from gristmill_ledger.metrics import Metrics
from gristmill_ledger.rating import Progress, rate_behind, rows_behind

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.5
"""How often it looks for rows that nobody has rated; another replica may have stored them."""
FAILED_PAUSE_S: Final = 5.0


@dataclass(slots=True, kw_only=True)
class Follower:
    """`run` it as a task; cancel it to end it."""

    database: Database
    metrics: Metrics
    book: str

    async def run(self) -> None:
        """Never ends by itself: what fails is tried again."""
        while True:
            try:
                await self.catch_up()
            except GristmillError as error:
                log.warning("rating_waits", extra={"reason": error.message})
                await asyncio.sleep(FAILED_PAUSE_S)
            except Exception:
                log.exception("rating_failed")
                await asyncio.sleep(FAILED_PAUSE_S)
            await asyncio.sleep(LOOK_EVERY_S)

    async def catch_up(self) -> int:
        """Rate until nothing is left; returns how many rows that were."""
        rated = 0
        behind = await self.database.read(rows_behind)
        self.metrics.rating.unrated.set(behind)
        while behind:
            done = await self._step()
            rated += done.rows
            self.metrics.rating.unrated.set(max(0, behind - rated))
            if not (done.more and done.rows):
                break
        return rated

    async def _step(self) -> Progress:
        busy = self.database.busy
        rows_max = limits.RATING_ROWS_BUSY_MAX if busy else limits.RATING_ROWS_MAX
        done = await self.database.write(
            lambda c: rate_behind(c, book=self.book, now_us=now_us(), rows_max=rows_max),
            behind=True,
        )
        if done.unpriced:
            self.metrics.rating.unpriced.inc(done.unpriced)
            log.error("usage_unpriced", extra={"rows": done.unpriced, "book": self.book})
        return done
