"""Batches: what is stored, what is recognised, what is refused and what is kept aside."""

import msgspec
import pytest
from sqlalchemy import event as engine_event
from sqlalchemy.exc import OperationalError

from gristmill_contracts.errors import (
    ConflictError,
    FencedError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)  # fmt: skip
from gristmill_contracts.usage import Counts, UsageEvent
from gristmill_ledger.database import Database
from gristmill_ledger.decisions import SequenceGapError, payload_hash
from gristmill_ledger.events import store_batch
from gristmill_testing.ledger import START_US, make_batch, make_event
from gristmill_testing.ledger_store import (
    NOW_US,
    acked,
    name_session,
    post,
    register,
    stored_rows,
)  # fmt: skip

DAY_US = 86_400 * 10**6


def test_a_registration_answers_what_was_acknowledged(database: Database) -> None:
    assert register(database).cursor.acked_seq == 0
    post(database, [make_event(1), make_event(2)])
    assert register(database, head_seq=2).cursor.acked_seq == 2


def test_a_stored_event_keeps_every_field(database: Database) -> None:
    register(database)
    name_session(database, "s-1", "first")
    sent = make_event(1, project="rl", operation="forward", counts=Counts(train=7), attempt=3)
    post(database, [sent])
    (row,) = stored_rows(database)
    for field in sent.__struct_fields__:
        if field != "counts":
            assert row[field] == getattr(sent, field), field
    assert [row[name] for name in ("prefill", "cached_prefill", "sample", "train")] == [0, 0, 0, 7]
    assert (row["seq"], row["completeness"], row["quarantined"]) == (1, "final", None)
    assert (row["producer"], row["ingested_us"]) == ("p", NOW_US)


def test_the_same_batch_again_changes_nothing(database: Database) -> None:
    register(database)
    batch = [make_event(1), make_event(2)]
    post(database, batch)
    again = post(database, batch)
    assert (again.inserted, again.duplicates, acked(again)) == (0, 2, 2)
    assert len(stored_rows(database)) == 2


def test_an_overlapping_batch_adds_only_what_is_new(database: Database) -> None:
    register(database)
    post(database, [make_event(1), make_event(2)])
    stored = post(database, [make_event(2), make_event(3)])
    assert (stored.inserted, stored.duplicates, acked(stored)) == (1, 1, 3)
    assert [row["number"] for row in stored_rows(database)] == [1, 2, 3]


def test_an_old_overlap_does_not_move_the_cursor_back(database: Database) -> None:
    register(database)
    post(database, [make_event(n) for n in range(1, 6)])
    assert acked(post(database, [make_event(2)])) == 5


def test_an_unknown_event_below_the_cursor_is_stored_not_dropped(database: Database) -> None:
    register(database)
    post(database, [make_event(1), make_event(2)])
    stored = post(database, [make_event(9, producer_seq=1)])
    assert (stored.inserted, acked(stored)) == (1, 2)


def test_a_gap_is_refused_with_the_expected_number(database: Database) -> None:
    register(database)
    post(database, [make_event(1)])
    with pytest.raises(SequenceGapError, match="2 comes next") as refused:
        post(database, [make_event(3)])
    assert refused.value.expected_seq == 2
    assert len(stored_rows(database)) == 1


def test_an_unregistered_producer_is_not_found(database: Database) -> None:
    with pytest.raises(NotFoundError, match="register it first"):
        post(database, [make_event(1)], "stranger")


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        pytest.param({"epoch": 2}, {"epoch": 1}, id="epoch"),
        pytest.param({"attempt": 2}, {"attempt": 1}, id="attempt"),
    ],
)
class TestFencing:
    """Refused at registration. What a fenced meter had released before it knew is kept all the same."""

    def test_an_older_log_cannot_register(
        self, database: Database, newer: dict[str, int], older: dict[str, int]
    ) -> None:
        register(database, **newer)
        with pytest.raises(FencedError, match="stop"):
            register(database, **older)

    def test_its_usage_is_kept_and_marked_and_the_owners_cursor_stays(
        self, database: Database, newer: dict[str, int], older: dict[str, int]
    ) -> None:
        name_session(database, "s-1", "first")
        register(database, **older)
        post(database, [make_event(1)], **older)
        register(database, head_seq=1, **newer)
        late = post(database, [make_event(2), make_event(3)], **older)
        assert (late.cursor.fenced, acked(late), late.inserted) == (True, 3, 2)
        owners = post(database, [make_event(4, producer_seq=2)], **newer)
        assert (owners.cursor.fenced, acked(owners)) == (False, 2)
        marks = [(row["number"], row["quarantined"]) for row in stored_rows(database)]
        assert marks == [(1, None), (2, "fenced_attempt"), (3, "fenced_attempt"), (4, None)]

    def test_what_both_logs_hold_is_one_row(
        self, database: Database, newer: dict[str, int], older: dict[str, int]
    ) -> None:
        register(database, **older)
        register(database, **newer)
        post(database, [make_event(1), make_event(2)], **newer)
        again = post(database, [make_event(1), make_event(2)], **older)
        assert (again.inserted, again.duplicates, again.cursor.fenced) == (0, 2, True)

    def test_an_operation_that_both_ran_is_billed_once_and_the_other_is_a_dead_letter(
        self, database: Database, newer: dict[str, int], older: dict[str, int]
    ) -> None:
        register(database, **older)
        register(database, **newer)
        post(database, [make_event(1)], **newer)
        late = post(database, [make_event(1, op_end_us=START_US + 99)], **older)
        assert (late.inserted, len(late.conflicts)) == (0, 1)
        assert len(stored_rows(database, "dead_letter")) == 1

    def test_a_fenced_log_may_begin_anywhere(
        self, database: Database, newer: dict[str, int], older: dict[str, int]
    ) -> None:
        register(database, **newer)
        assert acked(post(database, [make_event(9)], **older)) == 9


