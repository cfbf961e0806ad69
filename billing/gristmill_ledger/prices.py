"""Price books: append-only rows with effective dates, and the choice among them.

A price is chosen by (model, token type) and the time the operation started: the newest row of the
model itself, else of "*". No row is no price, never 0.
"""

import json
import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import msgspec
from sqlalchemy import Connection, bindparam, func, select

from gristmill_contracts import limits
from gristmill_contracts.errors import ConflictError, ForbiddenError, InvalidRequestError
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.units import now_us
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger import checks, schema
from gristmill_ledger.database import insert_or_skip

ANY_MODEL: Final = "*"
CURRENCY: Final = re.compile("[A-Z]{3}")

_CURRENCY: Final = select(schema.price_book.c.currency).where(
    schema.price_book.c.name == bindparam("key")
)
_ROWS: Final = (
    select(
        schema.price.c.model,
        schema.price.c.token_type,
        schema.price.c.effective_from_us,
        schema.price.c.micros_per_mtok,
    )
    .where(schema.price.c.book == bindparam("key"))
    .order_by(schema.price.c.effective_from_us)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """A price book in memory. `rows[model, token_type]` is ascending by effective_from_us."""

    book: str
    currency: str | None
    """None where there is no such book."""
    rows: dict[tuple[str, str], list[tuple[int, int]]]

    def at(self, model: str, token_type: str, start_us: int) -> int | None:
        """Micro-units per 1,000,000 tokens for an operation that began at `start_us`, or None."""
        for name in (model, ANY_MODEL):
            row = _newest(self.rows.get((name, token_type), []), start_us)
            if row is not None:
                return row
        return None

    def has(self, model: str, token_type: str, start_us: int) -> bool:
        """Whether `at` would find a price, without looking which."""
        for name in (model, ANY_MODEL):
            rows = self.rows.get((name, token_type))
            if rows and rows[0][0] <= start_us:
                return True
        return False


def _newest(rows: list[tuple[int, int]], start_us: int) -> int | None:
    index = bisect_right(rows, start_us, key=lambda row: row[0])
    return rows[index - 1][1] if index else None


def load_prices(connection: Connection, book: str) -> PriceList:
    """The whole of a price book; empty if there is none of that name."""
    currency = connection.execute(_CURRENCY, {"key": book}).scalar_one_or_none()
    rows: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for model, token_type, start_us, micros in connection.execute(_ROWS, {"key": book}):
        rows[model, token_type].append((start_us, micros))
    return PriceList(book=book, currency=currency, rows=dict(rows))


def put_price_book(
    connection: Connection, name: str, book: PriceBook, *, written_by: str = ""
) -> None:
    """Add the rows of `book`. The same rows again change nothing.

    `written_by`: the service that asks. A book is changed by the service that made it alone: those of
    RateCards by the operator, so that a card and its prices agree.

    Raises InvalidRequestError for a bad row or a model left without one of the token types,
    ConflictError if a row with that start is recorded at another price, or in another currency.
    """
    check_price_book(name, book)
    if insert_or_skip(
        connection,
        schema.price_book,
        name=name,
        currency=book.currency,
        created_us=now_us(),
        written_by=written_by,
    ):
        known = PriceList(book=name, currency=book.currency, rows={})
    else:
        # The row lock makes two updates of one book take turns on PostgreSQL.
        owner = connection.execute(
            select(schema.price_book.c.written_by)
            .where(schema.price_book.c.name == name)
            .with_for_update()
        ).scalar_one()
        _check_owner(name, owner, written_by)
        known = load_prices(connection, name)
    fresh = new_rows(known, book)
    values = {"book": name, "effective_from_us": book.effective_from_us, "created_us": now_us()}
    if fresh:
        connection.execute(
            schema.price.insert(), [values | msgspec.structs.asdict(row) for row in fresh]
        )


def _check_owner(name: str, owner: str, written_by: str) -> None:
    if owner and written_by and owner != written_by:
        raise ForbiddenError(
            f"price book {name!r} is written by the {owner}, not by the {written_by}; make a new "
            "RateCard for new prices, or use another name"
        )


def check_price_book(name: str, book: PriceBook) -> None:
    """Raise InvalidRequestError naming the first row that cannot be one."""
    if book.name != name:
        raise InvalidRequestError(f"price book {book.name!r} was put at {name!r}; use one name")
    checks.text("price book name", name)
    if not CURRENCY.fullmatch(book.currency):
        raise InvalidRequestError(f"currency {book.currency!r} is no ISO 4217 code such as USD")
    if not book.prices or len(book.prices) > limits.PRICES_PER_BOOK_MAX:
        raise InvalidRequestError(
            f"price book {name!r} has {len(book.prices)} prices; send 1 to "
            f"{limits.PRICES_PER_BOOK_MAX}"
        )
    checks.quantity("effective_from_us", book.effective_from_us)
    seen: set[tuple[str, str]] = set()
    for price in book.prices:
        checks.text("price model", price.model)
        checks.quantity(f"price of {price.model} {price.token_type}", price.micros_per_mtok)
        if price.token_type not in TOKEN_TYPES:
            raise InvalidRequestError(
                f"token type {price.token_type!r} of {price.model} is none of {TOKEN_TYPES}"
            )
        if (price.model, price.token_type) in seen:
            raise InvalidRequestError(
                f"{price.model} {price.token_type} is priced twice in one book; keep one row"
            )
        seen.add((price.model, price.token_type))


def new_rows(known: PriceList, book: PriceBook) -> list[Price]:
    """The rows of `book` that `known` lacks. Pure; raises as `put_price_book` says."""
    if known.currency != book.currency:
        raise ConflictError(
            f"price book {book.name!r} is in {known.currency}, not {book.currency}; "
            "make another book for another currency"
        )
    start = book.effective_from_us
    fresh = []
    for price in book.prices:
        recorded = dict(known.rows.get((price.model, price.token_type), []))
        if start not in recorded:
            fresh.append(price)
        elif recorded[start] != price.micros_per_mtok:
            raise ConflictError(
                f"{price.model} {price.token_type} from {start} is recorded at {recorded[start]} "
                f"micros, not {price.micros_per_mtok}; prices never change: choose a later start"
            )
    sent = {(price.model, price.token_type) for price in book.prices}
    for model in sorted({price.model for price in book.prices}):
        for token_type in TOKEN_TYPES:
            key = (model, token_type)
            if key not in sent and _newest(known.rows.get(key, []), start) is None:
                raise InvalidRequestError(
                    f"{model} has no {token_type} price in book {book.name!r} at {start}; "
                    "a model is priced for all token types: add the row, 0 if it is free"
                )
    return fresh


def seed_example_prices(connection: Connection) -> None:
    """Give a ledger without any price book the documented example prices."""
    if connection.execute(select(func.count()).select_from(schema.price_book)).scalar_one():
        return
    fields = json.loads(files("gristmill_ledger").joinpath("example_prices.json").read_text())
    book = msgspec.convert(fields, PriceBook)
    put_price_book(connection, book.name, book)
