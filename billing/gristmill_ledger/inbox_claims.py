"""How a meter takes what waits in its session's inbox: claim, make it durable, acknowledge.

A claim changes nothing, so that a meter that dies loses nothing; its log makes a second claim harmless.
Only the newest attempt that registered may claim and acknowledge.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from gristmill_contracts import limits
from gristmill_contracts.errors import FencedError, UnavailableError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.inbox import AckInbox, ClaimInbox
from gristmill_ledger import checks, schema
from gristmill_ledger.bodies import Body
from gristmill_ledger.inbox import foreign, lock_inbox
from gristmill_ledger.problems import TooLargeError
from gristmill_ledger.producers import owning_attempt
from gristmill_ledger.registry import session_tenant
from gristmill_ledger.release import clock_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """Rows of entries, in order, and whether the session is served from now on."""

    tenant: str
    rows: list[Row[Any]]
    served: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Bodies that no row names any more."""

    tenant: str
    blobs: list[str]
    taken: int = 0
    skipped: int = 0

    def __add__(self, other: "Dropped") -> "Dropped":
        return Dropped(
            tenant=self.tenant,
            blobs=self.blobs + other.blobs,
            taken=self.taken + other.taken,
            skipped=self.skipped + other.skipped,
        )


def claim(connection: Connection, uid: str, request: ClaimInbox) -> Claimed:
    """The next entries; with none left the attempt serves. Raises FencedError, UnavailableError."""
    checks.quantity("after", request.after)
    check_owner(connection, uid, request.attempt)
    row = lock_inbox(connection, uid, session_tenant(connection, uid) or "")
    asked: dict[str, int] = {"claimed_by": request.attempt}
    if row.waiting == 0:
        asked |= {"served_by": request.attempt, "served_us": clock_us(connection)}
    table = schema.inbox
    connection.execute(table.update().where(table.c.session == uid).values(**asked))
    if row.waiting == 0:
        return Claimed(tenant=row.tenant, rows=[], served=True)
    entry = schema.inbox_entry
    found = connection.execute(
        select(entry)
        .where(
            entry.c.session == uid,
            entry.c.state == "waiting",
            entry.c.position > request.after,
        )
        .order_by(entry.c.position)
        .limit(limits.INBOX_PAGE_OPERATIONS_MAX)
    ).all()
    return Claimed(tenant=row.tenant, rows=_page(found), served=False)


def _page(rows: Any) -> list[Row[Any]]:
    """As many of the first rows as fit into an answer, at least one."""
    page: list[Row[Any]] = []
    size = 0
    for row in rows:
        size += row.size
        if page and size > limits.INBOX_PAGE_BYTES_MAX:
            break
        page.append(row)
    return page


def check_ack(request: AckInbox) -> None:
    """Raise TooLargeError, or InvalidRequestError naming the field that is out of bounds."""
    positions = [*request.taken, *(skip.position for skip in request.skipped)]
    if len(positions) > limits.INBOX_OPERATIONS_MAX:
        raise TooLargeError(
            f"{len(positions)} positions in one message; an inbox holds at most "
            f"{limits.INBOX_OPERATIONS_MAX}"
        )
    for position in positions:
        checks.quantity("position", position)


def acknowledge(connection: Connection, uid: str, request: AckInbox) -> Dropped:
    """Let go of what a log holds, and of what it cannot take. Doing it again changes nothing."""
    check_owner(connection, uid, request.attempt)
    row = lock_inbox(connection, uid, session_tenant(connection, uid) or "")
    ends = {position: ("taken", "") for position in request.taken}
    ends |= {skip.position: ("skipped", skip.reason) for skip in request.skipped}
    dropped = end_entries(connection, row, ends)
    if not request.closes:
        return dropped
    return dropped + close(connection, uid, row.tenant, request.closes)


def close(connection: Connection, uid: str, tenant: str, reason: str) -> Dropped:
    """The session is over: what waits will never run, and nothing more is taken.

    Raises ConflictError for another tenant's session.
    """
    row = lock_inbox(connection, uid, tenant)
    if row.tenant != tenant:
        raise foreign(uid, row.tenant, tenant)
    entry, table = schema.inbox_entry, schema.inbox
    positions = connection.execute(
        select(entry.c.position).where(entry.c.session == uid, entry.c.state == "waiting")
    ).scalars()
    dropped = end_entries(connection, row, dict.fromkeys(positions, ("skipped", reason)))
    if row.closed_us is None:
        connection.execute(
            table.update()
            .where(table.c.session == uid)
            .values(closed_us=clock_us(connection), served_by=None, served_us=None)
        )
    return dropped


def end_entries(connection: Connection, row: Row[Any], ends: dict[int, tuple[str, str]]) -> Dropped:
    """Give waiting entries their end (state, reason); their bodies go."""
    entry, table = schema.inbox_entry, schema.inbox
    waiting = connection.execute(
        select(entry.c.position, entry.c.size, entry.c.blob).where(
            entry.c.session == row.session,
            entry.c.state == "waiting",
            entry.c.position.in_(list(ends)),
        )
    ).all()
    at_us = clock_us(connection)
    for each in waiting:
        state, reason = ends[each.position]
        connection.execute(
            entry.update()
            .where(entry.c.session == row.session, entry.c.position == each.position)
            .values(
                state=state,
                reason=_kept(reason),
                body=None,
                blob=None,
                ended_us=at_us,
            )
        )
    connection.execute(
        table.update()
        .where(table.c.session == row.session)
        .values(
            waiting=row.waiting - len(waiting),
            waiting_bytes=row.waiting_bytes - sum(each.size for each in waiting),
        )
    )
    taken = sum(ends[each.position][0] == "taken" for each in waiting)
    return Dropped(
        tenant=row.tenant,
        blobs=[each.blob for each in waiting if each.blob is not None],
        taken=taken,
        skipped=len(waiting) - taken,
    )


def _kept(reason: str) -> str:
    """Words of others, which may tell what somebody sent: cut, and without the character that PostgreSQL cannot hold."""
    return reason[: limits.DESCRIPTION_CHARS_MAX].replace("\0", "\ufffd")


def body_of(row: Row[Any]) -> Body:
    return Body(size=row.size, inline=row.body, blob=row.blob)


def waiting_sessions(connection: Connection, uids: set[SessionUid]) -> list[SessionUid]:
    """Those of the sessions whose inbox holds something."""
    table = schema.inbox.c
    found = connection.execute(
        select(table.session).where(table.session.in_(uids), table.waiting > 0)
    )
    return sorted(SessionUid(uid) for uid in found.scalars())


def check_owner(connection: Connection, uid: str, attempt: int) -> None:
    """Raise FencedError for an attempt that a newer one replaced, UnavailableError for one to come."""
    checks.text("session", uid)
    checks.quantity("attempt", attempt)
    owner = owning_attempt(connection, uid)
    if owner is not None and attempt < owner:
        raise FencedError(
            f"attempt {attempt} of session {uid} asks for its inbox, but attempt {owner} owns the session; stop"
        )
    if owner != attempt:
        raise UnavailableError(
            f"attempt {attempt} of session {uid} has not registered its log; do so first"
        )
