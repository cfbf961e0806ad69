"""What usage costs is a fact: rated once by the prices in force, and again only by a recorded run."""

from typing import Any

import pytest
from sqlalchemy import select

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger.database import Database
from gristmill_ledger.prices import put_price_book
from gristmill_ledger.rates import load_rates
from gristmill_ledger.rerating import Outcome, Rerate
from gristmill_ledger.schema import rating as tables
from gristmill_testing.ledger import START_US, make_event
from gristmill_testing.ledger_store import (
    name_session,
    post,
    rate_all,
    register,
    rerate_all,
    stored_rows,
    usage,
)

HOUR_US = 3600 * 10**6


def put(
    database: Database,
    micros: dict[str, int] | int,
    *,
    start_us: int = 0,
    model: str = "*",
    book: str = "own",
    currency: str = "USD",
) -> None:
    by_type = dict.fromkeys(TOKEN_TYPES, micros) if isinstance(micros, int) else micros
    prices = [
        Price(model=model, token_type=name, micros_per_mtok=value)
        for name, value in by_type.items()
    ]
    message = PriceBook(name=book, currency=currency, effective_from_us=start_us, prices=prices)
    database.write_now(lambda c: put_price_book(c, book, message))


def amounts(database: Database) -> list[tuple[int, int, int | None]]:
    """(seq, run, amount) of everything that was rated."""
    rows = stored_rows(database, "rated_usage")
    return [(row["seq"], row["run"], row["amount_pico"]) for row in rows]


def again(database: Database, *, dry: bool = False, **changes: Any) -> Outcome:
    request = Rerate(**({"reason": "corrected"} | changes))
    return rerate_all(database, request, "own", dry=dry)


# --- golden examples, computed by hand ------------------------------------------------------------


def test_golden_an_operation_of_every_token_type(database: Database) -> None:
    """2 USD, 0.50 USD, 8 USD and 3 USD per 1,000,000 tokens; 1 micro per 1M tokens = 1 pico a token.

    1,000 x 2,000,000 + 7,000 x 500,000 + 250 x 8,000,000 + 40 x 3,000,000
    = 2,000,000,000 + 3,500,000,000 + 2,000,000,000 + 120,000,000 = 7,620,000,000 pico = 0.00762 USD.
    """
    put(database, {"prefill": 2_000_000, "cached_prefill": 500_000, "sample": 8_000_000,
                   "train": 3_000_000})  # fmt: skip
    register(database)
    counts = Counts(prefill=1_000, cached_prefill=7_000, sample=250, train=40)
    post(database, [make_event(1, counts=counts)])
    rate_all(database, "own")
    assert amounts(database) == [(1, 0, 7_620_000_000)]
    assert usage(database, "own")["rows"][0]["cost"] == "0.007620"


def test_golden_a_price_that_changes_between_two_operations(database: Database) -> None:
    """10 tokens at 3 micros, then 10 at 5: 30 and 50 pico. The second began on the change itself."""
    put(database, 3)
    put(database, 5, start_us=START_US + 2)
    register(database)
    post(database, [make_event(n, counts=Counts(train=10)) for n in (1, 2)])
    rate_all(database, "own")
    assert amounts(database) == [(1, 0, 30), (2, 0, 50)]


def test_f54_eighty_one_rows_cost_what_their_sum_costs(database: Database) -> None:
    """81 rows of 1,234,567 tokens at 1 micro: rounded to cents each, they would be 0 or 81 cents."""
    put(database, 1_000_000)
    register(database)
    post(database, [make_event(n, counts=Counts(train=1_234_567)) for n in range(1, 82)])
    rate_all(database, "own")
    total = sum(amount or 0 for _seq, _run, amount in amounts(database))
    assert total == 81 * 1_234_567 * 1_000_000 == 99_999_927_000_000
    (row,) = usage(database, "own")["rows"]
    assert (row["cost_pico"], row["cost"]) == (total, "99.999927")


