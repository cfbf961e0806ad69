"""A session is priced by its own book, in usage and in its heartbeats alike."""

from pathlib import Path

import pytest

from gristmill_contracts.errors import ConflictError
from gristmill_contracts.http import Heartbeat, HeartbeatPage
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger import costs
from gristmill_ledger.costs import Costs
from gristmill_ledger.database import Database
from gristmill_ledger.prices import put_price_book
from gristmill_testing.ledger import START_US, make_event, make_heartbeat, running_ledger
from gristmill_testing.ledger_store import name_session, post, register, stored_rows, usage


def put_book(
    database: Database, name: str, micros: int, *, currency: str = "USD", start_us: int = 0,
    model: str = "*",
) -> None:  # fmt: skip
    prices = [Price(model=model, token_type=kind, micros_per_mtok=micros) for kind in TOKEN_TYPES]
    book = PriceBook(name=name, currency=currency, effective_from_us=start_us, prices=prices)
    database.write_now(lambda c: put_price_book(c, name, book))


def cost_of(database: Database, kept: Costs, *uids: str) -> list[str | None]:
    beats: list[Heartbeat] = [make_heartbeat(uid) for uid in uids]
    for beat in beats:
        beat.view.state = "Closed"  # So that the cost is looked at anew.
    database.read_now(lambda c: kept.fill(c, beats))
    return [beat.cost for beat in beats]


@pytest.fixture
def kept() -> Costs:
    return Costs(default_book="gold")


def test_usage_of_each_session_is_priced_by_its_own_book(database: Database) -> None:
    put_book(database, "gold", 1_000_000)
    put_book(database, "silver", 500_000)
    for uid, book in (("s-1", None), ("s-2", "silver")):
        name_session(database, uid, uid, price_book=book)
        register(database, uid, session=uid)
        post(database, [make_event(1, session=uid, counts=Counts(train=10))], uid)
    rows = usage(database, "gold", group_by="session")["rows"]
    assert [(row["session"], row["cost"], row["currency"]) for row in rows] == [
        ("s-1", "0.000010", "USD"),
        ("s-2", "0.000005", "USD"),
    ]
    (together,) = usage(database, "gold")["rows"]
    assert (together["cost"], together["train"]) == ("0.000015", 20)
    assert {row["quarantined"] for row in stored_rows(database)} == {None}


def test_currencies_are_never_added(database: Database) -> None:
    put_book(database, "gold", 1_000_000)
    put_book(database, "euro", 1_000_000, currency="EUR")
    for uid, book in (("s-1", None), ("s-2", "euro")):
        name_session(database, uid, uid, price_book=book)
        register(database, uid, session=uid)
        post(database, [make_event(1, session=uid, counts=Counts(train=10))], uid)
    answer = usage(database, "gold")
    (together,) = answer["rows"]
    assert (together["cost"], together["cost_pico"], together["currency"]) == (None, None, None)
    assert together["cost_reason"] == "priced in several currencies: EUR, USD"
    assert together["train"] == 20
    apart = usage(database, "gold", group_by="session")
    assert [row["currency"] for row in apart["rows"]] == ["USD", "EUR"]
    assert apart["currency"] is None
    assert usage(database, "gold", session="s-2")["currency"] == "EUR"


def test_pages_of_mixed_books_hold_each_row_once(database: Database) -> None:
    put_book(database, "gold", 1_000_000)
    put_book(database, "silver", 500_000)
    for number, book in enumerate((None, "silver", None, "silver"), start=1):
        uid = f"s-{number}"
        name_session(database, uid, uid, price_book=book)
        register(database, uid, session=uid)
        post(database, [make_event(1, session=uid)], uid)
    found: list[str] = []
    parameters: dict[str, str | int] = {"group_by": "session", "limit": 1}
    while True:
        page = usage(database, "gold", **parameters)
        found += [row["session"] for row in page["rows"]]
        if page["next_cursor"] is None:
            break
        parameters["cursor"] = page["next_cursor"]
    assert found == ["s-1", "s-2", "s-3", "s-4"]


