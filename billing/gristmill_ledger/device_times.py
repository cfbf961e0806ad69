"""How long devices were held for sessions, and how long they worked: facts for us, in no bill.

A meter tells with each heartbeat how long it has had its worker, as a stretch that grows. It is recorded now
and then and at its end; of each stretch the highest counts.
"""

from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import Connection, func, select, text

from gristmill_contracts import limits
from gristmill_contracts.http import Heartbeat
from gristmill_ledger.schema.reconcile import device_time
from gristmill_ledger.usage_query import UsageQuery

EVERY_US: Final = int(limits.DEVICE_TIME_EVERY_S * 1e6)
SESSIONS_SHOWN_MAX: Final = 1000

_RECORD: Final = text("""
INSERT INTO device_time
    (session, attempt, since_us, held_us, tenant, devices, busy_us, recorded_us)
SELECT :session, :attempt, :since_us, :held_us, :tenant, :devices, :busy_us, :recorded_us
WHERE NOT EXISTS (
    SELECT 1 FROM device_time WHERE session = :session AND attempt = :attempt
    AND since_us = :since_us AND held_us > :recorded_above
)
ON CONFLICT DO NOTHING
""")
_PARTS: Final = ("held_us", "device_us", "busy_us")


def record_device_times(
    connection: Connection, heartbeats: Iterable[Heartbeat], now_us: int
) -> None:
    """Record stretches that have grown by a good part since they were recorded, or have ended."""
    rows = [_row(each, now_us) for each in heartbeats if each.device is not None]
    if rows:
        connection.execute(_RECORD, rows)


def _row(beat: Heartbeat, now_us: int) -> dict[str, object]:
    device = beat.device
    assert device is not None
    ends = beat.released or beat.view.state == "Closed"
    return {
        "session": beat.view.uid,
        "attempt": beat.view.attempt,
        "since_us": device.since_us,
        "held_us": device.held_us,
        "tenant": beat.tenant,
        "devices": device.devices,
        "busy_us": device.busy_us,
        "recorded_us": now_us,
        # At its end nothing of it is left out; before, a row says the same for a while.
        "recorded_above": device.held_us - (1 if ends else EVERY_US),
    }


def device_times(connection: Connection, query: UsageQuery) -> dict[str, Any]:  # Any: JSON
    """`internal` of GET /v1/usage: of the tenant, the session and the time that are asked for.

    {"device_time": [{"tenant", "session", "held_us", "device_us", "busy_us"}], "sessions": n,
     "held_us": n, "device_us": n, "busy_us": n}
    held_us: a worker was held. device_us: the same, times its accelerators; 0 on a CPU. busy_us: it ran
    operations of the session. Sums are of all sessions; the list is bounded.
    """
    found: dict[tuple[str, str], dict[str, int]] = {}
    for row in connection.execute(_stretches(query)):
        sums = found.setdefault((row.tenant, row.session), dict.fromkeys(_PARTS, 0))
        sums["held_us"] += row.held_us
        sums["device_us"] += row.held_us * row.devices
        sums["busy_us"] += row.busy_us
    shown = [
        {"tenant": tenant, "session": session, **sums}
        for (tenant, session), sums in sorted(found.items())[:SESSIONS_SHOWN_MAX]
    ]
    totals = {name: sum(sums[name] for sums in found.values()) for name in _PARTS}
    return {"device_time": shown, "sessions": len(found), **totals}


def _stretches(query: UsageQuery) -> Any:  # Any: a select
    """Each stretch once, by when it began."""
    table = device_time.c
    statement = select(
        table.tenant,
        table.session,
        func.max(table.held_us).label("held_us"),
        func.max(table.busy_us).label("busy_us"),
        func.max(table.devices).label("devices"),
    ).group_by(table.tenant, table.session, table.attempt, table.since_us)
    for name, value in query.filters:
        if name in ("tenant", "session"):
            statement = statement.where(table[name] == value)
    if query.since_us is not None:
        statement = statement.where(table.since_us >= query.since_us)
    if query.until_us is not None:
        statement = statement.where(table.since_us < query.until_us)
    return statement