def test_f14_the_cached_rate_is_used_and_a_missing_one_is_no_amount(database: Database) -> None:
    put(database, {"prefill": 1000, "cached_prefill": 10, "sample": 1, "train": 1}, model="tiny")
    register(database)
    post(database, [
        make_event(1, counts=Counts(prefill=10, cached_prefill=90)),
        make_event(2, model="unlisted", counts=Counts(prefill=10, cached_prefill=90)),
    ])  # fmt: skip
    rate_all(database, "own")
    assert amounts(database) == [(1, 0, 10_900), (2, 0, None)]


def test_f18_unknown_usage_has_no_amount_and_zero_usage_has_zero(database: Database) -> None:
    put(database, 5)
    register(database)
    post(database, [make_event(1, counts=None), make_event(2, counts=Counts())])
    rate_all(database, "own")
    assert amounts(database) == [(1, 0, None), (2, 0, 0)]


def test_f30_attempts_are_never_rated(database: Database) -> None:
    put(database, 5)
    register(database)
    post(database, [
        make_event(1, kind="attempt", n=1, counts=Counts(train=8)),
        make_event(1, kind="attempt", n=2, counts=Counts(train=8), producer_seq=2),
        make_event(1, counts=Counts(train=8), producer_seq=3),
    ])  # fmt: skip
    rate_all(database, "own")
    assert amounts(database) == [(3, 0, 40)]
    (row,) = usage(database, "own")["rows"]
    assert (row["operations"], row["cost_pico"]) == (1, 40)


def test_f68_a_charge_is_traceable_to_its_price_rows(database: Database) -> None:
    put(database, 3)
    put(database, {"train": 7}, start_us=START_US)
    register(database)
    post(database, [make_event(1, counts=Counts(train=10, sample=1))])
    rate_all(database, "own")
    (rated,) = stored_rows(database, "rated_usage")
    prices = {
        row["token_type"]: (row["model"], row["effective_from_us"], row["micros_per_mtok"])
        for row in stored_rows(database, "rate_price")
        if row["rate"] == rated["rate"]
    }
    assert prices["train"] == ("*", START_US, 7)
    assert prices["sample"] == ("*", 0, 3)


def test_a_rate_is_written_once_and_shared(database: Database) -> None:
    put(database, 3)
    register(database)
    post(database, [make_event(n, model=f"m-{n % 5}") for n in range(1, 21)])
    rate_all(database, "own", rows_max=6)
    assert len(stored_rows(database, "rate")) == 1
    known = database.read_now(load_rates).known
    assert [rate.book for rate in known.values()] == ["own"]


# --- again ----------------------------------------------------------------------------------------


def test_a_corrected_price_adds_the_difference_and_changes_no_row(database: Database) -> None:
    put(database, 3)
    register(database)
    post(database, [make_event(n, counts=Counts(train=10)) for n in (1, 2, 3)])
    rate_all(database, "own")
    before = stored_rows(database, "rated_usage")
    put(database, 5, start_us=START_US + 2)
    assert usage(database, "own")["rows"][0]["cost_pico"] == 90
    outcome = again(database)
    assert (outcome.rows, dict(outcome.difference_pico)) == (2, {"USD": 40})
    assert [row for row in stored_rows(database, "rated_usage") if row["run"] == 0] == before
    assert amounts(database) == [(1, 0, 30), (2, 0, 30), (2, 1, 20), (3, 0, 30), (3, 1, 20)]
    for question in ({}, {"bucket": "minute"}, {"bucket": "month"}, {"group_by": "session"}):
        assert sum(row["cost_pico"] for row in usage(database, "own", **question)["rows"]) == 130
    (run,) = stored_rows(database, "rating_run")
    assert (run["id"], run["reason"]) == (1, "corrected")


def test_rating_again_finds_nothing_left(database: Database) -> None:
    put(database, 3)
    register(database)
    post(database, [make_event(1, counts=Counts(train=10))])
    rate_all(database, "own")
    put(database, 5, start_us=1)
    assert again(database).rows == 1
    before = stored_rows(database, "rated_usage")
    assert again(database).rows == 0
    assert stored_rows(database, "rated_usage") == before
    assert len(stored_rows(database, "rating_run")) == 1


