"""Ships the results of a session that ends to the ledger's archive, where they stay fetchable.

Only once the ledger has acknowledged all usage: what the archive tells is billed. The newest come first,
for the archive is bounded; it forgets each when its retention is over.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gristmill_contracts import limits
from gristmill_contracts.errors import FencedError, GristmillError, NotFoundError
from gristmill_contracts.inbox import AckInbox, ArchivedOperation, ArchiveOperations
from gristmill_meter.ports import Ledger
from gristmill_meter.pulse import backoff
from gristmill_meter.records import Record
from gristmill_meter.release import unfetched
from gristmill_meter.session import Session
from gristmill_meter.views import operation_view

logger = logging.getLogger(__name__)

REASON = "the session was stopped before a meter took it"


@dataclass(slots=True, kw_only=True)
class Archiver:
    session: Session
    ledger: Ledger

    async def ship(self) -> None:
        """Archive everything, and close the inbox. A ledger that does not take it is asked again, within bounds."""
        session = self.session
        try:
            async with asyncio.timeout(limits.ARCHIVE_SHIP_S_MAX):
                await self._until_taken()
        except TimeoutError:
            logger.error(  # noqa: TRY400 - the traceback says nothing
                "archive_incomplete",
                extra={"session": session.state.uid, "after_s": limits.ARCHIVE_SHIP_S_MAX},
            )

    async def _until_taken(self) -> None:
        session, failures = self.session, 0
        while session.broken is None:
            try:
                await self._ship_once()
            except FencedError as error:
                session.break_off(error)
            except GristmillError as error:
                if not error.retryable:
                    # A ledger of the release before, or a bug: the end of a session must not wait for it.
                    logger.error("archive_refused", extra=self._fields(error))  # noqa: TRY400
                    return
                if failures == 0:
                    logger.warning("archive_waits", extra=self._fields(error))
                settings = session.settings
                await backoff(failures, settings.retry_first_s, settings.retry_last_s)
                failures += 1
            else:
                return

    async def ship_some(self) -> None:
        """As much as goes in a moment: the process ends, and the session goes on elsewhere."""
        session = self.session
        if session.broken is not None or session.acked_seq < session.state.head_seq:
            return
        try:
            async with asyncio.timeout(limits.ARCHIVE_DRAIN_S):
                await self._ship_results()
        except (GristmillError, TimeoutError) as error:
            logger.warning(
                "archive_waits", extra={"session": session.state.uid, "error": str(error)}
            )

    async def _ship_once(self) -> None:
        session, attempt = self.session, self.session.state.attempt
        await self._ship_results()
        await self.ledger.ack_inbox(
            session.state.uid, AckInbox(attempt=attempt, taken=[], closes=REASON)
        )

    async def _ship_results(self) -> None:
        session, attempt = self.session, self.session.state.attempt
        shipped = 0
        async for page in self._pages():
            request = ArchiveOperations(
                attempt=attempt,
                retention_s=session.settings.result_retention_s,
                operations=page,
            )
            await self.ledger.archive(session.state.uid, request)
            shipped += len(page)
        logger.info("archive_shipped", extra={"session": session.state.uid, "operations": shipped})

    async def _pages(self) -> AsyncIterator[list[ArchivedOperation]]:
        """What may still be asked for, the newest first, in pages that fit into a message."""
        page: list[ArchivedOperation] = []
        size = total = count = 0
        for record in self._records():
            try:
                operation = await self._archived(record)
            except NotFoundError:
                continue  # Its retention ended meanwhile.
            length = len(operation.result or b"")
            total, count = total + length, count + 1
            if count > limits.ARCHIVE_OPERATIONS_MAX or total > limits.ARCHIVE_BYTES_MAX:
                break
            too_much = size + length > limits.ARCHIVE_PAGE_BYTES_MAX
            if page and (too_much or len(page) >= limits.ARCHIVE_PAGE_OPERATIONS_MAX):
                yield page
                page, size = [], 0
            page.append(operation)
            size += length
        if page:
            yield page

    def _records(self) -> list[Record]:
        """Streams were read by their own request, and cannot be asked for."""
        session = self.session
        oldest_us = session.now_us() - int(session.settings.result_retention_s * 1e6)
        kept = [
            record
            for record in session.state.records.values()
            if record.terminal
            and not record.streaming
            and record.claim != "waiting"  # It is billed when it is fetched, not before.
            and (
                record.state != "Refused" or session.state.closed
            )  # Its number may be taken again.
            and record.ended_us > oldest_us
        ]
        return sorted(kept, key=lambda record: record.ended_us, reverse=True)

    async def _archived(self, record: Record) -> ArchivedOperation:
        """As a poll would tell it. Raises NotFoundError where the result is kept no longer."""
        result: bytes | None = None
        view = operation_view(record, record.state)
        if record.claim == "expired":
            view = operation_view(unfetched(record), "Failed")
        elif record.state == "Completed":
            if record.result is None:
                raise NotFoundError(f"the result of {record.stream}/{record.number} is gone")
            result = await self.session.log.read_result(record.result, record.settled_frame)
        return ArchivedOperation(
            stream=record.stream,
            number=record.number,
            kind=record.kind,
            state=view.state,
            ended_us=record.ended_us,
            result=result,
            counts=view.counts,
            error=view.error,
        )

    def _fields(self, error: GristmillError) -> dict[str, str]:
        uid = self.session.state.uid
        return {"session": uid, "code": error.code, "error": error.message}
