"""The inbox of a session: operations that were accepted while no meter serves it.

The inbox row's lock orders everything that happens to it. Bodies that are too large for a row lie in the
store: written before the row that names them, removed after it forgot them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, func, select

from gristmill_contracts.errors import ConflictError, InvalidRequestError
from gristmill_contracts.http import Heartbeat, OperationState, SessionView, Submitted
from gristmill_contracts.inbox import InboxView, PostInbox
from gristmill_ledger import checks, schema
from gristmill_ledger.bodies import Body
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.inbox_rules import (
    Append,
    Entry,
    Holder,
    Standing,
    decide,
    is_served,
    next_and_last,
)
from gristmill_ledger.producers import owning_attempt
from gristmill_ledger.registry import session_tenant
from gristmill_ledger.release import clock_us

STATES: dict[str, OperationState] = {
    "waiting": "Pending",
    "taken": "InProgress",
    "skipped": "Skipped",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What became of a submit. `stored`: its body is on record by now, and was not before."""

    submitted: Submitted
    stored: bool


def check_post(uid: str, post: PostInbox) -> None:
    """Raise InvalidRequestError naming the field that is out of bounds."""
    checks.text("session", uid)
    checks.tenant_name(post.tenant)
    for message in (post.submit, post.refuse):
        if message is not None and message.client_token is not None:
            checks.text("client_token", message.client_token)
        if message is not None and message.number is not None:
            checks.quantity("number", message.number)
    if post.submit is not None and len(post.submit.body_hash) != 32:
        raise InvalidRequestError(
            f"body_hash has {len(post.submit.body_hash)} bytes; it is a SHA-256, 32 bytes"
        )


def look(connection: Connection, uid: str, post: PostInbox, size: int) -> Entry | Append:
    """What `keep` would do now. Raises as `inbox_rules.decide`, ConflictError for another tenant."""
    _check_tenant(connection, uid, post.tenant)
    row = inbox_row(connection, uid)
    if row is not None and row.tenant != post.tenant:
        raise foreign(uid, row.tenant, post.tenant)
    at_us = clock_us(connection)
    view = heard_view(connection, uid)
    standing = standing_of(connection, uid, row, view, at_us)
    book = InboxBook(connection=connection, uid=uid, view=view)
    return decide(post, size, book, standing, at_us)


def keep(connection: Connection, uid: str, post: PostInbox, body: Body) -> Kept:
    """Put an operation behind all others, or find it on record. Raises as `look`."""
    lock_inbox(connection, uid, post.tenant)
    decision = look(connection, uid, post, body.size)
    if isinstance(decision, Entry):
        return Kept(submitted=submitted_again(decision), stored=False)
    row = inbox_row(connection, uid)
    if row is None:
        raise AssertionError("a locked row is there")
    entry = _insert(connection, row, post, body, decision)
    submitted = Submitted(stream=entry.stream, number=entry.number, state=entry.state)
    return Kept(submitted=submitted, stored=True)


def submitted_again(entry: Entry) -> Submitted:
    return Submitted(stream=entry.stream, number=entry.number, state=entry.state, duplicate=True)


def _insert(
    connection: Connection, row: Row[Any], post: PostInbox, body: Body, decision: Append
) -> Entry:
    message = post.submit or post.refuse
    if message is None:
        raise AssertionError("decided of nothing")
    refused = post.submit is None
    entry = Entry(
        position=row.last_position + 1,
        stream=decision.stream,
        number=decision.number,
        state="Refused" if refused else "Pending",
        body_hash=post.submit.body_hash if post.submit is not None else b"",
    )
    connection.execute(
        schema.inbox_entry.insert().values(
            session=row.session,
            position=entry.position,
            stream=entry.stream,
            number=entry.number,
            kind="refuse" if refused else "submit",
            client_token=message.client_token,
            body_hash=entry.body_hash,
            state="waiting",
            reason="",
            body=body.inline,
            blob=body.blob,
            size=body.size,
            accepted_us=clock_us(connection),
        )
    )
    table = schema.inbox
    connection.execute(
        table.update()
        .where(table.c.session == row.session)
        .values(
            last_position=entry.position,
            log_number=max(row.log_number, entry.number if entry.stream == "log" else 0),
            waiting=row.waiting + 1,
            waiting_bytes=row.waiting_bytes + body.size,
            served_by=None,
            served_us=None,
        )
    )
    return entry


def view_inbox(connection: Connection, uid: str) -> InboxView:
    """How it stands; an inbox that never held anything is empty."""
    row, view = inbox_row(connection, uid), heard_view(connection, uid)
    standing = standing_of(connection, uid, row, view, clock_us(connection))
    book = InboxBook(connection=connection, uid=uid, view=view)
    return InboxView(
        waiting=standing.waiting,
        waiting_bytes=standing.waiting_bytes,
        last_received_number=book.last_received_number,
        served_by=row.served_by if row is not None and standing.served else None,
        closed=standing.closed,
    )


