"""The usage API adds up exactly what was stored, in whatever way it is asked."""

import random
from collections import defaultdict
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import OPERATION_KINDS, TOKEN_TYPES, Counts, UsageEvent
from gristmill_ledger.calendars import BUCKETS, SIZES_US
from gristmill_ledger.database import Database
from gristmill_ledger.prices import put_price_book
from gristmill_ledger.usage import decimal_text
from gristmill_ledger.usage_query import GROUP_KEYS
from gristmill_testing.ledger import START_US, make_event
from gristmill_testing.ledger_store import name_session, post, register, usage

HOUR_US = SIZES_US["hour"]
EDGES = (0, 1, 2**31, 2**53 - 1, 2**53, 2**53 + 1, 2**62)
PRICES = {"prefill": 100_000, "cached_prefill": 10_000, "sample": 400_000, "train": 600_000}


def random_events(seed: int, size: int) -> list[UsageEvent]:
    """Events of two sessions over three hours, edge quantities among them."""
    dice = random.Random(seed)
    return [
        make_event(
            number,
            session=dice.choice(("s-1", "s-2")),
            model=dice.choice(("tiny", "large")),
            project=dice.choice(("", "rl")),
            key=dice.choice(("", "AKIA1")),
            operation=dice.choice(OPERATION_KINDS[:2]),
            kind=dice.choice(("usage", "usage", "attempt")),
            counts=Counts(
                **{name: dice.choice((*EDGES, dice.randrange(5000))) for name in TOKEN_TYPES}
            )
            if dice.random() < 0.9
            else None,
            op_start_us=START_US + dice.randrange(3 * HOUR_US),
        )
        for number in range(1, size + 1)
    ]


def key_of(event: UsageEvent, group_by: tuple[str, ...], bucket: str) -> tuple[object, ...]:
    start = event.op_start_us - event.op_start_us % SIZES_US[bucket] if bucket != "none" else 0
    return (start, *(getattr(event, name) for name in group_by))


