"""Directives reach the attempt that they are for, and gaps are on record."""

from pathlib import Path

import pytest

from gristmill_contracts.cluster_http import Directive, HeartbeatAnswer, UsageGap
from gristmill_contracts.errors import ConflictError, InvalidRequestError
from gristmill_contracts.http import Empty
from gristmill_ledger.database import Database
from gristmill_ledger.directives import answer_heartbeats, put_directive
from gristmill_ledger.gaps import record_gap, session_gaps
from gristmill_testing.ledger import (
    START_US,
    LedgerClient,
    make_event,
    make_heartbeat,
    running_ledger,
)
from gristmill_testing.ledger_store import name_session, post, register, stored_rows, usage


def tell(database: Database, uid: str, attempt: int, desired: str) -> None:
    directive = Directive(attempt=attempt, desired="stop" if desired == "stop" else "serve")
    database.write_now(lambda c: put_directive(c, uid, directive))


def ask(database: Database, **attempts: int) -> HeartbeatAnswer:
    beats = [make_heartbeat(uid, attempt=attempt) for uid, attempt in attempts.items()]
    return database.read_now(lambda c: answer_heartbeats(c, beats))


def test_only_the_attempt_that_is_meant_is_told(database: Database) -> None:
    tell(database, "a", 2, "stop")
    assert ask(database, a=2, b=2).directives == {"a": "stop"}
    assert ask(database, a=1).directives == {}
    assert ask(database, a=3).directives == {}


def test_the_next_directive_takes_the_place_of_the_one_before(database: Database) -> None:
    tell(database, "a", 1, "stop")
    tell(database, "a", 1, "serve")
    assert ask(database, a=1).directives == {"a": "serve"}
    tell(database, "a", 2, "stop")
    assert ask(database, a=1).directives == {}
    with pytest.raises(ConflictError, match="attempt 1 of session a is over"):
        tell(database, "a", 1, "stop")
    assert len(stored_rows(database, "directive")) == 1


def test_a_heartbeat_of_a_fenced_attempt_is_told_so(database: Database) -> None:
    register(database, "a", session="a", attempt=3)
    assert ask(database, a=2, b=1).fenced == ["a"]
    assert ask(database, a=3).fenced == []
    assert ask(database, a=4).fenced == []


def test_an_attempt_that_the_ledger_lost_is_not_told_what_another_one_posted(
    database: Database,
) -> None:
    """A ledger that came back from a backup: what is left out has the meter register anew."""
    register(database, "a", session="a", attempt=3)
    assert ask(database, a=3).acked == {"a": 0}
    assert ask(database, a=4).acked == {}


async def test_a_directive_reaches_the_meter_by_its_next_heartbeat(tmp_path: Path) -> None:
    async def beat(client: LedgerClient) -> HeartbeatAnswer:
        return await client.ask(
            HeartbeatAnswer, "POST", "/v1/heartbeats", [make_heartbeat("a"), make_heartbeat("b")]
        )

    async with running_ledger(tmp_path) as client:
        assert (await beat(client)).directives == {}
        directive = Directive(attempt=1, desired="stop")
        await client.ask(Empty, "PUT", "/v1/sessions/a/directive", directive)
        assert (await beat(client)).directives == {"a": "stop"}
    async with running_ledger(tmp_path) as client:
        assert (await beat(client)).directives == {"a": "stop"}


def gap(**changes: object) -> UsageGap:
    fields = {"attempt": 1, "acked_seq": 3, "head_seq": 5, "reason": "flush abandoned",
              "at_us": START_US}  # fmt: skip
    return UsageGap(**(fields | changes))  # type: ignore[arg-type]


class TestGaps:
    def test_a_gap_told_again_is_one_gap(self, database: Database) -> None:
        def told(given: UsageGap) -> bool:
            return database.write_now(lambda c: record_gap(c, "s-1", given))

        assert told(gap())
        assert not told(gap())
        assert not told(gap(at_us=START_US + 60_000_000))
        assert told(gap(head_seq=None))
        assert told(gap(attempt=2))
        recorded = database.read_now(lambda c: session_gaps(c, "s-1"))
        assert sorted((g.attempt, g.head_seq or 0) for g in recorded) == [(1, 0), (1, 5), (2, 5)]
        assert {g.at_us for g in recorded} == {START_US}

    def test_a_gap_is_shown_with_the_usage_of_its_session(self, database: Database) -> None:
        name_session(database, "s-1", "first")
        register(database)
        post(database, [make_event(1)])
        database.write_now(lambda c: record_gap(c, "s-1", gap()))
        database.write_now(lambda c: record_gap(c, "s-2", gap(head_seq=None, at_us=START_US - 1)))
        answer = usage(database, session="s-1")
        assert answer["lost"] == [
            {"tenant": "acme", "session": "s-1", "attempt": 1, "acked_seq": 3, "head_seq": 5,
             "events": 2, "reason": "flush abandoned", "at_us": START_US}
        ]  # fmt: skip
        assert usage(database)["lost_count"] == 2
        (unknown,) = usage(database, session="s-2")["lost"]
        assert (unknown["head_seq"], unknown["events"]) == (None, None)
        assert usage(database, tenant="acme")["lost_count"] == 1
        assert usage(database, session="s-1", since=START_US + 1)["lost"] == []
        assert usage(database, session="s-2", until=START_US)["lost_count"] == 1

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"reason": ""}, "reason is empty"),
            ({"attempt": -1}, "attempt is -1"),
            ({"head_seq": 2}, "nothing is missing"),
            ({"acked_seq": 2**63}, "acked_seq"),
        ],
    )
    async def test_a_gap_that_cannot_be_is_refused(
        self, tmp_path: Path, change: dict[str, object], words: str
    ) -> None:
        async with running_ledger(tmp_path) as client:
            with pytest.raises(InvalidRequestError, match=words):
                await client.ask(Empty, "POST", "/v1/sessions/s-1/gaps", gap(**change))
            assert await client.ask(list[UsageGap], "GET", "/v1/sessions/s-1/gaps") == []
            await client.ask(Empty, "POST", "/v1/sessions/s-1/gaps", gap())
            assert await client.ask(list[UsageGap], "GET", "/v1/sessions/s-1/gaps") == [gap()]
