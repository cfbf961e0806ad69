"""Every charge is explained down to its operation, its price rows and its place in the chain."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill_contracts import limits
from gristmill_contracts.errors import ConflictError, NotFoundError
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger.database import Database
from gristmill_ledger.explain import explain_event, explain_session
from gristmill_ledger.prices import put_price_book
from gristmill_ledger.rerating import Rerate
from gristmill_testing.ledger import START_US, LedgerClient, make_event, running_ledger
from gristmill_testing.ledger_store import (
    name_session,
    post,
    rate_all,
    register,
    rerate_all,
    stored_rows,
    usage,
)


def put(database: Database, micros: int, *, start_us: int = 0, model: str = "*") -> None:
    prices = [Price(model=model, token_type=name, micros_per_mtok=micros) for name in TOKEN_TYPES]
    book = PriceBook(name="own", currency="USD", effective_from_us=start_us, prices=prices)
    database.write_now(lambda c: put_price_book(c, "own", book))


def session_page(database: Database, uid: str, *, after: int = 0, limit: int = 100) -> Any:
    return database.read_now(lambda c: explain_session(c, uid, None, after, limit, "own"))


def event_charge(database: Database, event_id: str, tenant: str | None = None) -> Any:
    answer = database.read_now(lambda c: explain_event(c, event_id, tenant, "own"))
    (charge,) = answer["charges"]
    return charge


def test_f68_a_charge_names_operation_price_rows_and_chain(database: Database) -> None:
    put(database, 3)
    register(database)
    event = make_event(1, counts=Counts(prefill=10, sample=5), key="AKIA1")
    post(database, [event])
    rate_all(database, "own")
    charge = event_charge(database, event.event_id)
    (row,) = stored_rows(database)
    assert (charge["session"], charge["stream"], charge["number"]) == ("s-1", "log", 1)
    assert (charge["operation"], charge["key"], charge["state"]) == ("sample", "AKIA1", "rated")
    assert charge["chain"] == {
        "tenant": "acme",
        "seq": 1,
        "prev_hash": row["prev_hash"].hex(),
        "hash": row["hash"].hex(),
    }
    price = {"book": "own", "model": "*", "effective_from_us": 0, "micros_per_mtok": 3}
    assert charge["lines"] == [
        {"token_type": "prefill", "tokens": 10, "price": price, "amount_pico": 30},
        {"token_type": "sample", "tokens": 5, "price": price, "amount_pico": 15},
    ]
    assert (charge["amount_pico"], charge["amount"], charge["currency"]) == (
        45,
        "0.000000000045",
        "USD",
    )


@pytest.mark.parametrize("rated", [True, False])
def test_the_charges_of_a_session_add_up_to_its_usage(database: Database, rated: bool) -> None:
    put(database, 3)
    put(database, 7, start_us=START_US + 5)
    register(database)
    name_session(database, "s-1", "my run")
    post(database, [make_event(n, counts=Counts(train=n)) for n in range(1, 11)])
    if rated:
        rate_all(database, "own")
    whole = session_page(database, "s-1")
    (row,) = usage(database, "own", session="s-1")["rows"]
    assert (
        whole["total_pico"]
        == row["cost_pico"]
        == sum(each["amount_pico"] for each in whole["charges"])
    )
    assert {each["state"] for each in whole["charges"]} == {"rated" if rated else "pending"}
    assert {each["session_name"] for each in whole["charges"]} == {"my run"}
    charges, after = [], 0
    while after is not None:
        page = session_page(database, "s-1", after=after, limit=3)
        charges += page["charges"]
        after = page["next_after"]
    assert charges == whole["charges"]


def test_a_charge_that_was_rated_again_shows_every_rating(database: Database) -> None:
    put(database, 3)
    register(database)
    event = make_event(1, counts=Counts(train=10))
    post(database, [event])
    rate_all(database, "own")
    put(database, 5, start_us=1)
    rerate_all(database, Rerate(reason="wrong price"), "own")
    charge = event_charge(database, event.event_id)
    told = [(each["run"], each["reason"], each["amount_pico"]) for each in charge["ratings"]]
    assert told == [(0, None, 30), (1, "wrong price", 20)]
    assert charge["amount_pico"] == sum(each["amount_pico"] for each in charge["ratings"])
    assert charge["lines"][0]["price"]["effective_from_us"] == 1


def test_what_is_not_known_is_told_as_such_and_never_zero(database: Database) -> None:
    put(database, 3, model="tiny")
    register(database)
    post(database, [
        make_event(1, counts=None),
        make_event(2, model="unlisted", counts=Counts(train=1)),
        make_event(3, kind="attempt", n=1, counts=Counts(train=4)),
        make_event(4, counts=Counts()),
    ])  # fmt: skip
    rate_all(database, "own")
    page = session_page(database, "s-1")
    told = [(each["state"], each["amount_pico"], each["total"]) for each in page["charges"]]
    assert told == [
        ("unknown", None, None),
        ("unpriced", None, 1),
        ("not billed", 0, 4),
        ("rated", 0, 0),
    ]
    assert page["charges"][1]["lines"][0]["price"] is None
    assert (page["total_pico"], page["operations_unknown"]) == (None, 1)


def test_a_name_that_is_nobodys_is_not_found(database: Database) -> None:
    with pytest.raises(NotFoundError, match="usage event 'e'"):
        event_charge(database, "e")
    with pytest.raises(NotFoundError, match="session 'nobody'"):
        session_page(database, "nobody")
    name_session(database, "s-9", "idle")
    assert session_page(database, "s-9")["charges"] == []


def test_f26_an_id_that_two_tenants_have_is_told_apart_by_tenant(database: Database) -> None:
    put(database, 3)
    event_id = make_event(1).event_id
    for tenant, tokens in (("acme", 1), ("bolt", 2)):
        register(database, tenant, tenant=tenant)
        post(database, [make_event(1, tenant=tenant, counts=Counts(train=tokens))], tenant)
    with pytest.raises(ConflictError, match="name the tenant"):
        event_charge(database, event_id)
    assert event_charge(database, event_id, "bolt")["total"] == 2


async def ask(client: LedgerClient, method: str, path: str, **given: str | int) -> tuple[int, Any]:
    status, body = await client.call(method, path, **given)
    return status, msgspec.json.decode(body)


async def test_the_routes_answer_json(tmp_path: Path) -> None:
    async with running_ledger(tmp_path) as client:
        await client.register("s-1")
        event = make_event(1, counts=Counts(train=1_000_000))
        await client.post("s-1", [event])
        await client.ledger.follower.catch_up()
        status, answer = await ask(client, "GET", "/v1/explain", event=event.event_id)
        assert (status, answer["total"], answer["charges"][0]["state"]) == (
            200,
            "0.600000",
            "rated",
        )
        status, answer = await ask(client, "GET", "/v1/explain", session="s-1", limit=5)
        assert (status, answer["total"]) == (200, "0.600000")
        status, told = await ask(client, "GET", "/v1/estimate", model="tiny", train=1_000_000)
        assert (status, told["amount"], told["price_book"]) == (200, "0.600000", "default")
        prices = [Price(model="*", token_type=n, micros_per_mtok=1_000_000) for n in TOKEN_TYPES]
        book = PriceBook(name="default", currency="USD", effective_from_us=1, prices=prices)
        await client.call("PUT", "/v1/price-books/default", book)
        given = {"reason": "new contract", "tenant": "acme"}
        status, dry = await ask(client, "POST", "/v1/rerate", **given, dry_run="true")
        assert (status, dry["run"], dry["rows"]) == (200, None, 1)
        assert dry["differences"] == [
            {"tenant": "acme", "currency": "USD", "difference_pico": 400_000 * 10**6,
             "difference": "0.400000"}
        ]  # fmt: skip
        status, done = await ask(client, "POST", "/v1/rerate", **given)
        assert (status, done) == (200, dry | {"run": 1})
        assert (await client.usage())["rows"][0]["cost"] == "1.000000"


async def test_a_long_run_is_answered_in_parts(
    asked: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RERATE_HOURS_MAX", 2)
    hour_us = 3600 * 10**6
    await asked.register("s-1")
    events = [
        make_event(n, counts=Counts(train=1), op_start_us=START_US + n * hour_us)
        for n in range(1, 6)
    ]
    await asked.post("s-1", events)
    await asked.ledger.follower.catch_up()
    prices = [Price(model="tiny", token_type=n, micros_per_mtok=600_001) for n in TOKEN_TYPES]
    book = PriceBook(name="default", currency="USD", effective_from_us=1, prices=prices)
    await asked.call("PUT", "/v1/price-books/default", book)
    for dry in ("true", "false"):
        rows, following, runs = [], {}, set()
        while True:
            given = {"reason": "x", "dry_run": dry} | following
            _, answer = await ask(asked, "POST", "/v1/rerate", **given)
            rows.append(answer["rows"])
            runs.add(answer["run"])
            if answer["next"] is None:
                break
            following = {"next": answer["next"]} | (
                {"run": answer["run"]} if dry == "false" else {}
            )
        assert (rows, len(runs)) == ([2, 2, 1], 1)


@pytest.mark.parametrize(
    ("method", "path", "given", "code"),
    [
        ("GET", "/v1/explain", {}, "invalid_request"),
        ("GET", "/v1/explain", {"event": "a", "session": "b"}, "invalid_request"),
        ("GET", "/v1/explain", {"event": "a"}, "not_found"),
        ("GET", "/v1/explain", {"session": "s", "after": "-1"}, "invalid_request"),
        ("GET", "/v1/explain", {"session": "s", "limit": "0"}, "invalid_request"),
        ("GET", "/v1/explain", {"session": "s", "x": "0"}, "invalid_request"),
        ("GET", "/v1/estimate", {"train": "1"}, "invalid_request"),
        ("GET", "/v1/estimate", {"model": "m", "train": "-1"}, "invalid_request"),
        ("GET", "/v1/estimate", {"model": "m", "train": str(2**63)}, "invalid_request"),
        ("GET", "/v1/estimate", {"model": "m", "price_book": "none"}, "not_found"),
        ("GET", "/v1/estimate", {"model": "m", "at": "yesterday"}, "invalid_request"),
        ("POST", "/v1/rerate", {}, "invalid_request"),
        ("POST", "/v1/rerate", {"reason": "x", "dry_run": "maybe"}, "invalid_request"),
        ("POST", "/v1/rerate", {"reason": "x", "next": "junk"}, "invalid_request"),
        ("POST", "/v1/rerate", {"reason": "x", "run": "99"}, "not_found"),
        ("POST", "/v1/rerate", {"reason": "x", "since": "2", "until": "1"}, "invalid_request"),
    ],
)
async def test_a_bad_question_has_a_stable_code(
    asked: LedgerClient, method: str, path: str, given: dict[str, str], code: str
) -> None:
    status, problem = await ask(asked, method, path, **given)
    assert 400 <= status < 500
    assert problem["code"] == code


@pytest.fixture
async def asked(tmp_path: Path) -> Any:
    async with running_ledger(tmp_path) as client:
        yield client
