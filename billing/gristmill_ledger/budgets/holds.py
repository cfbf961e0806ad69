"""What leases hold, after they were taken: renewed, given back, run out, resolved once.

A hold is changed by whoever has locked its balance row; rows are locked in the order of their keys, and
before the periods. A resolved hold has no balance row any more, and the database takes one resolution.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sqlalchemy import Connection, Select, bindparam, select

from gristmill_contracts import limits
from gristmill_ledger.budgets.amounts import Change, Crossing, move_all
from gristmill_ledger.driver import change_all, insert_all
from gristmill_ledger.lists import among
from gristmill_ledger.schema import budgets as tables

LEASE_US: Final = int(limits.BUDGET_LEASE_S * 1_000_000)

_balance = tables.reservation_balance.c
_ROWS: Final = (
    select(tables.reservation_balance).order_by(_balance.lease, _balance.budget).with_for_update()
)
OF_LEASES: Final = _ROWS.where(among(_balance.lease, "leases"))
_KEY: Final = (
    _balance.lease == bindparam("of_lease"),
    _balance.budget == bindparam("of_budget"),
)
_SAVE: Final = (
    tables.reservation_balance.update()
    .where(*_KEY)
    .values(
        posted=bindparam("posted"),
        rest=bindparam("rest"),
        suspended=bindparam("suspended"),
        unknown_usage=bindparam("unknown_usage"),
    )
)
_DROP: Final = tables.reservation_balance.delete().where(*_KEY)
# PostgreSQL runs a statement for each row of an executemany: here one does for all.
_SAVE_ALL: Final = (
    "UPDATE reservation_balance AS known SET posted = told.posted, rest = told.rest, "
    "suspended = told.suspended, unknown_usage = told.unknown_usage "
    "FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) "
    "AS told (lease, budget, posted, rest, suspended, unknown_usage) "
    "WHERE known.lease = told.lease AND known.budget = told.budget"
)
_DROP_ALL: Final = (
    "DELETE FROM reservation_balance AS known "
    "USING unnest(%s::text[], %s::text[]) AS told (lease, budget) "
    "WHERE known.lease = told.lease AND known.budget = told.budget"
)
_THRESHOLDS: Final = select(tables.budget_terms.c.budget, tables.budget_terms.c.thresholds).where(
    among(tables.budget_terms.c.budget, "budgets")
)
_RENEW: Final = (
    tables.reservation_balance.update()
    .where(
        among(_balance.lease, "leases"),
        _balance.session == bindparam("of_session"),
        _balance.attempt == bindparam("of_attempt"),
        _balance.suspended == 0,
        _balance.expires_us < bindparam("below_us"),
    )
    .values(expires_us=bindparam("until_us"))
)


@dataclass(slots=True, kw_only=True)
class Balance:
    """A hold without a resolution, locked to the end of the transaction."""

    lease: str
    budget: str
    start_us: int
    session: str
    attempt: int
    posted: int
    rest: int
    expires_us: int
    suspended: int
    unknown_usage: int

    @property
    def period(self) -> tuple[str, int]:
        return self.budget, self.start_us

    def released(self, amount: int) -> Change:
        """What the period is told when `amount` of the rest is gone."""
        return Change(suspense=-amount) if self.suspended else Change(reserved=-amount)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """How a hold ended, for metrics and logs."""

    lease: str
    budget: str
    kind: Literal["posted", "voided"]
    reason: str


@dataclass(slots=True)
class Changes:
    """What is to be written in the end, all of one kind at once: `apply` does."""

    periods: defaultdict[tuple[str, int], Change] = field(
        default_factory=lambda: defaultdict(Change)
    )
    saved: list[dict[str, object]] = field(default_factory=list)
    suspended: list[dict[str, object]] = field(default_factory=list)
    resolutions: list[dict[str, object]] = field(default_factory=list)

    def add(self, period: tuple[str, int], more: Change) -> None:
        """Sum up what a period is told."""
        change = self.periods[period]
        change.posted += more.posted
        change.late_posted += more.late_posted
        change.reserved += more.reserved
        change.suspense += more.suspense

    def save(self, balance: Balance) -> None:
        """Keep a hold as it is now."""
        self.saved.append(
            {
                "of_lease": balance.lease,
                "of_budget": balance.budget,
                "posted": balance.posted,
                "rest": balance.rest,
                "suspended": balance.suspended,
                "unknown_usage": balance.unknown_usage,
            }
        )


def lock(connection: Connection, query: Select[Any], **parameters: object) -> list[Balance]:
    """The balance rows of a query, locked. Any: a query on reservation_balance."""
    return [Balance(**row._mapping) for row in connection.execute(query, parameters)]


def lock_leases(connection: Connection, leases: Sequence[str]) -> list[Balance]:
    return lock(connection, OF_LEASES, leases=sorted(leases)) if leases else []


def resolve(
    balance: Balance,
    changes: Changes,
    reason: str,
    now_us: int,
    *,
    post: bool = False,
    decided_by: str = "",
) -> Resolved:
    """End a hold. Its rest is freed; with `post` it counts as used, for somebody decided that it was."""
    changes.add(balance.period, balance.released(balance.rest))
    if post:
        changes.add(balance.period, Change(late_posted=balance.rest))
    voided = 0 if post else balance.rest
    used = post or (balance.posted and not voided)
    kind: Literal["posted", "voided"] = "posted" if used else "voided"
    changes.resolutions.append(
        {
            "lease": balance.lease,
            "budget": balance.budget,
            "kind": kind,
            "posted": balance.posted + (balance.rest if post else 0),
            "voided": voided,
            "reason": reason,
            "decided_by": decided_by,
            "at_us": now_us,
        }
    )
    return Resolved(lease=balance.lease, budget=balance.budget, kind=kind, reason=reason)


def suspend(
    balance: Balance,
    changes: Changes,
    reason: Literal["expired", "unknown_usage"],
    now_us: int,
) -> None:
    """Keep a hold that nobody answers for. Nothing is freed: it may have been spent. Once in suspense, it
    stays so until it ends."""
    if balance.suspended:
        return
    changes.add(balance.period, Change(reserved=-balance.rest, suspense=balance.rest))
    changes.suspended.append(
        {
            "lease": balance.lease,
            "budget": balance.budget,
            "amount": balance.rest,
            "reason": reason,
            "at_us": now_us,
        }
    )
    balance.suspended = 1
    changes.save(balance)


def give_back(
    connection: Connection, balances: Sequence[Balance], keep: dict[str, int], now_us: int
) -> list[Resolved]:
    """Lower holds to what may still be posted under them; where that is nothing of any, end them.

    What an event of unknown usage was posted under is not freed at the end: nobody knows its cost.
    """
    changes = Changes()
    resolved = []
    last = not any(keep.values())
    for each in balances:
        if last and each.unknown_usage and each.rest:
            suspend(each, changes, "unknown_usage", now_us)
        elif last:
            resolved.append(resolve(each, changes, "returned", now_us))
        elif (kept := min(each.rest, keep.get(each.budget, 0))) < each.rest:
            changes.add(each.period, each.released(each.rest - kept))
            each.rest = kept
            changes.save(each)
    apply(connection, changes, now_us)
    return resolved


def renew(
    connection: Connection, leases: Sequence[str], session: str, attempt: int, now_us: int
) -> None:
    """Push the end of leases out. Written only when a good part of their time is over."""
    connection.execute(
        _RENEW,
        {
            "leases": sorted(leases),
            "of_session": session,
            "of_attempt": attempt,
            "below_us": now_us + LEASE_US - LEASE_US // 8,
            "until_us": now_us + LEASE_US,
        },
    )


def apply(connection: Connection, changes: Changes, now_us: int) -> list[Crossing]:
    """Write the holds that changed or ended, then bring the periods up to date, in order."""
    if changes.saved:
        change_all(connection, _SAVE, _SAVE_ALL, changes.saved)
    insert_all(connection, tables.reservation_suspense, changes.suspended)
    if changes.resolutions:
        insert_all(connection, tables.reservation_resolution, changes.resolutions)
        ended = [
            {"of_lease": each["lease"], "of_budget": each["budget"]} for each in changes.resolutions
        ]
        change_all(connection, _DROP, _DROP_ALL, ended)
    if not changes.periods:
        return []
    budgets = sorted({budget for budget, _ in changes.periods})
    rows = connection.execute(_THRESHOLDS, {"budgets": budgets})
    thresholds = {row.budget: row.thresholds for row in rows}
    return move_all(connection, changes.periods, thresholds, now_us)
