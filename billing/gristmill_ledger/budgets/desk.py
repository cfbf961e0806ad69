"""The running side of budgets: leases that wait share a commit, and holds that ran out are looked for."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from sqlalchemy import Connection

from gristmill_contracts import limits
from gristmill_contracts.budgets import Denied, LeaseAnswer, TakeLease
from gristmill_contracts.errors import GristmillError, OverloadedError
from gristmill_ledger.budgets.holds import Resolved
from gristmill_ledger.budgets.leases import Answer, take
from gristmill_ledger.budgets.settle import Settled
from gristmill_ledger.budgets.suspense import SWEEP_MAX, Swept, sweep
from gristmill_ledger.database import Database
from gristmill_ledger.metrics import Metrics
from gristmill_ledger.release import clock_us

log = logging.getLogger(__name__)
TOGETHER_MAX: Final = 256
"""Leases of one commit."""


@dataclass(slots=True, eq=False)
class Waiting:
    request: TakeLease
    answer: asyncio.Future[Answer]


@dataclass(slots=True, kw_only=True)
class LeaseDesk:
    """Takes leases for meters. `run` it as a task, too: it sweeps what ran out. Cancel it to end it."""

    database: Database
    metrics: Metrics
    book: str
    """Price book of sessions that have none of their own."""
    waiting_max: int
    _waiting: deque[Waiting] = field(default_factory=deque)
    _emptying: asyncio.Task[None] | None = None

    async def take(self, request: TakeLease) -> LeaseAnswer:
        """A lease, or why there is none. Raises what the ledger refuses the request with."""
        if len(self._waiting) >= self.waiting_max:
            raise OverloadedError(
                f"{len(self._waiting)} requests for leases wait for the ledger's database, the most it "
                "holds; send the same request again later"
            )
        waiting = Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._emptying is None or self._emptying.done():
            # A task of its own: whoever began it may hang up.
            self._emptying = asyncio.create_task(self._empty(), name="leases")
        answer = await waiting.answer
        if isinstance(answer, GristmillError):
            raise answer
        self._count(request, answer)
        return answer

    async def _empty(self) -> None:
        while self._waiting:
            taken: list[Waiting] = []
            try:
                answers = await self.database.write(partial(self._answer, taken=taken))
            except Exception as error:  # noqa: BLE001 - it is the answer to those who wait
                # Nothing was taken where there was no room for another write.
                for waiting in taken or self._next():
                    if not waiting.answer.done():
                        waiting.answer.set_exception(error)
                continue
            for waiting, answer in zip(taken, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)

    def _answer(self, connection: Connection, taken: list[Waiting]) -> list[Answer]:
        """Take for all who wait once the writer is free. A transaction that is run again takes for the same."""
        if not taken:
            taken.extend(self._next())
        requests = [waiting.request for waiting in taken]
        return take(connection, requests, book=self.book, now_us=clock_us(connection))

    def _next(self) -> list[Waiting]:
        """Safe on the writer's thread: the loop only appends."""
        count = min(len(self._waiting), TOGETHER_MAX)
        return [self._waiting.popleft() for _ in range(count)]

    def _count(self, request: TakeLease, answer: LeaseAnswer) -> None:
        if not isinstance(answer, Denied):
            return
        self.metrics.budgets.denied(answer.budget.partition("/")[0], answer.reason)
        log.info(
            "budget_denied",
            extra={"session": request.session, "budget": answer.budget, "reason": answer.reason,
                   "limit": answer.limit, "posted": answer.posted, "reserved": answer.reserved,
                   "wanted": answer.wanted},
        )  # fmt: skip

    async def run(self) -> None:
        """Never ends by itself: what fails is tried again."""
        while True:
            await asyncio.sleep(limits.BUDGET_SWEEP_S)
            try:
                while (await self.sweep()).suspended >= SWEEP_MAX:
                    pass
            except GristmillError as error:
                log.warning("leases_not_swept", extra={"reason": error.message})
            except Exception:
                log.exception("lease_sweep_failed")

    async def sweep(self) -> Swept:
        """Suspend what ran out, and end what is accounted for."""
        swept = await self.database.write(lambda c: sweep(c, clock_us(c)))
        if swept.suspended:
            self.metrics.budgets.expired.labels("suspended").inc(swept.suspended)
            log.warning("leases_in_suspense", extra={"holds": swept.suspended})
        self.resolved(swept.resolved)
        return swept

    def resolved(self, resolved: list[Resolved]) -> None:
        """Holds that ended after their time, and how: by their session's end, or a decision."""
        for each in resolved:
            how = each.reason.partition(":")[0]
            if how != "returned":
                self.metrics.budgets.expired.labels(how).inc()
            if how == "decided":
                log.warning(
                    "suspense_decided",
                    extra={"lease": each.lease, "budget": each.budget, "resolution": each.kind,
                           "reason": each.reason},
                )  # fmt: skip

    def settled(self, settled: Settled) -> None:
        """What stored usage did to budgets, once it is committed."""
        counts = self.metrics.budgets
        counts.unreserved.inc(settled.unreserved)
        for crossing in settled.crossings:
            counts.crossed(crossing.percent)
            log.warning(
                "budget_threshold_passed",
                extra={"budget": crossing.budget, "percent": crossing.percent, "used": crossing.used,
                       "limit": crossing.limit, "period_start_us": crossing.start_us},
            )  # fmt: skip
        if settled.unknown:
            log.error("budget_cost_unknown", extra={"events": settled.unknown})