def test_a_lost_log_owns_nothing_and_the_gap_is_recorded_once(database: Database) -> None:
    register(database, epoch=1)
    post(database, [make_event(1), make_event(2)])
    for _ in range(2):
        assert register(database, epoch=2, attempt=2, head_seq=0).log_lost
    (gap,) = stored_rows(database, "usage_gap")
    assert (gap["session"], gap["acked_seq"], gap["head_seq"]) == ("s-1", 2, 0)
    assert (gap["attempt"], gap["reason"]) == (2, "log_lost")
    # The volume was found again: its log goes on.
    assert not register(database, epoch=1, attempt=3, head_seq=2).log_lost
    assert acked(post(database, [make_event(3)], epoch=1)) == 3


def test_a_registration_that_arrives_again_late_is_no_lost_log(database: Database) -> None:
    register(database, epoch=2)
    post(database, [make_event(1), make_event(2)], epoch=2)
    late = register(database, epoch=2, head_seq=0)
    assert (late.log_lost, late.cursor.acked_seq) == (False, 2)
    assert stored_rows(database, "usage_gap") == []
    assert acked(post(database, [make_event(3)], epoch=2)) == 3
    # Another log that holds less, under a later attempt of the same time, is one.
    assert register(database, epoch=2, attempt=2, head_seq=0).log_lost


def test_a_higher_epoch_must_register_before_it_posts(database: Database) -> None:
    register(database, epoch=1)
    with pytest.raises(NotFoundError, match="register the new log"):
        post(database, [make_event(1)], epoch=2)


def test_a_log_older_than_its_acknowledgement_is_reported_lost(database: Database) -> None:
    register(database)
    post(database, [make_event(1), make_event(2)])
    lost = register(database, epoch=2, head_seq=1)
    assert lost.log_lost
    assert lost.cursor.acked_seq == 2
    assert not register(database, epoch=2, head_seq=2).log_lost


@pytest.mark.parametrize("change", [{"tenant": "other"}, {"session": "s-2"}])
def test_a_producer_keeps_its_tenant_and_session(
    database: Database, change: dict[str, str]
) -> None:
    register(database)
    with pytest.raises(ConflictError, match="belongs to session s-1 of acme"):
        register(database, **change)


def test_an_event_of_another_tenant_is_refused_whole(database: Database) -> None:
    register(database)
    with pytest.raises(InvalidRequestError, match="'rival'"):
        post(database, [make_event(1), make_event(2, tenant="rival")])
    assert stored_rows(database) == []


def test_f26_the_same_event_id_in_two_tenants_makes_two_rows(database: Database) -> None:
    register(database, "a", tenant="acme")
    register(database, "b", tenant="bolt")
    assert post(database, [make_event(1)], "a").inserted == 1
    assert post(database, [make_event(1, tenant="bolt")], "b").inserted == 1
    rows = stored_rows(database)
    assert [(row["tenant"], row["seq"]) for row in rows] == [("acme", 1), ("bolt", 1)]
    assert rows[0]["event_id"] == rows[1]["event_id"]


def test_another_payload_of_a_known_id_becomes_a_dead_letter(database: Database) -> None:
    register(database)
    post(database, [make_event(1)])
    forged = make_event(1, producer_seq=2, counts=Counts(sample=9999))
    stored = post(database, [forged, make_event(3)])
    assert (stored.inserted, stored.conflicts, acked(stored)) == (1, [forged], 3)
    assert [row["sample"] for row in stored_rows(database)] == [5, 5]
    (letter,) = stored_rows(database, "dead_letter")
    assert letter["reason"] == "payload_conflict"
    assert msgspec.msgpack.decode(letter["body"], type=UsageEvent) == forged


def test_a_dead_letter_sent_again_is_kept_once(database: Database) -> None:
    register(database)
    post(database, [make_event(1)])
    forged = make_event(1, producer_seq=2, counts=Counts(sample=9999))
    for _ in range(3):
        post(database, [forged])
    assert len(stored_rows(database, "dead_letter")) == 1


def test_two_payloads_of_one_id_in_one_batch_keep_the_first(database: Database) -> None:
    register(database)
    stored = post(database, [make_event(1), make_event(1, producer_seq=2, model="other")])
    assert (stored.inserted, len(stored.conflicts), acked(stored)) == (1, 1, 2)


