"""Integer units of tokens, money and time, and the only roundings there are.

Prices are micro-units of currency per 1,000,000 tokens. That is pico-units of currency per token,
so that rating is an exact integer product.
"""

import time
from decimal import Decimal
from typing import Final

TOKENS_PER_PRICE_UNIT: Final = 1_000_000
PICO_PER_UNIT: Final = 10**12
MICRO_PER_UNIT: Final = 10**6


def amount_pico(tokens: int, micros_per_mtok: int) -> int:
    """Cost of `tokens` in pico-units of currency. Exact: no rounding takes place."""
    return tokens * micros_per_mtok


def micros_from_decimal(text: str) -> int:
    """A decimal price in units of currency per 1,000,000 tokens, as micro-units.

    Raises ValueError if the text has more than six decimals or is no number.
    """
    try:
        value = Decimal(text)
    except ArithmeticError as error:
        raise ValueError(f"price {text!r} is not a decimal number; write it like 0.25") from error
    micros = value * MICRO_PER_UNIT
    if not value.is_finite() or micros != micros.to_integral_value():
        raise ValueError(f"price {text!r} has more than 6 decimals; round it to millionths")
    return int(micros)


def pico_from_decimal(text: str) -> int:
    """An amount in units of currency, as pico-units.

    Raises ValueError if the text has more than twelve decimals or is no number.
    """
    try:
        value = Decimal(text)
    except ArithmeticError as error:
        raise ValueError(f"amount {text!r} is not a decimal number; write it like 12.50") from error
    pico = value * PICO_PER_UNIT if value.is_finite() else Decimal("0.5")
    if pico != pico.to_integral_value():
        raise ValueError(f"amount {text!r} has more than 12 decimals; round it")
    return int(pico)


def format_pico(pico: int, decimals: int = 6) -> str:
    """Pico-units of currency as a decimal string of units, rounded half to even for display only."""
    return f"{(Decimal(pico) / PICO_PER_UNIT):.{decimals}f}"


def div_ceil(numerator: int, denominator: int) -> int:
    """Integer division rounded up. Both arguments are >= 0 and the denominator > 0."""
    return -(-numerator // denominator)


def now_us() -> int:
    """UTC wall-clock time in microseconds since 1970."""
    return time.time_ns() // 1000
