"""The rows of `usage_event` as they are stored, for tests and explanations."""

from typing import Any

from sqlalchemy import Connection, select

from gristmill_ledger import schema


def events_page(
    connection: Connection, *, session: str, after: int, limit: int
) -> dict[str, Any]:  # Any: {"events": [column -> value], "next_after": seq or None}
    """Rows of a session behind its tenant's `seq` number `after`, in that order."""
    table = schema.usage_event
    rows = connection.execute(
        select(table)
        .where(table.c.session == session, table.c.seq > after)
        .order_by(table.c.seq)
        .limit(limit + 1)
    ).all()
    events = [_plain(dict(row._mapping)) for row in rows[:limit]]
    return {
        "events": events,
        "next_after": events[-1]["seq"] if len(rows) > limit else None,
    }


def _plain(row: dict[str, Any]) -> dict[str, Any]:  # Any: column values
    row["payload_hash"] = bytes(row["payload_hash"])
    return row