# --- rows ----------------------------------------------------------------------------------------


def inbox_row(connection: Connection, uid: str, *, lock: bool = False) -> Row[Any] | None:
    query = select(schema.inbox).where(schema.inbox.c.session == uid)
    return connection.execute(query.with_for_update() if lock else query).one_or_none()


def lock_inbox(connection: Connection, uid: str, tenant: str) -> Row[Any]:
    """The row, made if need be, until the end of the transaction."""
    insert_or_skip(
        connection,
        schema.inbox,
        session=uid,
        tenant=tenant,
        last_position=0,
        log_number=0,
        waiting=0,
        waiting_bytes=0,
    )
    row = inbox_row(connection, uid, lock=True)
    if row is None:
        raise AssertionError("a row is never deleted")
    return row


def heard_view(connection: Connection, uid: str) -> SessionView | None:
    """What the session's meter said last."""
    table = schema.heartbeat.c
    body = connection.execute(select(table.body).where(table.session == uid)).scalar_one_or_none()
    return None if body is None else msgspec.msgpack.decode(body, type=Heartbeat).view


def standing_of(
    connection: Connection,
    uid: str,
    row: Row[Any] | None,
    view: SessionView | None,
    at_us: int,
) -> Standing:
    told = 1 if view is None else view.next_number
    never_asked = row is None or row.claimed_by is None
    old_meter = never_asked and owning_attempt(connection, uid) is not None
    if row is None:
        return Standing(next_number_told=told, old_meter=old_meter)
    return Standing(
        log_number=row.log_number,
        waiting=row.waiting,
        waiting_bytes=row.waiting_bytes,
        served=is_served(_holder(connection, uid, row, view), at_us),
        closed=row.closed_us is not None,
        old_meter=old_meter,
        next_number_told=told,
    )


def _holder(connection: Connection, uid: str, row: Row[Any], view: SessionView | None) -> Holder:
    table = schema.release_grant.c
    grant = connection.execute(
        select(table.attempt, table.until_us).where(table.session == uid)
    ).one_or_none()
    return Holder(
        served_by=row.served_by,
        served_us=row.served_us or 0,
        owner=owning_attempt(connection, uid),
        granted_attempt=None if grant is None else grant.attempt,
        granted_until_us=0 if grant is None else grant.until_us,
        view=view,
    )


def _check_tenant(connection: Connection, uid: str, tenant: str) -> None:
    owner = session_tenant(connection, uid)
    if owner is not None and owner != tenant:
        raise foreign(uid, owner, tenant)


def foreign(uid: str, owner: str, tenant: str) -> ConflictError:
    return ConflictError(f"session {uid} belongs to tenant {owner}, not {tenant}")


def entry_of(row: Row[Any]) -> Entry:
    return Entry(
        position=row.position,
        stream=row.stream,
        number=row.number,
        state="Refused" if row.kind == "refuse" else STATES[row.state],
        body_hash=row.body_hash,
    )


@dataclass(frozen=True, kw_only=True)
class InboxBook:
    """Implements `admission.Book` over the entries of a session and its meter's last word."""

    connection: Connection
    uid: str
    view: SessionView | None

    @cached_property
    def _numbers(self) -> tuple[int, int]:
        table = schema.inbox_entry.c
        told = 1 if self.view is None else self.view.next_number
        found = self.connection.execute(
            select(table.number)
            .where(table.session == self.uid, table.stream == "train", table.number >= told)
            .distinct()
            .order_by(table.number)
        )
        return next_and_last([row.number for row in found], self.view)

    @property
    def next_number(self) -> int:
        return self._numbers[0]

    @property
    def last_received_number(self) -> int:
        return self._numbers[1]

    def by_token(self, client_token: str) -> Entry | None:
        return self._newest(schema.inbox_entry.c.client_token == client_token)

    def by_number(self, number: int) -> Entry | None:
        table = schema.inbox_entry.c
        return self._newest((table.stream == "train") & (table.number == number))

    def _newest(self, which: Any) -> Entry | None:  # Any: an expression of SQLAlchemy
        table = schema.inbox_entry
        row = self.connection.execute(
            select(table)
            .where(table.c.session == self.uid, which)
            .order_by(table.c.position.desc())
            .limit(1)
        ).one_or_none()
        return None if row is None else entry_of(row)

    def started_behind(self, number: int) -> bool:
        table = schema.inbox_entry.c
        taken = self.connection.execute(
            select(func.count()).where(
                table.session == self.uid,
                table.stream == "train",
                table.number > number,
                table.state == "taken",
                table.kind == "submit",
            )
        ).scalar_one()
        return taken > 0
