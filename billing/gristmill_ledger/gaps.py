"""Usage that could not be brought in: facts, shown with the usage of their session, never silent."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, func, select

from gristmill_contracts import limits
from gristmill_contracts.cluster_http import UsageGap
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.units import now_us
from gristmill_ledger import checks, schema
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.registry import session_tenant

LOG_LOST = "log_lost"
LOG_TRIMMED = "log_trimmed"
"""The ledger lost what it had acknowledged, and the log had let go of it since."""


def record_gap(connection: Connection, uid: str, gap: UsageGap) -> bool:
    """Keep a gap. The same one told again, at whatever time, is one. True if it is new."""
    check_gap(uid, gap)
    identity = (uid, gap.attempt, gap.acked_seq, gap.head_seq, gap.reason)
    return insert_or_skip(
        connection,
        schema.usage_gap,
        id=hashlib.sha256(msgspec.msgpack.encode(identity)).hexdigest(),
        tenant=session_tenant(connection, uid) or "",
        session=uid,
        recorded_us=now_us(),
        **msgspec.structs.asdict(gap),
    )


def check_gap(uid: str, gap: UsageGap) -> None:
    """Raise InvalidRequestError naming the field that is out of bounds."""
    checks.text("session", uid)
    checks.text("reason", gap.reason)
    for field in ("attempt", "acked_seq", "at_us"):
        checks.quantity(field, getattr(gap, field))
    if gap.head_seq is None:
        return
    below = checks.quantity("head_seq", gap.head_seq) < gap.acked_seq
    # A log that is older than the ledger knows is the exception, which the ledger records itself.
    if below and gap.reason != LOG_LOST:
        raise InvalidRequestError(
            f"head_seq is {gap.head_seq}, below acked_seq {gap.acked_seq}: nothing is missing"
        )


def session_gaps(connection: Connection, uid: str) -> list[UsageGap]:
    """All gaps of a session, oldest first."""
    table = schema.usage_gap
    rows = connection.execute(
        select(table).where(table.c.session == uid).order_by(table.c.at_us, table.c.id)
    ).all()
    return [
        UsageGap(**{name: row._mapping[name] for name in UsageGap.__struct_fields__})
        for row in rows
    ]


def lost_usage(
    connection: Connection, conditions: Sequence[ColumnElement[bool]]
) -> dict[str, Any]:  # Any: a part of the JSON answer
    """`lost` and `lost_count` of GET /v1/usage: the newest gaps, and how many there are."""
    table = schema.usage_gap
    count = connection.execute(
        select(func.count()).select_from(table).where(*conditions)
    ).scalar_one()
    rows = connection.execute(
        select(table)
        .where(*conditions)
        .order_by(table.c.at_us.desc(), table.c.id)
        .limit(limits.GAPS_SHOWN_MAX)
    ).all()
    return {"lost": [_shown(row) for row in rows], "lost_count": count}


def _shown(row: Row[Any]) -> dict[str, Any]:  # Any: column values
    """`events`: how many are missing; null where nobody knows."""
    fields = dict(row._mapping)
    del fields["id"], fields["recorded_us"]
    known = row.head_seq is not None and row.head_seq >= row.acked_seq
    return {**fields, "events": row.head_seq - row.acked_seq if known else None}
