"""The RateCard resource: prices, immutable once made."""

from collections import Counter
from typing import Final, Literal

from pydantic import Field

from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.resources import (
    ClusterResource,
    Conditions,
    Count,
    CurrencyCode,
    Model,
    TimeUs,
    list_map,
)
from gristmill_contracts.units import micros_from_decimal
from gristmill_contracts.usage import TOKEN_TYPES, TokenType

PRICES_MAX: Final = 256
"""Prices on one card: 64 models. The server bounds what a rule that compares all with all may cost."""


class RatePrice(Model):
    """The price of one token type of one model."""

    model: str = Field(max_length=63, pattern=r"^(\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$")
    """Name of the BaseModel; * = every model without a row of its own."""
    meter: TokenType
    """The token type that the price is for. Every model on the card has a price for each of the four."""
    price: str = Field(max_length=16, pattern=r"^[0-9]{1,9}(\.[0-9]{1,6})?$")
    """Money for unitTokens tokens; at most six decimals, so that rating is exact."""


class RateCardSpec(Model):
    """What tokens cost. It never changes: a new price is a new RateCard."""

    currency: CurrencyCode
    """ISO 4217 code of the prices' currency, as USD."""
    unit_tokens: Literal[1_000_000] = 1_000_000
    """How many tokens a price is for."""
    prices: list[RatePrice] = Field(
        min_length=1, max_length=PRICES_MAX, json_schema_extra=list_map("model", "meter")
    )
    """One price for each model and meter; * = every model without prices of its own."""
    effective_from_us: TimeUs = Field(alias="effectiveFrom")
    """Operations that begin from then on have these prices; earlier ones are priced by another card."""


class RateCardStatus(Model):
    """What the operator saw and did. It can be rebuilt at any time."""

    observed_generation: Count = 0
    """The metadata.generation that this status is of."""
    conditions: Conditions = Field(default_factory=list)
    """Ready, and Recorded: the ledger holds the prices."""


class RateCard(ClusterResource):
    """Prices of tokens by model and token type. Sessions keep the card that they started with."""

    kind: Literal["RateCard"] = "RateCard"
    spec: RateCardSpec
    """The prices."""
    status: RateCardStatus = Field(default_factory=RateCardStatus)
    """What the operator saw and did."""


def check_prices(spec: RateCardSpec) -> None:
    """Raise ValueError unless every model on the card has each of the four prices once."""
    for model in {each.model: None for each in spec.prices}:
        counts: Counter[str] = Counter(p.meter for p in spec.prices if p.model == model)
        if any(counts[meter] != 1 for meter in TOKEN_TYPES):
            raise ValueError(
                f"spec.prices has {counts.total()} of the 4 prices of model {model!r}, or one of them twice; give "
                f"one each for {', '.join(TOKEN_TYPES)}"
            )


def price_book(card: RateCard) -> PriceBook:
    """The card as the ledger keeps it."""
    spec = card.spec
    return PriceBook(
        name=card.metadata.name,
        currency=spec.currency,
        effective_from_us=spec.effective_from_us,
        prices=[
            Price(
                model=each.model,
                token_type=each.meter,
                micros_per_mtok=micros_from_decimal(each.price),
            )
            for each in spec.prices
        ],
    )
