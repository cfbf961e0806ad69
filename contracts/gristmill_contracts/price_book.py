"""A price book as it is sent to the ledger: prices of one currency, from one moment on."""

import msgspec


class Price(msgspec.Struct, kw_only=True):
    """`model` "*" prices every model without a row of its own."""

    model: str
    token_type: str
    micros_per_mtok: int


class PriceBook(msgspec.Struct, kw_only=True):
    name: str
    currency: str
    effective_from_us: int
    prices: list[Price]
