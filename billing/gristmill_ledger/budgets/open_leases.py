"""What a lease held at first, what is left of it, and until when it may be spent."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, and_, bindparam, select

from gristmill_contracts.budgets import Hold, OpenLease, Renewed
from gristmill_contracts.ids import SessionUid
from gristmill_ledger.lists import among
from gristmill_ledger.schema import budgets as tables

_lease, _reservation = tables.budget_lease.c, tables.reservation.c
_balance, _budget, _terms = tables.reservation_balance.c, tables.budget.c, tables.budget_terms.c
_HELD: Final = (
    select(
        tables.reservation,
        _budget.unit,
        _terms.mode,
        _balance.rest,
        _balance.expires_us,
        _balance.suspended,
    )
    .select_from(
        tables.reservation.join(tables.budget, _budget.id == _reservation.budget)
        .join(tables.budget_terms, _terms.budget == _reservation.budget)
        .outerjoin(
            tables.reservation_balance,
            and_(_balance.lease == _reservation.lease, _balance.budget == _reservation.budget),
        )
    )
    .where(among(_reservation.lease, "leases"))
    .order_by(_reservation.lease, _reservation.budget)
)
_LEASES: Final = select(tables.budget_lease).where(among(_lease.id, "leases"))
_OF_SESSION: Final = select(_balance.lease).where(_balance.session == bindparam("uid")).distinct()


@dataclass(slots=True, kw_only=True)
class Held:
    """The holds of a lease, ended or not."""

    holds: list[Hold] = field(default_factory=list)
    rest: dict[str, int] = field(default_factory=dict)
    """Of those that have not ended."""
    expires_us: int = 0
    """0 = it has ended."""
    suspended: bool = False


def read_holds(connection: Connection, leases: Collection[str]) -> dict[str, Held]:
    """By lease; one that never was is empty."""
    found = {lease: Held() for lease in leases}
    for row in connection.execute(_HELD, {"leases": sorted(leases)}):
        held = found[row.lease]
        held.holds.append(
            Hold(
                budget=row.budget,
                period_start_us=row.start_us,
                unit=row.unit,
                amount=row.amount,
                floor=row.floor,
                mode=row.mode,
            )
        )
        if row.rest is not None:
            held.rest[row.budget] = row.rest
            held.expires_us = row.expires_us
            held.suspended |= bool(row.suspended)
    return found


def renewed(connection: Connection, leases: Collection[str], now_us: int) -> dict[str, Renewed]:
    """Where leases stand now; one that is not known is missing."""
    if not leases:
        return {}
    found = read_holds(connection, leases)
    rows = connection.execute(_LEASES, {"leases": sorted(leases)})
    return {
        row.id: Renewed(
            id=row.id,
            expires_in_s=_left_s(found[row.id], row.usable_until_us, now_us),
            rest=found[row.id].rest,
        )
        for row in rows
    }


def open_leases(connection: Connection, uid: str, now_us: int) -> list[OpenLease]:
    """The leases of a session that have not ended, oldest first."""
    leases = connection.execute(_OF_SESSION, {"uid": uid}).scalars().all()
    if not leases:
        return []
    found = read_holds(connection, leases)
    rows = connection.execute(
        _LEASES.order_by(_lease.taken_us, _lease.id), {"leases": sorted(leases)}
    )
    return [
        OpenLease(
            id=row.id,
            session=SessionUid(uid),
            attempt=row.attempt,
            key=row.key,
            taken_us=row.taken_us,
            expires_in_s=_left_s(found[row.id], row.usable_until_us, now_us),
            suspended=found[row.id].suspended,
            holds=found[row.id].holds,
            rest=found[row.id].rest,
        )
        for row in rows
    ]


def _left_s(held: Held, usable_until_us: int, now_us: int) -> float:
    if held.suspended:
        return 0.0
    return seconds_left(min(held.expires_us, usable_until_us), now_us)


def seconds_left(until_us: int, now_us: int) -> float:
    """0 where the moment is over."""
    return max(0, until_us - now_us) / 1e6
