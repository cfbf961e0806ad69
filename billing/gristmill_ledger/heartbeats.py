"""The newest heartbeat of each session, and a cursor that only grows, across restarts too."""

import msgspec
from sqlalchemy import Connection, func, select

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.http import Heartbeat, HeartbeatPage
from gristmill_ledger import checks, schema
from gristmill_ledger.counters import lock_counter, set_counter
from gristmill_ledger.database import insert_or_skip


def check_heartbeats(heartbeats: list[Heartbeat]) -> None:
    """Raise InvalidRequestError naming the first field that is out of bounds."""
    if len(heartbeats) > limits.HEARTBEAT_PAGE_MAX:
        raise InvalidRequestError(
            f"{len(heartbeats)} heartbeats in one message; send at most {limits.HEARTBEAT_PAGE_MAX}"
        )
    for index, heartbeat in enumerate(heartbeats):
        checks.text(f"[{index}].view.uid", heartbeat.view.uid)
        checks.text(f"[{index}].tenant", heartbeat.tenant)
        checks.quantity(f"[{index}].view.attempt", heartbeat.view.attempt)
        checks.quantity(f"[{index}].at_us", heartbeat.at_us)


def newest_of_each(heartbeats: list[Heartbeat]) -> list[Heartbeat]:
    """One heartbeat a session: that of the highest attempt, the last of several."""
    newest: dict[str, Heartbeat] = {}
    for heartbeat in heartbeats:
        known = newest.get(heartbeat.view.uid)
        if known is None or heartbeat.view.attempt >= known.view.attempt:
            newest[heartbeat.view.uid] = heartbeat
    return [newest[uid] for uid in sorted(newest)]


def store_heartbeats(connection: Connection, heartbeats: list[Heartbeat]) -> int:
    """Keep those that are not of an older attempt. Returns how many were kept.

    Of one attempt the last to arrive is kept, whatever its time: a meter whose clock was set back
    must not look dead.
    """
    cursor = first = lock_counter(connection, "heartbeat")
    table = schema.heartbeat
    for heartbeat in newest_of_each(heartbeats):
        values = {
            "cursor": cursor + 1,
            "attempt": heartbeat.view.attempt,
            "at_us": heartbeat.at_us,
            "body": msgspec.msgpack.encode(heartbeat),
        }
        update = (
            table.update()
            .where(table.c.session == heartbeat.view.uid, table.c.attempt <= heartbeat.view.attempt)
            .values(**values)
        )
        if connection.execute(update).rowcount or insert_or_skip(
            connection, table, session=heartbeat.view.uid, **values
        ):
            cursor += 1
    if cursor > first:
        set_counter(connection, "heartbeat", cursor)
    return cursor - first


def heartbeats_after(connection: Connection, after: int) -> HeartbeatPage:
    """Sessions that changed behind the cursor `after`, in the order of change.

    A cursor from the future (the ledger was restored from a backup) begins again from the start.
    """
    head = connection.execute(
        select(schema.counter.c.value).where(schema.counter.c.name == "heartbeat")
    ).scalar_one()
    if after > head:
        after = 0
    table = schema.heartbeat.c
    rows = connection.execute(
        select(table.cursor, table.body)
        .where(table.cursor > after)
        .order_by(table.cursor)
        .limit(limits.HEARTBEAT_PAGE_MAX)
    ).all()
    return HeartbeatPage(
        heartbeats=[msgspec.msgpack.decode(row.body, type=Heartbeat) for row in rows],
        cursor=rows[-1].cursor if rows else after,
    )


def newest_heartbeat_us(connection: Connection) -> int | None:
    """When the latest heartbeat of any session was made."""
    at_us: int | None = connection.execute(select(func.max(schema.heartbeat.c.at_us))).scalar_one()
    return at_us
