"""The RateCard resource: prices, immutable once made."""

from typing import Literal

from pydantic import Field

from gristmill_contracts.resources import Condition, Model, Resource, TimeUs
from gristmill_contracts.usage import TokenType


class RatePrice(Model):
    """The price of one token type of one model."""

    model: str = Field(max_length=63, pattern=r"^(\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$")
    """Name of the BaseModel; * = every model without a row of its own."""
    meter: TokenType
    price: str = Field(max_length=16, pattern=r"^[0-9]{1,9}(\.[0-9]{1,6})?$")
    """Money for unitTokens tokens; at most six decimals, so that rating is exact."""


class RateCardSpec(Model):
    currency: str = Field(pattern=r"^[A-Z]{3}$")
    """ISO 4217 code."""
    unit_tokens: Literal[1_000_000] = 1_000_000
    """What a price is for."""
    prices: list[RatePrice] = Field(min_length=1, max_length=1024)
    effective_from_us: TimeUs = Field(alias="effectiveFrom")
    """Operations that began before this have other prices."""


class RateCardStatus(Model):
    observed_generation: int = 0
    conditions: list[Condition] = Field(default_factory=list, max_length=16)


class RateCard(Resource):
    """Prices of tokens. A new price is a new RateCard."""

    kind: Literal["RateCard"] = "RateCard"
    spec: RateCardSpec
    status: RateCardStatus = Field(default_factory=RateCardStatus)
