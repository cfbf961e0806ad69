"""Which prices were in force for an operation, as a `rate`: a set of price rows that is named once.

Pure but for `load_rates` and `Rates.identify`, which writes a rate on its first use.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from sqlalchemy import Connection, func, select

from gristmill_contracts.units import amount_pico, now_us
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger.counters import lock_counter, set_counter
from gristmill_ledger.prices import ANY_MODEL, PriceList, load_prices
from gristmill_ledger.schema import rating as tables

UNRATED: Final = 0
"""In place of a rate: not billed, or not rated yet."""
BEFORE_ALL: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRow:
    """A row of `price`, without its book and token type."""

    model: str
    effective_from_us: int
    micros_per_mtok: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Prices that were in force together. A token type without a price is not in `prices`."""

    book: str
    currency: str | None
    prices: tuple[tuple[str, PriceRow], ...]

    @property
    def digest(self) -> bytes:
        rows = [
            (name, row.model, row.effective_from_us, row.micros_per_mtok)
            for name, row in self.prices
        ]
        return hashlib.sha256(msgspec.msgpack.encode((self.book, self.currency, rows))).digest()

    def price(self, token_type: str) -> PriceRow | None:
        return next((row for name, row in self.prices if name == token_type), None)

    def amount(self, counts: Counts | None) -> int | None:
        """Pico-units, exact; None where the usage is unknown or one of its tokens has no price."""
        if counts is None:
            return None
        return _amount([getattr(counts, name) for name in TOKEN_TYPES], self.micros)

    @property
    def micros(self) -> list[int | None]:
        """Micro-units per 1,000,000 tokens of each token type."""
        by_type = {name: row.micros_per_mtok for name, row in self.prices}
        return [by_type.get(name) for name in TOKEN_TYPES]


def _amount(tokens: Sequence[int | None], micros: Sequence[int | None]) -> int | None:
    total = 0
    for count, price in zip(tokens, micros, strict=True):
        if count is None:
            return None
        if count:
            if price is None:
                return None
            total += amount_pico(count, price)
    return total


def rate_at(prices: PriceList, model: str, start_us: int) -> Rate:
    """The prices of an operation that began at `start_us`: the model's own row, else that of any model."""
    found = []
    for name in TOKEN_TYPES:
        for of in (model, ANY_MODEL):
            rows = prices.rows.get((of, name), [])
            index = bisect_right(rows, start_us, key=lambda row: row[0])
            if index:
                from_us, micros = rows[index - 1]
                row = PriceRow(model=of, effective_from_us=from_us, micros_per_mtok=micros)
                found.append((name, row))
                break
    return Rate(book=prices.book, currency=prices.currency, prices=tuple(found))


def epochs(prices: PriceList) -> list[int]:
    """When any price of the book begins, ascending: between two of them nothing changes."""
    return sorted({start for rows in prices.rows.values() for start, _micros in rows})


@dataclass(slots=True, kw_only=True)
class Rates:
    """Rates and books as one transaction sees them, each read once."""

    connection: Connection
    known: dict[int, Rate]
    ids: dict[bytes, int]
    _lists: dict[str, tuple[PriceList, list[int]]] = field(default_factory=dict)
    _found: dict[tuple[str, str, int], Rate] = field(default_factory=dict)
    _named: dict[tuple[str, str, int], int] = field(default_factory=dict)
    _micros: dict[int, list[int | None]] = field(default_factory=dict)

    @property
    def incomplete(self) -> set[int]:
        """Those that lack a price."""
        whole = len(TOKEN_TYPES)
        return {number for number, rate in self.known.items() if len(rate.prices) < whole}

    def prices(self, book: str) -> PriceList:
        return self._list(book)[0]

    def epoch(self, book: str, start_us: int) -> int:
        """The newest start of any price of the book at `start_us`."""
        starts = self._list(book)[1]
        index = bisect_right(starts, start_us)
        return starts[index - 1] if index else BEFORE_ALL

    def epochs_within(self, book: str, from_us: int, until_us: int) -> list[int]:
        """One moment of every stretch of [from_us, until_us) in which no price changes."""
        starts = self._list(book)[1]
        return [from_us, *(start for start in starts if from_us < start < until_us)]

    def at(self, book: str, model: str, start_us: int) -> Rate:
        key = (book, model, self.epoch(book, start_us))
        if key not in self._found:
            self._found[key] = rate_at(self._list(book)[0], model, start_us)
        return self._found[key]

    def identify(self, book: str, model: str, start_us: int) -> int:
        """The id of the rate of an operation; a new rate is written."""
        key = (book, model, self.epoch(book, start_us))
        if key not in self._named:
            self._named[key] = self._id_of(self.at(book, model, start_us))
        return self._named[key]

    def amount(self, number: int, tokens: Sequence[int | None]) -> int | None:
        """As `Rate.amount`, of tokens in the order of TOKEN_TYPES."""
        if number not in self._micros:
            self._micros[number] = self.known[number].micros
        return _amount(tokens, self._micros[number])

    def _list(self, book: str) -> tuple[PriceList, list[int]]:
        if book not in self._lists:
            prices = load_prices(self.connection, book)
            self._lists[book] = (prices, epochs(prices))
        return self._lists[book]

    def _id_of(self, rate: Rate) -> int:
        digest = rate.digest
        if digest not in self.ids:
            last = lock_counter(self.connection, "rate")
            # Whoever held the lock before may have written the same.
            self.known.update(_read(self.connection, above=max(self.known, default=0)))
            self.ids.update({each.digest: number for number, each in self.known.items()})
            if digest not in self.ids:
                self._write(last + 1, rate, digest)
        return self.ids[digest]

    def _write(self, number: int, rate: Rate, digest: bytes) -> None:
        connection = self.connection
        set_counter(connection, "rate", number)
        values = {"id": number, "digest": digest, "book": rate.book, "created_us": now_us()}
        connection.execute(tables.rate.insert().values(**values, currency=rate.currency or ""))
        rows = [
            {
                "rate": number,
                "token_type": name,
                "model": row.model,
                "effective_from_us": row.effective_from_us,
                "micros_per_mtok": row.micros_per_mtok,
            }
            for name, row in rate.prices
        ]
        if rows:
            connection.execute(tables.rate_price.insert(), rows)
        self.known[number], self.ids[digest] = rate, number


def load_rates(connection: Connection) -> Rates:
    """All rates that there are: a few for each change of prices."""
    known = _read(connection, above=0)
    ids = {rate.digest: number for number, rate in known.items()}
    return Rates(connection=connection, known=known, ids=ids)


def _read(connection: Connection, *, above: int) -> dict[int, Rate]:
    rate, price = tables.rate.c, tables.rate_price.c
    prices: dict[int, dict[str, PriceRow]] = {}
    for row in connection.execute(select(tables.rate_price).where(price.rate > above)):
        prices.setdefault(row.rate, {})[row.token_type] = PriceRow(
            model=row.model,
            effective_from_us=row.effective_from_us,
            micros_per_mtok=row.micros_per_mtok,
        )
    return {
        row.id: Rate(
            book=row.book,
            currency=row.currency or None,
            prices=tuple(
                (name, prices[row.id][name])
                for name in TOKEN_TYPES
                if name in prices.get(row.id, {})
            ),
        )
        for row in connection.execute(select(tables.rate).where(rate.id > above))
    }


def newest_rate(connection: Connection) -> int:
    """The highest id: rates never change, so those up to it may be kept in memory."""
    found: int = connection.execute(
        select(func.coalesce(func.max(tables.rate.c.id), 0))
    ).scalar_one()
    return found