def test_one_event_twice_in_one_batch_is_one_row(database: Database) -> None:
    register(database)
    stored = post(database, [make_event(1), make_event(1, producer_seq=2)])
    assert (stored.inserted, stored.duplicates, acked(stored)) == (1, 1, 2)


@pytest.mark.parametrize("change", [{"producer_seq": 8}, {"attempt": 2}])
def test_where_an_event_was_posted_from_is_not_its_payload(change: dict[str, int]) -> None:
    assert payload_hash(make_event(1)) == payload_hash(make_event(1, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "attempt"},
        {"n": 1},
        {"tenant": "bolt"},
        {"session": "s-2"},
        {"stream": "train"},
        {"operation": "forward"},
        {"model": "large"},
        {"project": "x"},
        {"outcome": "aborted"},
        {"counts": Counts(prefill=10, cached_prefill=20, sample=6)},
        {"counts": Counts(prefill=10, cached_prefill=20, train=5)},
        {"counts": Counts()},
        {"counts": None},
        {"op_start_us": START_US},
        {"op_end_us": START_US},
    ],
    ids=str,
)
def test_every_fact_is_part_of_the_payload_hash(change: dict[str, object]) -> None:
    assert payload_hash(make_event(1)) != payload_hash(make_event(1, **change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({}, None, id="nothing odd"),
        pytest.param(
            {"session": "s-9"}, "unknown_session,session_of_another_producer", id="session"
        ),
        pytest.param({"op_start_us": NOW_US + 301 * 10**6}, "clock", id="from the future"),
        pytest.param({"op_start_us": NOW_US - 36 * DAY_US}, "clock", id="from the past"),
        pytest.param({"op_end_us": START_US - 1}, "clock", id="ends before it starts"),
        pytest.param({"op_start_us": -(2**63) + 1}, "clock,unpriced", id="before 1970"),
        pytest.param({"counts": None}, "unknown_usage", id="unknown usage"),
        pytest.param({"operation": "dream"}, "unknown_operation", id="unknown operation"),
    ],
)
def test_an_odd_event_is_stored_and_marked(
    database: Database, change: dict[str, object], reason: str | None
) -> None:
    register(database)
    name_session(database, "s-1", "first")
    stored = post(database, [make_event(1, **change)])
    (row,) = stored_rows(database)
    assert row["quarantined"] == reason
    assert (stored.quarantined, acked(stored)) == (int(reason is not None), 1)


def test_an_event_without_a_price_is_stored_and_marked(database: Database) -> None:
    register(database)
    name_session(database, "s-1", "first")
    batch = make_event(1)

    database.write_now(
        lambda c: store_batch(c, make_batch("p", [batch]), book="none such", now_us=NOW_US)
    )
    (row,) = stored_rows(database)
    assert row["quarantined"] == "unpriced"


def test_unknown_usage_is_null_and_never_zero(database: Database) -> None:
    """F18: an explicit 0 is 0, an absent usage is unknown."""
    register(database)
    post(database, [make_event(1, counts=Counts()), make_event(2, counts=None)])
    zero, unknown = stored_rows(database)
    assert (zero["completeness"], zero["prefill"], zero["train"]) == ("final", 0, 0)
    assert (unknown["completeness"], unknown["prefill"], unknown["train"]) == (
        "unknown",
        None,
        None,
    )


@pytest.mark.parametrize("failures", [1, 3])
def test_f24_f34_a_failed_commit_stores_nothing_and_the_retry_stores_once(
    database: Database, failures: int
) -> None:
    register(database)
    left = failures

    def fail(_connection: object) -> None:
        nonlocal left
        if left:
            left -= 1
            raise OperationalError("COMMIT", None, Exception("disk is full"))

    engine_event.listen(database.engine, "commit", fail)
    batch = [make_event(1), make_event(2)]
    for _ in range(failures):
        with pytest.raises(UnavailableError):
            post(database, batch)
        assert stored_rows(database) == []
        assert stored_rows(database, "producer")[0]["acked_seq"] == 0
    assert acked(post(database, batch)) == 2
    assert [row["seq"] for row in stored_rows(database)] == [1, 2]


def test_f62_an_event_that_comes_again_after_months_is_still_one_row(database: Database) -> None:
    """Dedupe has no window: not a month's partition, and not a time to live."""
    register(database)
    batch = make_batch("p", [make_event(1), make_event(2)])
    for months in (0, 1, 13):
        now_us = NOW_US + months * 31 * DAY_US
        stored = database.write_now(
            lambda c, now_us=now_us: store_batch(c, batch, book="default", now_us=now_us)  # type: ignore[misc]
        )
        assert (stored.inserted, stored.duplicates) == ((2, 0) if months == 0 else (0, 2))
    assert [row["seq"] for row in stored_rows(database)] == [1, 2]


def test_a_restart_keeps_events_cursor_and_sequence(
    database: Database, another_database: Database
) -> None:
    register(database)
    post(database, [make_event(1)])
    database.close()
    assert register(another_database).cursor.acked_seq == 1
    post(another_database, [make_event(2)])
    assert [row["seq"] for row in stored_rows(another_database)] == [1, 2]