def test_a_session_keeps_the_first_book_that_it_is_given(database: Database) -> None:
    name_session(database, "s-1", "first")
    name_session(database, "s-1", "first", price_book="gold")
    name_session(database, "s-1", "first", price_book="gold")
    name_session(database, "s-1", "first")
    with pytest.raises(ConflictError, match="priced by book 'gold', not 'silver'"):
        name_session(database, "s-1", "first", price_book="silver")
    assert len(stored_rows(database, "session_price_book")) == 1


class TestHeartbeats:
    def test_the_cost_grows_with_the_usage(self, database: Database, kept: Costs) -> None:
        put_book(database, "gold", 1_000_000)
        register(database)
        assert cost_of(database, kept, "s-1") == ["0.000000 USD"]
        for number in range(1, 4):
            post(database, [make_event(number, counts=Counts(train=10, sample=1))])
            assert cost_of(database, kept, "s-1") == [f"0.{11 * number:06d} USD"]
        assert cost_of(database, Costs(default_book="gold"), "s-1") == ["0.000033 USD"]

    def test_it_is_what_usage_says(self, database: Database, kept: Costs) -> None:
        put_book(database, "gold", 1_000_000)
        put_book(database, "gold", 3_000_001, start_us=START_US + 3)
        put_book(database, "gold", 7, start_us=START_US + 2, model="tiny")
        register(database)
        post(database, [make_event(n, model="tiny" if n % 2 else "large") for n in range(1, 8)])
        post(database, [make_event(9, producer_seq=8, kind="attempt", n=1)])
        (row,) = usage(database, "gold", session="s-1")["rows"]
        assert cost_of(database, kept, "s-1") == [f"{row['cost']} USD"]

    def test_what_has_no_price_has_no_cost(self, database: Database, kept: Costs) -> None:
        register(database)
        assert cost_of(database, kept, "s-1") == [None]
        put_book(database, "gold", 1_000_000, model="other")
        post(database, [make_event(1)])
        assert cost_of(database, kept, "s-1") == [None]

    def test_a_price_that_begins_in_the_past_is_taken_into_account(
        self, database: Database, kept: Costs
    ) -> None:
        put_book(database, "gold", 1_000_000)
        register(database)
        post(database, [make_event(1, counts=Counts(train=10))])
        assert cost_of(database, kept, "s-1") == ["0.000010 USD"]
        put_book(database, "gold", 2_000_000, start_us=1)
        assert cost_of(database, kept, "s-1") == ["0.000020 USD"]

    def test_a_session_that_goes_on_is_not_looked_at_all_the_time(
        self, database: Database, kept: Costs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_book(database, "gold", 1_000_000)
        register(database)
        beat = make_heartbeat("s-1")
        seen = []
        for number, pause_s in ((1, 10.0), (2, 10.0), (3, 0.0)):
            monkeypatch.setattr(costs, "LOOK_AGAIN_S", pause_s)
            post(database, [make_event(number, counts=Counts(train=10))])
            database.read_now(lambda c: kept.fill(c, [beat]))
            seen.append(beat.cost)
        assert seen == ["0.000010 USD", "0.000010 USD", "0.000030 USD"]

    def test_another_tenants_session_of_that_uid_is_another_session(
        self, database: Database, kept: Costs
    ) -> None:
        put_book(database, "gold", 1_000_000)
        register(database, "x", tenant="rival", session="s-9")
        rival = make_event(1, session="s-9", tenant="rival", counts=Counts(train=10))
        post(database, [rival], "x")
        assert cost_of(database, kept, "s-9") == ["0.000000 USD"]


async def test_the_stream_of_heartbeats_carries_it(tmp_path: Path) -> None:
    async with running_ledger(tmp_path) as client:
        await client.register("s-1")
        await client.post("s-1", [make_event(1, counts=Counts(train=1_000_000))])
        await client.call("POST", "/v1/heartbeats", [make_heartbeat("s-1")])
        page = await client.ask(HeartbeatPage, "GET", "/v1/heartbeats")
        (row,) = (await client.usage(session="s-1"))["rows"]
        assert page.heartbeats[0].cost == f"{row['cost']} USD"
