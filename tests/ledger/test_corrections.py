"""An adjustment or a void is a row of its own: signed, named, priced and counted as what it corrects."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill_contracts import limits
from gristmill_contracts.chain.walk import Walk
from gristmill_contracts.errors import ConflictError, InvalidRequestError, NotFoundError
from gristmill_contracts.http import Problem
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.reconciliation import LogPoint, ReconPoint, Tally
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger.budgets.views import view_budget
from gristmill_ledger.chain.pages import chain_heads, walk_page
from gristmill_ledger.corrections import Correct, Corrected, check_correction, correct
from gristmill_ledger.database import Database
from gristmill_ledger.explain import explain_event, explain_session
from gristmill_ledger.prices import put_price_book
from gristmill_ledger.reconcile.compare import Session, judge
from gristmill_ledger.reconcile.sources import stored_of
from gristmill_testing import budget_store as budgets
from gristmill_testing.ledger import START_US, make_event, running_ledger
from gristmill_testing.ledger_store import (
    NOW_US,
    post,
    rate_all,
    register,
    stored_rows,
    usage,
)

EVENT = make_event(1, counts=Counts(prefill=10, sample=5), key="AKIA1", project="rl")


@pytest.fixture
def stored(database: Database) -> Database:
    """A priced ledger with one usage event and one attempt."""
    prices = [Price(model="*", token_type=n, micros_per_mtok=3) for n in TOKEN_TYPES]
    book = PriceBook(name="default", currency="USD", effective_from_us=1, prices=prices)
    database.write_now(lambda c: put_price_book(c, "default", book))
    register(database, "s-1")
    post(database, [EVENT, make_event(2, kind="attempt", n=1)], "s-1")
    return database


def decide(database: Database, **changes: Any) -> Corrected:
    fields: dict[str, Any] = {
        "event": EVENT.event_id, "kind": "adjustment", "reason": "a test", "by": "ann",
    }  # fmt: skip
    request = Correct(**(fields | changes))
    check_correction(request)
    return database.write_now(lambda c: correct(c, request, book="default", now_us=NOW_US))


def total(database: Database) -> tuple[int, int, int, int]:
    (row,) = usage(database)["rows"]
    return row["prefill"], row["sample"], row["operations"], row["cost_pico"]


@pytest.mark.parametrize("rated", ["before", "after"])
def test_an_adjustment_adds_and_takes_away_tokens_and_their_cost(
    stored: Database, rated: str
) -> None:
    if rated == "before":
        rate_all(stored)
    made = decide(stored, delta=Counts(prefill=-4, sample=2))
    assert (made.seq, made.again) == (3, False)
    assert made.left == {"prefill": 6, "cached_prefill": 0, "sample": 7, "train": 0}
    assert total(stored) == (6, 7, 1, 39)
    rate_all(stored)
    assert total(stored) == (6, 7, 1, 39)


def test_its_row_names_what_it_corrects_and_who_decided_why(stored: Database) -> None:
    made = decide(stored, delta=Counts(sample=-5))
    row = stored_rows(stored)[-1]
    original = stored_rows(stored)[0]
    assert (row["kind"], row["corrects"], row["reason"]) == (
        "adjustment", EVENT.event_id, "ann: a test",
    )  # fmt: skip
    assert (row["event_id"], row["sample"], row["prefill"]) == (made.event_id, -5, 0)
    same = ("session", "stream", "number", "operation", "model", "project", "key", "op_start_us")
    assert {name: row[name] for name in same} == {name: original[name] for name in same}


def test_a_void_takes_away_all_that_is_left(stored: Database) -> None:
    decide(stored, delta=Counts(prefill=-4))
    made = decide(stored, kind="void", reason="never ran")
    assert made.delta == {"prefill": -6, "cached_prefill": 0, "sample": -5, "train": 0}
    assert total(stored) == (0, 0, 1, 0)
    with pytest.raises(ConflictError, match="nothing is left"):
        decide(stored, kind="void", reason="once more")


def test_the_same_decision_again_changes_nothing(stored: Database) -> None:
    for again in (False, True):
        assert decide(stored, delta=Counts(prefill=-4)).again is again
    for again in (False, True):
        assert decide(stored, kind="void", reason="never ran").again is again
    assert len(stored_rows(stored)) == 4
    assert decide(stored, delta=Counts(prefill=4), reason="it ran").left["prefill"] == 4


def test_less_than_nothing_is_never_left(stored: Database) -> None:
    with pytest.raises(ConflictError, match="has 10 prefill tokens left; -11 would make that -1"):
        decide(stored, delta=Counts(prefill=-11))
    with pytest.raises(ConflictError, match="sample tokens left"):
        decide(stored, delta=Counts(sample=limits.QUANTITY_MAX))
    assert len(stored_rows(stored)) == 2


def test_usage_that_was_unknown_can_be_told_later(stored: Database) -> None:
    unknown = make_event(3, counts=None)
    post(stored, [unknown], "s-1")
    made = decide(stored, event=unknown.event_id, delta=Counts(train=7))
    assert made.left["train"] == 7
    with pytest.raises(ConflictError):
        decide(stored, event=unknown.event_id, delta=Counts(train=-8))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"event": "none"}, NotFoundError),
        ({"event": make_event(2, kind="attempt", n=1).event_id}, InvalidRequestError),
        ({"reason": ""}, InvalidRequestError),
        ({"delta": Counts()}, InvalidRequestError),
        ({"kind": "void", "delta": Counts(train=1)}, InvalidRequestError),
        ({"delta": Counts(train=limits.QUANTITY_MAX + 1)}, InvalidRequestError),
        ({"tenant": "umbrella"}, NotFoundError),
    ],
)
def test_what_is_no_decision_on_a_charge_is_refused(
    stored: Database, changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        decide(stored, **({"delta": Counts(prefill=1)} | changes))
    assert len(stored_rows(stored)) == 2


def test_a_correction_is_not_corrected(stored: Database) -> None:
    made = decide(stored, delta=Counts(prefill=-1))
    with pytest.raises(InvalidRequestError, match="of kind adjustment"):
        decide(stored, event=made.event_id, delta=Counts(prefill=1))


def test_the_chain_holds_corrections(stored: Database) -> None:
    decide(stored, delta=Counts(prefill=-4))
    decide(stored, kind="void")
    (head,) = stored.read_now(chain_heads)
    walk = Walk(tenant="acme")
    while walk.seq < head.seq:
        stored.read_now(lambda c: walk_page(c, walk=walk, last=head.seq))
    assert (walk.seq, walk.hash) == (4, head.hash)


def test_explain_shows_the_charge_and_its_corrections(stored: Database) -> None:
    decide(stored, delta=Counts(prefill=-4))
    answer = stored.read_now(lambda c: explain_session(c, "s-1", None, 0, 100, "default"))
    charge, _, correction = answer["charges"]
    assert (charge["amount_pico"], correction["amount_pico"]) == (45, -12)
    assert (correction["corrects"], correction["reason"]) == (EVENT.event_id, "ann: a test")
    assert answer["total_pico"] == 33


def test_explain_of_the_charge_alone_shows_its_corrections_too(stored: Database) -> None:
    decide(stored, delta=Counts(prefill=-4))
    answer = stored.read_now(lambda c: explain_event(c, EVENT.event_id, None, "default"))
    assert [each["kind"] for each in answer["charges"]] == ["usage", "adjustment"]
    assert [each["amount_pico"] for each in answer["charges"]] == [45, -12]
    assert answer["total_pico"] == 33


def test_a_budget_gets_back_what_was_taken_away(database: Database) -> None:
    budgets.session(database)
    budgets.put(database, 1000, now_us=START_US)
    post(database, [make_event(1, counts=Counts(train=100))], "s-1")
    decide(database, delta=Counts(train=-30))
    period = database.read_now(lambda c: view_budget(c, "acme/all", NOW_US)).period
    assert period.posted + period.late_posted == 70


def test_corrections_are_no_difference_to_a_meter(stored: Database) -> None:
    """They are the ledger's own: no log holds them."""
    decide(stored, delta=Counts(prefill=-4))
    told = {
        "usage/sample": Tally(1, prefill=10, sample=5),
        "attempt/sample": Tally(1, prefill=10, cached_prefill=20, sample=5),
    }
    point = ReconPoint(log=LogPoint(after=0, seq=2, told=told))
    held = stored.read_now(lambda c: stored_of(c, "s-1", point.log))
    session = Session(tenant="acme", uid="s-1", point=point, told_us=NOW_US, stored=held)
    assert judge(session, NOW_US).differences == ()


async def test_the_route_answers_what_was_stored_and_refuses_the_rest(tmp_path: Path) -> None:
    async with running_ledger(tmp_path) as client:
        await client.register("s-1")
        await client.post("s-1", [EVENT])
        asked = {"event": EVENT.event_id, "reason": "a test", "sample": "-2", "by": "ann"}
        status, body = await client.call("POST", "/v1/corrections", **asked)
        assert status == 200
        told = msgspec.json.decode(body)
        assert (told["left"]["sample"], told["again"], told["by"]) == (3, False, "ann")
        for wrong in ({"sample": "x"}, {"kind": "gift"}, {"reason": ""}, {"sample": "-9"}):
            status, body = await client.call("POST", "/v1/corrections", **(asked | wrong))
            assert status in (400, 409)
            assert msgspec.json.decode(body, type=Problem).code in ("invalid_request", "conflict")
        (row,) = (await client.usage())["rows"]
        assert row["sample"] == 3
