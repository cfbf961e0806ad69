"""Removes archived results whose retention is over: one task of each ledger process."""

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError
from gristmill_ledger.archive import sweep
from gristmill_ledger.artifact_port import ArtifactStore
from gristmill_ledger.bodies import drop_bodies
from gristmill_ledger.database import Database
from gristmill_ledger.orphans import old_bodies, tenants_with_bodies, unnamed

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Sweeper:
    """`run` it as a task; cancel it to end it."""

    database: Database
    bodies: ArtifactStore
    _orphans_at: float = 0.0

    async def run(self) -> None:
        """Never ends by itself: what fails is tried again."""
        while True:
            await asyncio.sleep(limits.ARCHIVE_SWEEP_S)
            try:
                while await self.step():
                    pass
                if time.monotonic() >= self._orphans_at:
                    self._orphans_at = time.monotonic() + limits.ORPHAN_LOOK_S
                    await self.remove_orphans()
            except GristmillError as error:
                log.warning("archive_not_swept", extra={"reason": error.message})
            except Exception:
                log.exception("archive_sweep_failed")

    async def remove_orphans(self) -> int:
        """Remove bodies that no row names; returns how many."""
        removed = 0
        for tenant in await self.database.read(tenants_with_bodies):
            after: str | None = ""
            while after is not None:
                old, after = await asyncio.to_thread(old_bodies, self.bodies, tenant, after)
                orphans = await self.database.read(partial(unnamed, blobs=old)) if old else []
                await drop_bodies(self.bodies, tenant, orphans)
                removed += len(orphans)
        if removed:
            log.info("orphans_removed", extra={"bodies": removed})
        return removed

    async def step(self) -> bool:
        """Remove some; whether there may be more. Rows first: a body that stays is named by nobody."""
        expired = await self.database.write(sweep)
        for tenant, blob in expired.blobs:
            await drop_bodies(self.bodies, tenant, [blob])
        if expired.rows:
            log.info("archive_swept", extra={"rows": expired.rows})
        return expired.rows >= limits.ARCHIVE_SWEEP_MAX
