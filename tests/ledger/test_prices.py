"""Price books: chosen by the start of the operation, never changed, never guessed."""

from typing import Any

import pytest

from gristmill_contracts.errors import ConflictError, InvalidRequestError
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger.database import Database
from gristmill_ledger.prices import PriceList, load_prices, put_price_book
from gristmill_testing.ledger import START_US, make_event
from gristmill_testing.ledger_store import post, register, stored_rows, usage


def book_of(
    micros: int, *, start_us: int = 0, model: str = "*", name: str = "own", currency: str = "USD"
) -> PriceBook:
    prices = [Price(model=model, token_type=t, micros_per_mtok=micros) for t in TOKEN_TYPES]
    return PriceBook(name=name, currency=currency, effective_from_us=start_us, prices=prices)


def put(database: Database, book: PriceBook) -> None:
    database.write_now(lambda connection: put_price_book(connection, book.name, book))


@pytest.mark.parametrize(
    ("offset_us", "micros"), [(-1, 3), (0, 5), (1, 5), (999, 5), (1000, 7), (1001, 7)]
)
def test_the_price_in_force_at_the_start_is_charged(
    database: Database, offset_us: int, micros: int
) -> None:
    put(database, book_of(3))
    put(database, book_of(5, start_us=START_US))
    put(database, book_of(7, start_us=START_US + 1000))
    register(database)
    start_us = START_US + offset_us
    # It ends after the next price began: the start alone decides.
    post(database, [make_event(1, counts=Counts(train=10), op_start_us=start_us,
                               op_end_us=start_us + 5000)])  # fmt: skip
    assert usage(database, "own")["rows"][0]["cost_pico"] == 10 * micros


def test_one_row_of_usage_may_hold_several_prices(database: Database) -> None:
    put(database, book_of(3))
    put(database, book_of(5, start_us=START_US + 2))
    put(database, book_of(100, model="large", start_us=START_US))
    register(database)
    post(database, [make_event(n, counts=Counts(sample=1)) for n in (1, 2, 3)]
         + [make_event(4, model="large", counts=Counts(sample=1))])  # fmt: skip
    (row,) = usage(database, "own")["rows"]
    assert row["cost_pico"] == 3 + 5 + 5 + 100


def test_a_models_own_price_goes_before_the_price_of_any_model() -> None:
    rows = {("*", "train"): [(0, 1), (20, 2)], ("tiny", "train"): [(10, 9)]}
    prices = PriceList(book="b", currency="USD", rows=rows)
    found = [prices.at("tiny", "train", start) for start in (-1, 0, 9, 10, 25)]
    assert found == [None, 1, 1, 9, 9]
    assert [prices.at("other", "train", start) for start in (0, 19, 20)] == [1, 1, 2]
    assert prices.at("tiny", "sample", 50) is None


def test_f14_a_cached_rate_is_used_for_cached_tokens(database: Database) -> None:
    book = book_of(1_000)
    book.prices[1].micros_per_mtok = 10
    put(database, book)
    register(database)
    post(database, [make_event(1, counts=Counts(prefill=10, cached_prefill=90))])
    assert usage(database, "own")["rows"][0]["cost_pico"] == 10 * 1_000 + 90 * 10


def test_f14_a_missing_rate_is_refused_and_never_zero(database: Database) -> None:
    book = book_of(1)
    book.prices.pop(1)
    with pytest.raises(InvalidRequestError, match="no cached_prefill price"):
        put(database, book)
    assert [row for row in stored_rows(database, "price") if row["book"] == "own"] == []


def test_one_rate_may_change_where_the_others_are_known(database: Database) -> None:
    put(database, book_of(1))
    book = book_of(2, start_us=50)
    book.prices = book.prices[:1]
    put(database, book)
    prices = database.read_now(lambda connection: load_prices(connection, "own"))
    assert [prices.at("*", name, 50) for name in TOKEN_TYPES] == [2, 1, 1, 1]


def test_the_same_book_again_changes_nothing(database: Database) -> None:
    put(database, book_of(1))
    before = stored_rows(database, "price")
    put(database, book_of(1))
    assert stored_rows(database, "price") == before


def test_a_recorded_price_never_changes(database: Database) -> None:
    put(database, book_of(1))
    with pytest.raises(ConflictError, match="recorded at 1 micros, not 2"):
        put(database, book_of(2))


def test_a_book_keeps_its_currency(database: Database) -> None:
    put(database, book_of(1))
    with pytest.raises(ConflictError, match="in USD, not EUR"):
        put(database, book_of(1, currency="EUR", start_us=9))


def broken(**changes: Any) -> PriceBook:
    """A good book but for one field."""
    book = book_of(1)
    for name, value in changes.items():
        holder = book if hasattr(book, name) else book.prices[0]
        setattr(holder, name, value)
    return book


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micros_per_mtok": -1}, "price of [*] prefill is -1"),
        ({"micros_per_mtok": 2**63}, "price of"),
        ({"token_type": "gold"}, "'gold'"),
        ({"token_type": "train"}, "priced twice"),
        ({"model": ""}, "price model is empty"),
        ({"currency": "usd"}, "ISO 4217"),
        ({"currency": "EURO"}, "ISO 4217"),
        ({"effective_from_us": -5}, "effective_from_us is -5"),
        ({"prices": []}, "has 0 prices"),
    ],
)
def test_a_bad_book_is_refused_whole(
    database: Database, changes: dict[str, Any], message: str
) -> None:
    before = stored_rows(database, "price")
    with pytest.raises(InvalidRequestError, match=message):
        put(database, broken(**changes))
    assert stored_rows(database, "price") == before


def test_a_new_ledger_has_example_prices_for_every_token_type(database: Database) -> None:
    prices = database.read_now(lambda connection: load_prices(connection, "default"))
    assert prices.currency == "USD"
    assert all((prices.at("any model", name, 0) or 0) > 0 for name in TOKEN_TYPES)