def test_a_dry_run_tells_the_same_and_writes_nothing(database: Database) -> None:
    put(database, 3)
    register(database)
    post(database, [make_event(n, counts=Counts(train=10)) for n in (1, 2)])
    rate_all(database, "own")
    put(database, 2, start_us=1)
    before = [stored_rows(database, name) for name in ("rated_usage", "rating_run", "rate")]
    told = again(database, dry=True)
    assert [stored_rows(database, name) for name in ("rated_usage", "rating_run", "rate")] == before
    done = again(database)
    assert told == done
    assert dict(done.difference_pico) == {"USD": -20}


def test_usage_without_a_price_gets_its_whole_amount_once_there_is_one(database: Database) -> None:
    put(database, 3, model="other")
    register(database)
    post(database, [make_event(1, counts=Counts(train=10)), make_event(2, counts=None)])
    rate_all(database, "own")
    (row,) = usage(database, "own")["rows"]
    assert (row["cost_pico"], row["cost_reason"]) == (
        None,
        "no price at the time of the operation: tiny train",
    )
    put(database, 4, model="tiny", start_us=0)
    outcome = again(database)
    assert (outcome.rows, outcome.unpriced, dict(outcome.difference_pico)) == (2, 1, {"USD": 40})
    assert amounts(database) == [(1, 0, None), (1, 1, 40), (2, 0, None), (2, 1, None)]
    (row,) = usage(database, "own")["rows"]
    assert (row["cost_pico"], row["operations_unknown"]) == (40, 1)


def test_only_what_is_asked_for_is_rated_again(database: Database) -> None:
    put(database, 3)
    for tenant in ("acme", "bolt"):
        register(database, tenant, tenant=tenant, session=f"s-{tenant}")
        post(database, [
            make_event(n, tenant=tenant, session=f"s-{tenant}", counts=Counts(train=10),
                       op_start_us=START_US + n * HOUR_US)
            for n in (1, 2, 3)
        ], tenant)  # fmt: skip
    rate_all(database, "own")
    put(database, 5, start_us=1)
    since, until = START_US + 2 * HOUR_US, START_US + 3 * HOUR_US
    outcome = again(database, tenant="bolt", since_us=since, until_us=until)
    assert dict(outcome.tenants) == {("bolt", "USD"): 20}
    assert (outcome.rows, outcome.hours) == (1, 1)
    assert again(database, book="another").rows == 0
    assert again(database, book="own").rows == 5


def test_another_currency_is_left_as_it_is_and_told(database: Database) -> None:
    put(database, 3)
    put(database, 3, book="euro", currency="EUR")
    register(database)
    post(database, [make_event(1, counts=Counts(train=10))])
    rate_all(database, "own")
    name_session(database, "s-1", "first", price_book="euro")
    outcome = again(database)
    assert (outcome.rows, outcome.other_currency) == (0, 1)
    assert amounts(database) == [(1, 0, 30)]


def test_what_was_rated_again_sums_up_as_before(database: Database) -> None:
    """The rollups under the old rate are gone, those under the new one hold the same rows."""
    put(database, 3)
    register(database)
    post(database, [make_event(n, counts=Counts(train=n)) for n in range(1, 30)])
    rate_all(database, "own")
    put(database, 5, start_us=START_US + 11)
    put(database, 9, start_us=START_US + 20, model="tiny")
    again(database)
    for table in (
        "usage_rollup_hourly",
        "usage_rollup_monthly",
        "usage_total_daily",
        "usage_total_monthly",
    ):
        rows = stored_rows(database, table)
        assert sorted((row["events"], row["train"]) for row in rows) == [
            (9, sum(range(11, 20))),
            (10, sum(range(1, 11))),
            (10, sum(range(20, 30))),
        ]
    found = database.read_now(
        lambda c: c.execute(select(tables.rated_usage.c.amount_pico)).scalars().all()
    )
    expected = 3 * sum(range(1, 11)) + 5 * sum(range(11, 20)) + 9 * sum(range(20, 30))
    assert sum(found) == usage(database, "own")["rows"][0]["cost_pico"] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reason": ""}, "reason is empty"),
        ({"tenant": "a\0"}, "NUL"),
        ({"since_us": 5, "until_us": 5}, "not before until"),
        ({"since_us": 2**63}, "since_us"),
    ],
)
def test_a_bad_run_is_refused(database: Database, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        again(database, **changes)
    assert stored_rows(database, "rating_run") == []
