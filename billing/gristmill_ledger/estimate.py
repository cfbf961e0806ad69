"""Answers GET /v1/estimate: what given numbers of tokens would cost by a price book, before they are run.

The answer is JSON:

    {"price_book", "model", "at", "at_us", "currency": "USD" | null,
     "lines": [{"token_type", "tokens", "price": {"model", "effective_from_us", "micros_per_mtok"} | null,
                "amount_pico": n | null}],
     "total": n, "amount_pico": n | null, "amount": "0.000123" | null, "reason": text | null}

Exact for these numbers at that time; whether a run will have these numbers, nobody knows before it ran.
`amount` is null, never 0, where a token type has no price.
"""

from typing import Any

from sqlalchemy import Connection

from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.units import amount_pico
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger.calendars import iso_text
from gristmill_ledger.prices import load_prices
from gristmill_ledger.rates import rate_at
from gristmill_ledger.usage import decimal_text

Json = dict[str, Any]  # Any: JSON


def estimate(connection: Connection, counts: Counts, *, model: str, book: str, at_us: int) -> Json:
    """Price `counts` as an operation that begins at `at_us`. Raises NotFoundError for no such book."""
    prices = load_prices(connection, book)
    if prices.currency is None:
        raise NotFoundError(f"there is no price book {book!r}; put one, or name another")
    rate = rate_at(prices, model, at_us)
    lines: list[Json] = []
    for name in TOKEN_TYPES:
        tokens, price = getattr(counts, name), rate.price(name)
        shown = None
        if price is not None:
            shown = {
                "model": price.model,
                "effective_from_us": price.effective_from_us,
                "micros_per_mtok": price.micros_per_mtok,
            }
        amount = None if price is None else amount_pico(tokens, price.micros_per_mtok)
        lines.append({"token_type": name, "tokens": tokens, "price": shown, "amount_pico": amount})
    missing = [each["token_type"] for each in lines if each["tokens"] and not each["price"]]
    amount = rate.amount(counts)
    return {
        "price_book": book,
        "model": model,
        "at": iso_text(at_us),
        "at_us": at_us,
        "currency": prices.currency,
        "lines": lines,
        "total": counts.total,
        "amount_pico": amount,
        "amount": None if amount is None else decimal_text(amount),
        "reason": f"{model} has no {', '.join(missing)} price then" if missing else None,
    }