def expected_sums(
    events: list[UsageEvent], group_by: tuple[str, ...], bucket: str
) -> dict[tuple[object, ...], dict[str, int]]:
    """The same sums, taken from the facts in plain Python."""
    sums: dict[tuple[object, ...], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for event in events:
        if event.kind != "usage":
            continue
        group = sums[key_of(event, group_by, bucket)]
        group["operations"] += 1
        group["operations_unknown"] += event.counts is None
        for name in TOKEN_TYPES:
            group[name] += getattr(event.counts, name) if event.counts else 0
    return sums


def rows_by_key(
    rows: list[dict[str, Any]], group_by: tuple[str, ...]
) -> dict[tuple[object, ...], dict[str, Any]]:
    return {(row.get("bucket_start_us", 0), *(row[name] for name in group_by)): row for row in rows}


@pytest.mark.parametrize("bucket", ["none", "hour"])
def test_sums_equal_the_facts_for_every_group_by(database: Database, bucket: str) -> None:
    events = random_events(seed=7, size=120)
    register(database)
    post(database, events)
    plain = [name for name in GROUP_KEYS if name != "token_type"]
    for size in range(len(plain) + 1):
        for group_by in combinations(plain, size):
            answer = usage(database, group_by=",".join(group_by), bucket=bucket)
            expected = expected_sums(events, group_by, bucket)
            found = rows_by_key(answer["rows"], group_by)
            assert found.keys() == expected.keys(), group_by
            for key, row in found.items():
                for name, value in expected[key].items():
                    assert (row[name] or 0) == value, (group_by, key, name)
                assert (row["total"] or 0) == sum(expected[key][name] for name in TOKEN_TYPES)
                cost = sum(expected[key][name] * PRICES[name] for name in TOKEN_TYPES)
                assert (row["cost_pico"] or 0) == cost


def test_token_type_rows_are_the_columns_of_the_plain_row(database: Database) -> None:
    events = random_events(seed=8, size=60)
    register(database)
    post(database, events)
    (plain,) = usage(database)["rows"]
    typed = {row["token_type"]: row for row in usage(database, group_by="token_type")["rows"]}
    assert tuple(typed) == TOKEN_TYPES
    for name in TOKEN_TYPES:
        assert typed[name][name] == typed[name]["total"] == plain[name]
        assert usage(database, token_type=name)["rows"][0]["total"] == plain[name]
        ran = [e for e in events if e.kind == "usage" and e.counts and getattr(e.counts, name)]
        assert typed[name]["operations"] == len(ran)
    assert sum(row["cost_pico"] for row in typed.values()) == plain["cost_pico"]


@settings(max_examples=25)
@given(
    group_by=st.lists(st.sampled_from(GROUP_KEYS), unique=True, max_size=4),
    bucket=st.sampled_from(BUCKETS),
    limit=st.integers(1, 7),
    include_attempts=st.booleans(),
)
def test_pages_of_any_size_are_the_whole_answer(
    filled: Database, group_by: list[str], bucket: str, limit: int, include_attempts: bool
) -> None:
    question: dict[str, str | int] = {
        "group_by": ",".join(group_by),
        "bucket": bucket,
        "include_attempts": str(include_attempts).lower(),
    }
    whole = usage(filled, **question)
    assert whole["next_cursor"] is None
    rows: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = usage(filled, **question, limit=limit, **({"cursor": cursor} if cursor else {}))
        assert 0 < len(page["rows"]) <= limit
        rows += page["rows"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert rows == whole["rows"]


@pytest.fixture
def filled(database: Database) -> Database:
    register(database)
    post(database, random_events(seed=9, size=80))
    return database


@pytest.mark.parametrize("edge", EDGES)
def test_edge_quantities_come_back_to_the_token(database: Database, edge: int) -> None:
    register(database)
    post(database, [make_event(n, counts=Counts(train=edge)) for n in range(1, 6)])
    (row,) = usage(database)["rows"]
    assert row["train"] == row["total"] == 5 * edge
    assert row["cost_pico"] == 5 * edge * PRICES["train"]


def test_sums_beyond_63_bits_are_exact(database: Database) -> None:
    """SQLite's SUM would end the query with an overflow, a float would round."""
    register(database)
    most = 2**63 - 1
    post(database, [make_event(n, counts=Counts(sample=most, prefill=most)) for n in range(1, 4)])
    (row,) = usage(database)["rows"]
    assert row["total"] == 6 * most
    assert row["cost_pico"] == 3 * most * (PRICES["sample"] + PRICES["prefill"])


def test_f02_a_group_of_two_samples_prefills_its_prompt_once(database: Database) -> None:
    register(database)
    post(database, [make_event(1, counts=Counts(prefill=11, cached_prefill=107))])
    (row,) = usage(database)["rows"]
    assert (row["prefill"], row["cached_prefill"], row["total"]) == (11, 107, 118)


def test_f16_the_total_counts_cached_tokens_once(database: Database) -> None:
    register(database)
    post(database, [make_event(1, counts=Counts(prefill=86, cached_prefill=17_817))])
    (row,) = usage(database)["rows"]
    assert row["total"] == 17_903


def test_f18_explicit_zero_is_zero_and_unknown_is_null(database: Database) -> None:
    register(database)
    post(database, [
        make_event(1, counts=Counts(), model="zero"),
        make_event(2, counts=None, model="unknown"),
        make_event(3, counts=None, model="mixed"),
        make_event(4, counts=Counts(train=4), model="mixed"),
    ])  # fmt: skip
    rows = {row["model"]: row for row in usage(database, group_by="model")["rows"]}
    assert (rows["zero"]["total"], rows["zero"]["cost_pico"]) == (0, 0)
    assert (rows["unknown"]["total"], rows["unknown"]["train"]) == (None, None)
    assert rows["unknown"]["cost_pico"] is None
    assert rows["unknown"]["cost_reason"] == "the usage is unknown"
    assert (rows["mixed"]["total"], rows["mixed"]["operations_unknown"]) == (4, 1)
    assert "1 operations of unknown usage" in rows["mixed"]["cost_reason"]


def test_f30_attempts_inflate_neither_operations_nor_the_bill(database: Database) -> None:
    register(database)
    post(database, [
        make_event(1, kind="attempt", n=1, counts=Counts(train=8)),
        make_event(1, kind="attempt", n=2, counts=Counts(train=8), producer_seq=2),
        make_event(1, kind="usage", counts=Counts(train=8), producer_seq=3),
    ])  # fmt: skip
    (row,) = usage(database)["rows"]
    assert (row["operations"], row["train"]) == (1, 8)
    by_kind = {row["kind"]: row for row in usage(database, include_attempts="true")["rows"]}
    assert (by_kind["attempt"]["operations"], by_kind["usage"]["operations"]) == (2, 1)
    assert (by_kind["attempt"]["cost_pico"], by_kind["attempt"]["cost_reason"]) == (
        0,
        "attempts are not billed",
    )


@pytest.mark.parametrize(
    ("parameters", "numbers"),
    [
        pytest.param({}, {1, 2, 3, 4}, id="everything"),
        pytest.param({"since": START_US + 2}, {2, 3, 4}, id="since is inclusive"),
        pytest.param({"until": START_US + 3}, {1, 2}, id="until is exclusive"),
        pytest.param({"since": START_US + 2, "until": START_US + 3}, {2}, id="half-open"),
        pytest.param({"since": "2025-11-30T00:00:00.000003Z"}, {3, 4}, id="ISO 8601 in UTC"),
        pytest.param({"since": "2025-11-30T08:00:00.000003+08:00"}, {3, 4}, id="with an offset"),
        pytest.param({"since": "2025-11-30T00:00:00.000003"}, {3, 4}, id="without a zone is UTC"),
        pytest.param({"since": "2025-12-01"}, set(), id="a later day"),
        pytest.param({"tenant": "acme"}, {1, 2, 3, 4}, id="tenant"),
        pytest.param({"tenant": "bolt"}, set(), id="another tenant"),
        pytest.param({"session": "s-2"}, {2}, id="session"),
        pytest.param({"model": "large"}, {3}, id="model"),
        pytest.param({"project": "rl"}, {4}, id="project"),
        pytest.param({"project": ""}, {1, 2, 3}, id="no project"),
        pytest.param({"key": "AKIA1"}, {1}, id="key"),
        pytest.param({"key": ""}, {2, 3, 4}, id="no key"),
        pytest.param({"operation": "forward", "session": "s-1"}, {3}, id="two filters"),
    ],
)
def test_filters_and_ranges(
    database: Database, parameters: dict[str, str | int], numbers: set[int]
) -> None:
    register(database)
    post(database, [
        make_event(1, counts=Counts(train=10), key="AKIA1"),
        make_event(2, counts=Counts(train=100), session="s-2"),
        make_event(3, counts=Counts(train=1000), model="large", operation="forward"),
        make_event(4, counts=Counts(train=10_000), project="rl"),
    ])  # fmt: skip
    rows = usage(database, **parameters)["rows"]
    assert sum(row["train"] for row in rows) == sum(10**n for n in numbers)


def test_a_bucket_begins_where_its_first_microsecond_is(database: Database) -> None:
    """F50: an event 34 ms behind the start of a second, or on it, is in no other bucket."""
    register(database)
    hour = START_US + HOUR_US
    starts = [hour - 1, hour, hour + HOUR_US - 1, hour + HOUR_US]
    post(database, [make_event(n, op_start_us=start) for n, start in enumerate(starts, start=1)])
    rows = usage(database, bucket="hour")["rows"]
    assert [(row["bucket_start"], row["operations"]) for row in rows] == [
        ("2025-11-30T00:00:00Z", 1),
        ("2025-11-30T01:00:00Z", 2),
        ("2025-11-30T02:00:00Z", 1),
    ]


def test_a_time_before_1970_is_in_the_bucket_below_it(database: Database) -> None:
    register(database)
    post(database, [make_event(1, op_start_us=-1)])
    (row,) = usage(database, bucket="minute")["rows"]
    assert row["bucket_start"] == "1969-12-31T23:59:00Z"
    assert (row["cost_pico"], row["total"]) == (None, 35)


def test_sessions_are_shown_with_their_names(database: Database) -> None:
    register(database)
    name_session(database, "s-1", "my first run")
    post(database, [make_event(1), make_event(2, session="s-2")])
    rows = usage(database, group_by="session")["rows"]
    assert [(row["session"], row["session_name"]) for row in rows] == [
        ("s-1", "my first run"),
        ("s-2", None),
    ]


def test_an_unpriced_model_costs_null_with_the_reason_and_never_zero(database: Database) -> None:
    register(database)
    post(database, [make_event(1), make_event(2, model="unlisted")])
    prices = [Price(model="tiny", token_type=name, micros_per_mtok=1) for name in TOKEN_TYPES]
    book = PriceBook(name="own", currency="EUR", effective_from_us=0, prices=prices)
    database.write_now(lambda c: put_price_book(c, "own", book))
    answer = usage(database, "own", group_by="model")
    tiny, unlisted = answer["rows"]
    assert (tiny["cost_pico"], tiny["cost"], answer["currency"]) == (35, "0.000000000035", "EUR")
    assert (unlisted["cost_pico"], unlisted["cost"], unlisted["total"]) == (None, None, 35)
    assert "unlisted cached_prefill" in unlisted["cost_reason"]
    (together,) = usage(database, "own")["rows"]
    assert together["cost_pico"] is None
    assert "unlisted" in together["cost_reason"]


def test_without_a_price_book_nothing_is_free(database: Database) -> None:
    register(database)
    post(database, [make_event(1)])
    answer = usage(database, "none such")
    assert answer["currency"] is None
    assert answer["rows"][0]["cost_pico"] is None


def test_an_empty_ledger_answers_no_rows(database: Database) -> None:
    assert usage(database, group_by="tenant,token_type") == {
        "rows": [],
        "next_cursor": None,
        "currency": "USD",
        "price_book": "default",
        "lost": [],
        "lost_count": 0,
    }


@pytest.mark.parametrize(
    ("pico", "text"),
    [
        (0, "0.000000"),
        (1, "0.000000000001"),
        (1_500_000, "0.0000015"),
        (10**12, "1.000000"),
        (123_456_789 * 10**12 + 5 * 10**11, "123456789.500000"),
        (2**80, "1208925819614.629174706176"),
    ],
)
def test_money_as_text_is_exact(pico: int, text: str) -> None:
    assert decimal_text(pico) == text
