"""What a lease may hold of a budget, and when a threshold is told. Pure: figures in, decisions out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from gristmill_contracts import limits
from gristmill_contracts.budgets import TOKENS, Mode, Recurrence, ScopeType
from gristmill_contracts.units import amount_pico
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger.budgets.periods import FOR_EVER_US
from gristmill_ledger.prices import PriceList

AMOUNT_MAX: Final = limits.QUANTITY_MAX
PRICE_MARGIN_US: Final = limits.EVENT_AHEAD_S_MAX * 1_000_000
"""By so much may the clock of a meter, which dates operations, be off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A budget with its running period. Amounts in its unit."""

    budget: str
    scope_type: ScopeType
    scope: str
    unit: str
    mode: Mode
    recurrence: Recurrence
    time_zone: str
    created_us: int
    thresholds: tuple[int, ...]
    start_us: int
    end_us: int
    limit: int
    posted: int
    late_posted: int
    reserved: int
    suspense: int

    @property
    def left(self) -> int:
        """What is neither used nor held. Below 0 where a limit was lowered or usage came late."""
        return self.limit - self.posted - self.late_posted - self.reserved - self.suspense

    def with_reserved(self, amount: int) -> "Figures":
        return replace(self, reserved=self.reserved + amount)

    def applies_to(self, *, project: str, session: str, key: str) -> bool:
        """Whether it bounds an operation. A project or key that is not named is bounded by none."""
        named = {"tenant": self.scope, "project": project, "session": session, "key": key}
        return bool(self.scope) and named[self.scope_type] == self.scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a lease is asked for. `prices`: token type -> micros; None = the model is not priced."""

    need: Counts
    least: Counts | None
    want: Counts | None
    currency: str | None
    """Of the session's price book."""
    prices: dict[str, int] | None


class Grant(NamedTuple):
    """What is to be held of one budget."""

    figures: Figures
    amount: int
    floor: int


class Refusal(NamedTuple):
    """The first budget that has not enough left. `wanted` in its unit; 0 where that is not known."""

    figures: Figures
    wanted: int
    reason: Literal["exhausted", "unpriced", "currency"]


def cost_of(unit: str, counts: Counts, prices: dict[str, int]) -> int:
    """Tokens, or pico-units of currency. Each token type that is counted must have a price."""
    if unit == TOKENS:
        return counts.total
    return sum(
        amount_pico(count, prices[name]) for name in TOKEN_TYPES if (count := getattr(counts, name))
    )


def grant(figures: Sequence[Figures], ask: Ask) -> list[Grant] | Refusal:
    """Something of every budget, or nothing of any. Budgets in id order, which is the order of locks."""
    grants = []
    for each in figures:
        decision = _grant_one(each, ask)
        if isinstance(decision, Refusal):
            return decision
        grants.append(decision)
    return grants


def _grant_one(figures: Figures, ask: Ask) -> Grant | Refusal:
    reason = _not_measurable(figures, ask)
    if reason is not None:
        # A soft budget only watches: what it cannot measure goes on, and is told when it is posted.
        soft = figures.mode == "soft"
        return Grant(figures, 0, 0) if soft else Refusal(figures, 0, reason)
    prices = ask.prices or {}
    need = min(cost_of(figures.unit, ask.need, prices), AMOUNT_MAX)
    least = need if ask.least is None else min(need, cost_of(figures.unit, ask.least, prices))
    want = None if ask.want is None else min(cost_of(figures.unit, ask.want, prices), AMOUNT_MAX)
    amount = lease_amount(figures.left, need=need, least=least, want=want)
    if amount is not None:
        return Grant(figures, amount, need)
    if figures.mode == "hard":
        return Refusal(figures, least, "exhausted")
    return Grant(figures, min(need, max(0, AMOUNT_MAX - figures.reserved)), need)


def _not_measurable(figures: Figures, ask: Ask) -> Literal["unpriced", "currency"] | None:
    if figures.unit == TOKENS:
        return None
    if ask.currency != figures.unit:
        return "currency"
    return "unpriced" if ask.prices is None else None


def lease_amount(left: int, *, need: int, least: int, want: int | None) -> int | None:
    """How much of what is left a lease holds; None = not even `least`.

    One part in BUDGET_LEASE_SHARE, so that leases shrink toward the limit and no session starves the
    others; no more than is of use, and at least the operation that waits, as far as that is there.
    An operation that costs nothing is free even where nothing is left.
    """
    if least > max(left, 0):
        return None
    share = max(left, 0) // limits.BUDGET_LEASE_SHARE
    if want is not None:
        share = min(share, want)
    return min(max(share, need), max(left, 0))


def worst_prices(
    prices: PriceList, model: str, now_us: int, until_us: int
) -> dict[str, int] | None:
    """The highest price of each token type for operations that begin between now and `until_us`.

    Prices of some minutes before and after count too, for a meter's clock may be off. None where a
    token type has no price now.
    """
    first_us, last_us = now_us - PRICE_MARGIN_US, until_us + PRICE_MARGIN_US
    worst = {}
    for name in TOKEN_TYPES:
        now = prices.at(model, name, now_us)
        if now is None:
            return None
        starts = {row[0] for key, rows in prices.rows.items() if key[1] == name for row in rows}
        moments = [first_us, *(start for start in starts if first_us < start <= last_us)]
        found = [prices.at(model, name, moment) for moment in moments]
        worst[name] = max([now, *(price for price in found if price is not None)])
    return worst


def passed(before: int, after: int, limit: int, thresholds: Sequence[int]) -> list[int]:
    """The thresholds, in percent of the limit, that usage rose to or over on its way."""
    return [
        percent
        for percent in thresholds
        if before * 100 < limit * percent <= after * 100 and limit > 0
    ]


def usable_until_us(figures: Sequence[Figures], now_us: int) -> int:
    """When a lease taken now may be spent no more: its prices, or one of its periods, end."""
    life_us = int(limits.BUDGET_LEASE_LIFE_S_MAX * 1_000_000)
    return min([now_us + life_us, *(each.end_us for each in figures if each.end_us != FOR_EVER_US)])
