"""Leases for several requests at once: what each may hold, as if it came alone. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill_contracts.budgets import TOKENS, Denied, TakeLease
from gristmill_contracts.units import format_pico
from gristmill_ledger.budgets.decide import (
    Ask,
    Figures,
    Grant,
    Refusal,
    grant,
    usable_until_us,
    worst_prices,
)
from gristmill_ledger.budgets.periods import FOR_EVER_US
from gristmill_ledger.prices import PriceList


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request with what the ledger knows of its session."""

    request: TakeLease
    lease: str
    tenant: str
    project: str
    prices: PriceList | None
    """None where no budget of the tenant is in money."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What becomes of one request. Without grants and refusal no budget applies to it."""

    asked: Asked
    grants: list[Grant]
    refusal: Refusal | None
    prices: dict[str, int]
    usable_until_us: int


def decide_all(
    requests: Sequence[Asked], figures: dict[str, list[Figures]], now_us: int
) -> list[Decided]:
    """One after the other, each with what the ones before it left.

    figures: of each tenant, in id order.
    """
    left = {each.budget: each for of_tenant in figures.values() for each in of_tenant}
    decided = []
    for asked in requests:
        applicable = [
            left[each.budget]
            for each in figures.get(asked.tenant, [])
            if each.applies_to(
                project=asked.project, session=asked.request.session, key=asked.request.key
            )
        ]
        decision = _decide(asked, applicable, now_us)
        for each in decision.grants:
            left[each.figures.budget] = each.figures.with_reserved(each.amount)
        decided.append(decision)
    return decided


def _decide(asked: Asked, applicable: list[Figures], now_us: int) -> Decided:
    request = asked.request
    until_us = usable_until_us(applicable, now_us)
    prices = None
    if asked.prices is not None:
        prices = worst_prices(asked.prices, request.model, now_us, until_us)
    ask = Ask(
        need=request.need,
        least=request.least,
        want=request.want,
        currency=None if asked.prices is None else asked.prices.currency,
        prices=prices,
    )
    decision = grant(applicable, ask)
    in_money = any(each.unit != TOKENS for each in applicable)
    return Decided(
        asked=asked,
        grants=[] if isinstance(decision, Refusal) else decision,
        refusal=decision if isinstance(decision, Refusal) else None,
        prices=prices if in_money and prices is not None else {},
        usable_until_us=until_us,
    )


def totals(decided: Sequence[Decided]) -> list[Grant]:
    """What is to be held of each budget for all of them together, in id order."""
    sums: dict[str, Grant] = {}
    for decision in decided:
        for each in decision.grants:
            known = sums.get(each.figures.budget, Grant(each.figures, 0, 0))
            sums[each.figures.budget] = known._replace(amount=known.amount + each.amount)
    return [sums[budget] for budget in sorted(sums)]


def denied(refusal: Refusal, asked: Asked, version: int) -> Denied:
    """The answer to a meter whose session must wait."""
    figures = refusal.figures
    return Denied(
        budget=figures.budget,
        unit=figures.unit,
        limit=figures.limit,
        posted=figures.posted + figures.late_posted,
        reserved=figures.reserved + figures.suspense,
        wanted=refusal.wanted,
        resets_at_us=None if figures.end_us == FOR_EVER_US else figures.end_us,
        reason=refusal.reason,
        message=_message(refusal, asked),
        version=version,
    )


def _message(refusal: Refusal, asked: Asked) -> str:
    figures = refusal.figures
    if refusal.reason == "unpriced":
        book = "" if asked.prices is None else asked.prices.book
        return (
            f"budget {figures.budget} is in {figures.unit}, and model {asked.request.model!r} has no price "
            f"in price book {book!r}; add its prices, or use a budget in tokens"
        )
    if refusal.reason == "currency":
        currency = None if asked.prices is None else asked.prices.currency
        return (
            f"budget {figures.budget} is in {figures.unit}, but the session is priced in {currency}; use "
            "one currency for both"
        )
    return (
        f"budget {figures.budget} has {show(figures.unit, max(0, figures.left))} left of "
        f"{show(figures.unit, figures.limit)}, and the next operation may cost "
        f"{show(figures.unit, refusal.wanted)}; raise the budget, or wait for what is held to be returned"
    )


def show(unit: str, amount: int) -> str:
    """An amount for people."""
    return f"{amount} tokens" if unit == TOKENS else f"{format_pico(amount)} {unit}"
