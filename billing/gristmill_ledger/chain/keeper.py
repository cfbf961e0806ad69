"""Keeps the chains: signs their heads each hour, copies these to a second place, verifies new rows.

One task of each ledger process. Replicas do the same work beside each other: a head is signed once for
each hour, whoever comes first, and a copy that is there is not written again.
"""

import asyncio
import hashlib
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.chain.notes import SigningKey, VerifierKey
from gristmill_contracts.chain.walk import BrokenChainError, Walk
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.units import now_us
from gristmill_ledger.artifact_port import ArtifactStore, put_bytes
from gristmill_ledger.chain.heads import (
    Note,
    hour_slot,
    newest_notes,
    notes_after,
    sign_heads,
    unsigned_tenants,
)
from gristmill_ledger.chain.keys import told_keys
from gristmill_ledger.chain.pages import chain_heads, walk_page
from gristmill_ledger.database import Database
from gristmill_ledger.metrics import Metrics

log = logging.getLogger(__name__)
NOTES_AT_ONCE: Final = 1000
HEADS_TOGETHER: Final = 20
"""Heads that one transaction signs: usage waits behind it."""


@dataclass(slots=True, kw_only=True)
class Keeper:
    """`run` it as a task; cancel it to end it."""

    database: Database
    metrics: Metrics
    key: SigningKey | None
    """None = heads are not signed."""
    copies: ArtifactStore | None
    """Where signed heads are copied to; None = nowhere."""
    old_keys: str = ""
    """Verifier keys that signed heads before."""
    walks: dict[str, Walk] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    copied: dict[str, int] = field(default_factory=dict)
    """Tenant -> rows that its newest copied head names."""
    signed_slot: str = ""

    @property
    def verifiers(self) -> list[VerifierKey]:
        """The public halves of the keys that this ledger signs, and has signed, with."""
        return told_keys(self.key, self.old_keys)

    async def run(self) -> None:
        """Never ends by itself: what fails is tried again."""
        while True:
            for step in (self.sign, self.copy, self.verify):
                try:
                    await step()
                except GristmillError as error:
                    log.warning(
                        "chain_waits", extra={"step": step.__name__, "reason": error.message}
                    )
                except Exception:
                    log.exception("chain_step_failed", extra={"step": step.__name__})
            await asyncio.sleep(limits.CHAIN_LOOK_S)

    async def sign(self) -> None:
        """Sign the heads of this hour, unless that is done."""
        at_us = now_us()
        slot = hour_slot(at_us)
        if self.key is None or slot == self.signed_slot:
            return
        tenants = await self.database.read(unsigned_tenants)
        signed = 0
        for first in range(0, len(tenants), HEADS_TOGETHER):
            some = tenants[first : first + HEADS_TOGETHER]
            sign = partial(sign_heads, key=self.key, at_us=at_us, slot=slot, tenants=some)
            signed += len(await self.database.write(sign, behind=True))
        self.signed_slot = slot
        self.metrics.heads_signed.inc(signed)
        log.info("chain_heads_signed", extra={"heads": signed})

    async def copy(self) -> None:
        """Copy every signed head that is not in the second place yet."""
        if self.copies is None:
            return
        for newest in await self.database.read(newest_notes):
            while self.copied.get(newest.tenant, 0) < newest.seq:
                after = self.copied.get(newest.tenant, 0)
                notes = await self.database.read(
                    partial(notes_after, tenant=newest.tenant, after=after, most=NOTES_AT_ONCE)
                )
                for note in notes:
                    await asyncio.to_thread(_copy, self.copies, note)
                    self.copied[note.tenant] = note.seq

    async def verify(self) -> None:
        """Verify the rows behind those that were, in steps between which others read."""
        heads = await self.database.read(chain_heads)
        stored = sum(head.seq for head in heads)
        verified = sum(walk.seq for walk in self.walks.values())
        for head in heads:
            walk = self.walks.setdefault(head.tenant, Walk(tenant=head.tenant))
            before = walk.seq
            try:
                while head.tenant not in self.broken and walk.seq < head.seq:
                    await self._walk(walk, head.seq)
            except BrokenChainError as error:
                self._report(error)
            if walk.seq != before:
                verified += walk.seq - before
                self._show(verified, stored)
        self._show(verified, stored)

    async def _walk(self, walk: Walk, last: int) -> None:
        """The next rows. Their hashes take the processor from whoever commits: of a busy ledger they are few,
        and then others have their turn."""
        busy = self.database.busy
        rows_max = limits.CHAIN_PAGE_BUSY_ROWS if busy else limits.CHAIN_PAGE_ROWS
        await self.database.read(partial(walk_page, walk=walk, last=last, rows_max=rows_max))
        if busy:
            await asyncio.sleep(limits.CHAIN_BUSY_PAUSE_S)

    def _report(self, error: BrokenChainError) -> None:
        """Once for each tenant: behind the first broken row nothing can be verified."""
        fault = error.fault
        self.broken.add(fault.tenant)
        self.metrics.chain_failures.inc()
        log.error(
            "chain_broken",
            extra={"tenant": fault.tenant, "seq": fault.seq, "event_id": fault.event_id,
                   "reason": fault.what},
        )  # fmt: skip

    def _show(self, verified: int, stored: int) -> None:
        self.metrics.chain_verified.set(verified)
        self.metrics.chain_unverified.set(max(0, stored - verified))


def _copy(copies: ArtifactStore, note: Note) -> None:
    name = f"{note.seq:020}.note"
    if copies.sha256_of(note.tenant, name) is None:
        content = note.text.encode()
        put_bytes(copies, note.tenant, name, content, hashlib.sha256(content).hexdigest())
