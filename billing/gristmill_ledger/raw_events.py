"""The rows of `usage_event` as they are stored, for tests and explanations."""

from typing import Any

from sqlalchemy import Connection, select

from gristmill_ledger import schema


def events_page(
    connection: Connection, *, session: str, tenant: str | None, after: int, limit: int
) -> dict[str, Any]:  # Any: {"events": [column -> value], "next_after": seq or None}
    """Rows of a session behind its tenant's `seq` number `after`, in that order.

    A session belongs to one tenant. Where events say otherwise, name the tenant to page exactly.
    """
    table = schema.usage_event
    query = select(table).where(table.c.session == session, table.c.seq > after)
    if tenant is not None:
        query = query.where(table.c.tenant == tenant)
    query = query.order_by(table.c.seq, table.c.tenant)
    rows = connection.execute(query.limit(limit + 1)).all()
    events = [_plain(dict(row._mapping)) for row in rows[:limit]]
    return {
        "events": events,
        "next_after": events[-1]["seq"] if len(rows) > limit else None,
    }


def _plain(row: dict[str, Any]) -> dict[str, Any]:  # Any: column values
    for name in ("payload_hash", "prev_hash", "hash"):
        row[name] = bytes(row[name])
    return row
