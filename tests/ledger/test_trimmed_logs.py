"""A ledger that was restored from an old backup meets logs that have let go of what it lost."""

import pytest

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.http import RegisterProducer
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_ledger.database import Database
from gristmill_ledger.gaps import session_gaps
from gristmill_ledger.producers import Registered, check_registration, register_producer
from gristmill_testing.ledger import make_event
from gristmill_testing.ledger_store import post, stored_rows


def registration(first_seq: int, head_seq: int) -> RegisterProducer:
    return RegisterProducer(
        producer="p",
        tenant=TenantName("acme"),
        session=SessionUid("s-1"),
        epoch=1,
        attempt=1,
        head_seq=head_seq,
        first_seq=first_seq,
    )


def register(database: Database, first_seq: int, head_seq: int) -> Registered:
    message = registration(first_seq, head_seq)
    return database.write_now(lambda c: register_producer(c, message))


def test_what_no_log_holds_is_a_recorded_gap_and_the_rest_is_taken(database: Database) -> None:
    register(database, 1, 3)
    post(database, [make_event(1), make_event(2)])
    registered = register(database, 7, 9)
    assert (registered.cursor.acked_seq, registered.log_lost) == (6, False)
    assert register(database, 7, 9).cursor.acked_seq == 6
    (gap,) = database.read_now(lambda c: session_gaps(c, "s-1"))
    assert (gap.acked_seq, gap.head_seq, gap.reason) == (2, 6, "log_trimmed")
    post(database, [make_event(n) for n in (7, 8, 9)])
    assert [row["producer_seq"] for row in stored_rows(database)] == [1, 2, 7, 8, 9]


def test_a_log_that_holds_what_is_missing_leaves_no_gap(database: Database) -> None:
    register(database, 1, 3)
    post(database, [make_event(1), make_event(2)])
    assert register(database, 3, 9).cursor.acked_seq == 2
    assert database.read_now(lambda c: session_gaps(c, "s-1")) == []


def test_a_first_number_above_the_log_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="first_seq 11"):
        check_registration(registration(11, 9))
    check_registration(registration(10, 9))
