"""What new usage means for budgets: which hold it is taken off, and what arrived without one. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.budgets import TOKENS
from gristmill_contracts.usage import TOKEN_TYPES, Counts, UsageEvent
from gristmill_ledger.budgets.amounts import Change
from gristmill_ledger.budgets.decide import Figures, cost_of
from gristmill_ledger.budgets.holds import Balance, Changes
from gristmill_ledger.prices import PriceList

CORRECTIONS: Final = frozenset({"adjustment", "void"})
"""Kinds of events that correct another one: signed, and never under a hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A hold of the past or present, which says to which period its events belong."""

    lease: str
    session: str
    budget: str
    unit: str
    start_us: int


@dataclass(slots=True, kw_only=True)
class Settlement:
    """What a batch of events does to budgets."""

    changes: Changes = field(default_factory=Changes)
    touched: dict[tuple[str, str], Balance] = field(default_factory=dict)
    """Holds that changed, by (lease, budget)."""
    late: list[tuple[str, int, int]] = field(default_factory=list)
    """Budget, moment and amount of usage without a hold: its period is looked up by whoever applies it."""
    unreserved: int = 0
    """Events of which a part was not held."""
    unknown: int = 0
    """Events whose cost in some budget nobody knows."""


def settlement(
    events: Sequence[UsageEvent],
    *,
    balances: Sequence[Balance],
    reserved: Sequence[Reserved],
    budgets: Sequence[Figures],
    prices: Callable[[str], PriceList],
    now_us: int,
) -> Settlement:
    """Sort what events cost into holds and late usage.

    balances: the open holds of the events' leases. reserved: all of their holds, ended ones too.
    budgets: those of the tenant that bound some of the events. prices: those of a
    session, asked for only where money counts.
    """
    made = Settlement(touched={})
    by_key = {(each.lease, each.budget): each for each in balances}
    holds: dict[str, list[Reserved]] = {}
    for hold in reserved:
        holds.setdefault(hold.lease, []).append(hold)
    for event in events:
        if event.kind == "attempt":
            continue
        correction = event.kind in CORRECTIONS
        mine = [] if correction else [
            hold for hold in holds.get(event.lease, []) if hold.session == event.session
        ]  # fmt: skip
        late = False
        for hold in mine:
            cost = _cost(hold.unit, event, prices)
            late |= _settle_hold(made, hold, by_key.get((hold.lease, hold.budget)), cost)
        held = {hold.budget for hold in mine}
        for budget in budgets:
            if budget.budget not in held and _bounds(budget, event):
                late |= _settle_late(made, budget, event, _cost(budget.unit, event, prices), now_us)
        made.unreserved += late and not correction
    return made


def _settle_hold(
    made: Settlement, hold: Reserved, balance: Balance | None, cost: int | None
) -> bool:
    """Take a cost off a hold, as far as that reaches. True if a part of it was not held."""
    if cost is None:
        made.unknown += 1
        if balance is not None:
            balance.unknown_usage = 1
            made.touched[balance.lease, balance.budget] = balance
        return False
    period = (hold.budget, hold.start_us)
    if balance is None:
        made.changes.add(period, Change(late_posted=cost))
        return cost > 0
    taken = min(cost, balance.rest)
    balance.rest -= taken
    balance.posted += taken
    made.touched[balance.lease, balance.budget] = balance
    made.changes.add(period, Change(posted=taken))
    made.changes.add(period, balance.released(taken))
    made.changes.add(period, Change(late_posted=cost - taken))
    return cost > taken


def _settle_late(
    made: Settlement, budget: Figures, event: UsageEvent, cost: int | None, now_us: int
) -> bool:
    if cost is None:
        made.unknown += 1
        return False
    if cost:
        made.late.append((budget.budget, _moment(event, now_us), cost))
    return cost > 0


def _bounds(budget: Figures, event: UsageEvent) -> bool:
    """Whether a budget counts an event that was not held of it: what began before it was made, it does not."""
    return event.op_start_us >= budget.created_us and budget.applies_to(
        project=event.project, session=event.session, key=event.key
    )


def _moment(event: UsageEvent, now_us: int) -> int:
    """When it counts: at its start, or now where a clock was so far off that its start says nothing."""
    early_us = now_us - limits.EVENT_AGE_S_MAX * 1_000_000
    late_us = now_us + limits.EVENT_AHEAD_S_MAX * 1_000_000
    return event.op_start_us if early_us <= event.op_start_us <= late_us else now_us


def _cost(unit: str, event: UsageEvent, prices: Callable[[str], PriceList]) -> int | None:
    """What an event costs; None = nobody knows: its counts, or a price, or the right currency, is missing."""
    counts = event.counts
    if counts is None:
        return None
    if unit == TOKENS:
        return counts.total
    known = prices(event.session)
    if known.currency != unit:
        return None
    return _cost_in_money(counts, event, known)


def _cost_in_money(counts: Counts, event: UsageEvent, known: PriceList) -> int | None:
    now = {
        name: known.at(event.model, name, event.op_start_us)
        for name in TOKEN_TYPES
        if getattr(counts, name)
    }
    priced = {name: price for name, price in now.items() if price is not None}
    return cost_of("", counts, priced) if len(priced) == len(now) else None
