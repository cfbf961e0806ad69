"""Settles new usage against budgets, in the transaction that stores it. Refuses nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from sqlalchemy import Connection, bindparam, select

from gristmill_contracts.usage import UsageEvent
from gristmill_ledger.budgets import figures, holds
from gristmill_ledger.budgets.amounts import Change, Crossing
from gristmill_ledger.budgets.decide import Figures
from gristmill_ledger.budgets.figures import Scopes
from gristmill_ledger.budgets.holds import Balance
from gristmill_ledger.budgets.settling import Reserved, Settlement, settlement
from gristmill_ledger.lists import among
from gristmill_ledger.prices import load_prices
from gristmill_ledger.registry import session_book
from gristmill_ledger.schema import budgets as tables

_reservation, _lease, _budget = tables.reservation.c, tables.budget_lease.c, tables.budget.c
_RESERVED: Final = (
    select(
        _reservation.lease,
        _lease.session,
        _reservation.budget,
        _budget.unit,
        _reservation.start_us,
    )
    .select_from(
        tables.reservation.join(tables.budget_lease, _lease.id == _reservation.lease).join(
            tables.budget, _budget.id == _reservation.budget
        )
    )
    .where(
        among(_reservation.lease, "leases"),
        _lease.tenant == bindparam("tenant"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What settling did, for metrics and logs."""

    crossings: tuple[Crossing, ...] = ()
    unreserved: int = 0
    unknown: int = 0
    ended: tuple[holds.Resolved, ...] = ()


UNSETTLED: Final = Settled()


def settle(
    connection: Connection, tenant: str, events: Sequence[UsageEvent], now_us: int, *, book: str
) -> Settled:
    """Post what new events cost. The caller holds the locks of the producer and of the tenant's head.

    book: name of the price book of sessions that have none of their own.
    """
    scopes = Scopes(
        tenant=tenant,
        projects={event.project for event in events},
        sessions={event.session for event in events},
        keys={event.key for event in events},
    )
    leases = sorted({event.lease for event in events if event.lease})
    balances = holds.lock_leases(connection, leases)
    budgets = figures.applicable(connection, scopes, now_us) if events else []
    if not leases and not budgets:
        return UNSETTLED
    made = settlement(
        events,
        balances=balances,
        reserved=_reserved(connection, tenant, leases),
        budgets=budgets,
        prices=cache(lambda uid: load_prices(connection, session_book(connection, uid) or book)),
        now_us=now_us,
    )
    ended = _save(made, now_us)
    _add_late(connection, made)
    return Settled(
        crossings=tuple(holds.apply(connection, made.changes, now_us)),
        unreserved=made.unreserved,
        unknown=made.unknown,
        ended=tuple(ended),
    )


def _reserved(connection: Connection, tenant: str, leases: list[str]) -> list[Reserved]:
    if not leases:
        return []
    rows = connection.execute(_RESERVED, {"leases": leases, "tenant": tenant})
    return [Reserved(**row._mapping) for row in rows]


def _save(made: Settlement, now_us: int) -> list[holds.Resolved]:
    """Note the holds that changed. One that is used up has ended."""
    ended = []
    for balance in _in_order(made.touched):
        if balance.rest == 0 and not balance.unknown_usage:
            ended.append(holds.resolve(balance, made.changes, "used_up", now_us))
        else:
            made.changes.save(balance)
    return ended


def _in_order(touched: dict[tuple[str, str], Balance]) -> list[Balance]:
    return [touched[key] for key in sorted(touched)]


def _add_late(connection: Connection, made: Settlement) -> None:
    """Find the periods of what was not held, and add it there."""
    sums: dict[tuple[str, int], int] = {}
    known: dict[str, list[Figures]] = {}
    for budget, moment_us, cost in sorted(made.late):
        of_budget = known.setdefault(budget, [])
        period = next((p for p in of_budget if p.start_us <= moment_us < p.end_us), None)
        if period is None:
            period = figures.one(connection, budget, max(0, moment_us))
            of_budget.append(period)
        key = (budget, period.start_us)
        sums[key] = sums.get(key, 0) + cost
    for key, cost in sums.items():
        made.changes.add(key, Change(late_posted=cost))
