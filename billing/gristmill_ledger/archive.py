"""The archive of a session: how its operations ended, told while no meter serves them.

A row and its body go when the retention of the result is over; the usage that it was billed by stays.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, func, select

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError, NotFoundError
from gristmill_contracts.http import TERMINAL_STATES, OperationView, Problem
from gristmill_contracts.ids import Stream
from gristmill_contracts.inbox import ArchivedOperation, ArchiveOperations
from gristmill_ledger import checks, schema
from gristmill_ledger.bodies import Body
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.inbox import entry_of
from gristmill_ledger.inbox_claims import check_owner
from gristmill_ledger.problems import TooLargeError
from gristmill_ledger.release import clock_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An operation's view, and the body of its result where it has one."""

    tenant: str
    view: OperationView
    result: Body | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """Bodies whose rows are gone, as (tenant, blob)."""

    rows: int
    blobs: list[tuple[str, str]]


def check_archive(uid: str, request: ArchiveOperations) -> None:
    """Raise InvalidRequestError, TooLargeError naming what is out of bounds."""
    checks.text("session", uid)
    checks.quantity("attempt", request.attempt)
    if not 0 <= request.retention_s <= limits.ARCHIVE_RETENTION_S_MAX:
        raise InvalidRequestError(
            f"retention_s is {request.retention_s}; it must be 0 to {limits.ARCHIVE_RETENTION_S_MAX}"
        )
    if len(request.operations) > limits.ARCHIVE_PAGE_OPERATIONS_MAX:
        raise TooLargeError(
            f"{len(request.operations)} operations in one message; send at most "
            f"{limits.ARCHIVE_PAGE_OPERATIONS_MAX}"
        )
    for each in request.operations:
        name = f"operation {each.stream}/{each.number}"
        checks.quantity(f"number of {name}", each.number)
        checks.quantity(f"ended_us of {name}", each.ended_us)
        checks.text(f"kind of {name}", each.kind, empty=True)
        if each.state not in TERMINAL_STATES:
            raise InvalidRequestError(f"{name} is {each.state}; only what ended is archived")


def missing_operations(
    connection: Connection, uid: str, request: ArchiveOperations
) -> list[ArchivedOperation]:
    """Those that are not in the archive yet and may still be asked for; no more than fit.

    Raises FencedError for an attempt that a newer one replaced, UnavailableError for one to come.
    """
    check_owner(connection, uid, request.attempt)
    table = schema.archive.c
    known = {
        (row.stream, row.number)
        for row in connection.execute(
            select(table.stream, table.number).where(
                table.session == uid,
                table.number.in_([each.number for each in request.operations]),
            )
        )
    }
    count, size = connection.execute(
        select(func.count(), func.coalesce(func.sum(table.size), 0)).where(table.session == uid)
    ).one()
    at_us = clock_us(connection)
    missing: list[ArchivedOperation] = []
    for each in request.operations:
        size += len(each.result or b"")
        if len(missing) + count >= limits.ARCHIVE_OPERATIONS_MAX or size > limits.ARCHIVE_BYTES_MAX:
            break
        if (each.stream, each.number) not in known and expires_us(request, each) > at_us:
            missing.append(each)
    return missing


def expires_us(request: ArchiveOperations, operation: ArchivedOperation) -> int:
    return min(operation.ended_us + int(request.retention_s * 1e6), limits.QUANTITY_MAX)


def keep_operation(
    connection: Connection,
    uid: str,
    operation: ArchivedOperation,
    body: Body | None,
    *,
    tenant: str,
    until_us: int,
) -> bool:
    """Whether it is kept now and was not before."""
    view = OperationView(
        stream=operation.stream,
        number=operation.number,
        kind=operation.kind,
        state=operation.state,
        counts=operation.counts,
        error=operation.error,
    )
    return insert_or_skip(
        connection,
        schema.archive,
        session=uid,
        stream=operation.stream,
        number=operation.number,
        tenant=tenant,
        view=msgspec.msgpack.encode(view),
        body=None if body is None else body.inline,
        blob=None if body is None else body.blob,
        size=0 if body is None else body.size,
        expires_us=until_us,
    )


def find_operation(connection: Connection, uid: str, stream: Stream, number: int) -> Found:
    """How an operation stands: in the archive, else in the inbox. Raises NotFoundError."""
    table = schema.archive
    row = connection.execute(
        select(table).where(
            table.c.session == uid, table.c.stream == stream, table.c.number == number
        )
    ).one_or_none()
    if row is not None and row.expires_us > clock_us(connection):
        view = msgspec.msgpack.decode(row.view, type=OperationView)
        there = row.body is not None or row.blob is not None
        body = Body(size=row.size, inline=row.body, blob=row.blob) if there else None
        return Found(tenant=row.tenant, view=view, result=body)
    entry = None if row is not None else _newest_entry(connection, uid, stream, number)
    if entry is None:
        raise NotFoundError(
            f"the ledger has no result of operation {stream}/{number} of session {uid}: it never ended "
            "here, or its retention is over"
        )
    return Found(tenant="", view=_entry_view(entry), result=None)


def _newest_entry(connection: Connection, uid: str, stream: Stream, number: int) -> Row[Any] | None:
    table = schema.inbox_entry
    return connection.execute(
        select(table)
        .where(table.c.session == uid, table.c.stream == stream, table.c.number == number)
        .order_by(table.c.position.desc())
        .limit(1)
    ).one_or_none()


def _entry_view(row: Row[Any]) -> OperationView:
    entry = entry_of(row)
    error = None
    if entry.state == "Skipped":
        error = Problem(code="conflict", message=row.reason)
    elif entry.state == "Refused":
        error = Problem(code="invalid_request", message="the request was refused")
    return OperationView(
        stream=entry.stream, number=entry.number, kind="", state=entry.state, error=error
    )


def sweep(connection: Connection) -> Expired:
    """Forget results whose retention is over, and what the inbox knew of operations as old."""
    at_us = clock_us(connection)
    table, entry = schema.archive, schema.inbox_entry
    rows = connection.execute(
        select(table.c.session, table.c.stream, table.c.number, table.c.tenant, table.c.blob)
        .where(table.c.expires_us <= at_us)
        .order_by(table.c.expires_us)
        .limit(limits.ARCHIVE_SWEEP_MAX)
    ).all()
    for row in rows:
        connection.execute(
            table.delete().where(
                table.c.session == row.session,
                table.c.stream == row.stream,
                table.c.number == row.number,
            )
        )
    oldest_us = at_us - int(limits.RESULT_RETENTION_S * 1e6)
    old = connection.execute(
        select(entry.c.session, entry.c.position)
        .where(entry.c.ended_us <= oldest_us)
        .limit(limits.ARCHIVE_SWEEP_MAX)
    ).all()
    for each in old:
        connection.execute(
            entry.delete().where(entry.c.session == each.session, entry.c.position == each.position)
        )
    blobs = [(row.tenant, row.blob) for row in rows if row.blob is not None]
    return Expired(rows=len(rows) + len(old), blobs=blobs)
