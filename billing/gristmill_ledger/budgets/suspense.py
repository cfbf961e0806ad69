"""Holds whose time ran out: nothing of them is freed until it is known what was spent."""

import logging
from dataclasses import dataclass
from typing import Final

import msgspec
from sqlalchemy import Connection, bindparam, select

from gristmill_contracts.budgets import Decide
from gristmill_contracts.errors import ConflictError, NotFoundError
from gristmill_contracts.http import Heartbeat
from gristmill_ledger import checks, schema
from gristmill_ledger.budgets import holds
from gristmill_ledger.schema import budgets as tables

log = logging.getLogger(__name__)
SWEEP_MAX: Final = 1000
"""Leases that one transaction looks at."""

_balance, _heartbeat = tables.reservation_balance.c, schema.heartbeat.c
_EXPIRED: Final = (
    select(_balance.lease)
    .where(_balance.suspended == 0, _balance.expires_us <= bindparam("now_us"))
    .distinct()
    .limit(SWEEP_MAX)
)
_CLOSED: Final = (
    select(_balance.lease, _balance.attempt, _heartbeat.body)
    .join(schema.heartbeat, _heartbeat.session == _balance.session)
    .where(_heartbeat.attempt >= _balance.attempt, _balance.unknown_usage == 0)
    .where(_balance.suspended == 1)
    .distinct()
    .limit(SWEEP_MAX)
)
_RESOLUTION: Final = select(tables.reservation_resolution.c.kind).where(
    tables.reservation_resolution.c.lease == bindparam("lease"),
    tables.reservation_resolution.c.budget == bindparam("budget"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    suspended: int
    """Holds whose time ran out."""
    resolved: list[holds.Resolved]
    """Holds that ended because their session closed with everything acknowledged."""


def sweep(connection: Connection, now_us: int) -> Swept:
    """Suspend what ran out, and end what is in suspense of sessions that closed."""
    changes = holds.Changes()
    expired = connection.execute(_EXPIRED, {"now_us": now_us}).scalars().all()
    suspended = 0
    for each in holds.lock_leases(connection, expired):
        # Looked at again under the lock: it may have been renewed meanwhile.
        if not each.suspended and each.expires_us <= now_us:
            holds.suspend(each, changes, "expired", now_us)
            suspended += 1
    holds.apply(connection, changes, now_us)
    changes = holds.Changes()
    drained = holds.lock_leases(connection, _drained(connection))
    resolved = [
        holds.resolve(each, changes, "drained", now_us)
        for each in drained
        if each.suspended and not each.unknown_usage
    ]
    holds.apply(connection, changes, now_us)
    return Swept(suspended=suspended, resolved=resolved)


def _drained(connection: Connection) -> list[str]:
    """Leases in suspense of sessions whose meter closed with its whole log acknowledged."""
    found = set()
    for row in connection.execute(_CLOSED):
        beat = msgspec.msgpack.decode(row.body, type=Heartbeat)
        if beat.view.state == "Closed" and beat.acked_seq >= beat.head_seq:
            found.add(row.lease)
    return sorted(found)


def decide_suspense(
    connection: Connection, lease: str, budget: str, decision: Decide, *, by: str, now_us: int
) -> holds.Resolved | None:
    """Record a decision, which is final. The same one again changes nothing: None.

    Raises NotFoundError, ConflictError where the hold has ended otherwise or is not in suspense.
    """
    checks.text("reason", decision.reason)
    checks.text("by", decision.by, empty=True)
    found = [each for each in holds.lock_leases(connection, [lease]) if each.budget == budget]
    if not found:
        _check_same(connection, lease, budget, decision)
        return None
    (balance,) = found
    if not balance.suspended:
        raise ConflictError(
            f"lease {lease} still holds {balance.rest} of budget {budget} for its meter; only what is in "
            "suspense is decided: wait until its time has run out"
        )
    changes = holds.Changes()
    resolved = holds.resolve(
        balance,
        changes,
        f"decided: {decision.reason}",
        now_us,
        post=decision.kind == "post",
        decided_by=decision.by or by,
    )
    holds.apply(connection, changes, now_us)
    return resolved


def _check_same(connection: Connection, lease: str, budget: str, decision: Decide) -> None:
    kind = connection.execute(_RESOLUTION, {"lease": lease, "budget": budget}).scalar_one_or_none()
    if kind is None:
        raise NotFoundError(
            f"there is no lease {lease[:80]!r} with a hold of budget {budget[:200]!r}; list what is in "
            "suspense"
        )
    if kind != {"void": "voided", "post": "posted"}[decision.kind]:
        raise ConflictError(
            f"what lease {lease} held of budget {budget} was {kind} already, and that is final; correct "
            "it with another budget"
        )
