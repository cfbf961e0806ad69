"""Whatever is resent, reordered, overlapped, failed or raced: each event once, each seq once."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event as engine_event
from sqlalchemy.exc import OperationalError

from gristmill_contracts.errors import UnavailableError
from gristmill_ledger.database import Database, open_engine
from gristmill_ledger.decisions import SequenceGapError
from gristmill_testing.ledger import make_event
from gristmill_testing.ledger_store import acked, post, register, stored_rows

FRESH = count()
WRITERS = 4
EVENTS_PER_WRITER = 60

slices = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 8), st.booleans()), min_size=1, max_size=12
)
"""Deliveries: (first_seq, events, whether the commit fails)."""


class FailingCommit:
    """Makes the next commits of an engine fail, as a full disk does."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, _connection: object) -> None:
        if self.armed:
            self.armed = False
            raise OperationalError("COMMIT", None, Exception("disk is full"))


def drain(database: Database, producer: str, session: str, last: int) -> None:
    """What a meter does in the end: send all above the acknowledged number."""
    acked_seq = register(database, producer, session=session, head_seq=last).cursor.acked_seq
    if acked_seq < last:
        post(database, [make_event(n, session=session) for n in range(acked_seq + 1, last + 1)],
             producer)  # fmt: skip


@settings(max_examples=60)
@given(deliveries=slices)
def test_any_schedule_of_deliveries_stores_each_event_once(
    database: Database, failing: FailingCommit, deliveries: list[tuple[int, int, bool]]
) -> None:
    producer = session = f"s-{next(FRESH)}"
    register(database, producer, session=session)
    last = 20
    highest = 0
    for first, length, fails in deliveries:
        numbers = range(first, min(first + length, last + 1))
        failing.armed = fails
        batch = [make_event(n, session=session) for n in numbers]
        if first > highest + 1:
            with pytest.raises(SequenceGapError, match=f"{highest + 1} comes next"):
                post(database, batch, producer)
        elif fails:
            with pytest.raises(UnavailableError):
                post(database, batch, producer)
        else:
            highest = max(highest, numbers[-1])
            assert acked(post(database, batch, producer)) == highest
        failing.armed = False
        mine = [row["number"] for row in stored_rows(database) if row["session"] == session]
        assert mine == list(range(1, highest + 1)), "stored is exactly what was acknowledged"
    drain(database, producer, session, last)
    rows = stored_rows(database)
    assert [row["seq"] for row in rows] == list(range(1, len(rows) + 1))
    per_event = Counter(row["event_id"] for row in rows if row["session"] == session)
    assert len(per_event) == last
    assert set(per_event.values()) == {1}


@pytest.fixture
def failing(database: Database) -> FailingCommit:
    hook = FailingCommit()
    engine_event.listen(database.engine, "commit", hook)
    return hook


def write_shuffled(database: Database, writer: int, seed: int) -> None:
    """One producer's events in small batches, some of them sent twice."""
    shuffle = random.Random(seed)
    producer = session = f"w-{writer}"
    register(database, producer, session=session)
    sent = 0
    while sent < EVENTS_PER_WRITER:
        begin = shuffle.randint(max(1, sent - 3), sent + 1)
        end = min(EVENTS_PER_WRITER, begin + shuffle.randint(0, 9))
        events = [make_event(n, session=session) for n in range(begin, end + 1)]
        sent = acked(post(database, events, producer))


def test_concurrent_writers_of_one_tenant_leave_no_gap_and_no_fork(
    database: Database, another_database: Database
) -> None:
    """Threads on two engines race as processes do: only the database's own locks part them."""
    databases = [database, another_database]
    with ThreadPoolExecutor(WRITERS) as pool:
        jobs = [
            pool.submit(write_shuffled, databases[writer % 2], writer, seed=writer)
            for writer in range(WRITERS)
        ]
        for job in jobs:
            job.result()
    rows = stored_rows(database)
    assert [row["seq"] for row in rows] == list(range(1, WRITERS * EVENTS_PER_WRITER + 1))
    assert len({row["event_id"] for row in rows}) == len(rows)
    head = {"tenant": "acme", "seq": len(rows), "hash": rows[-1]["hash"]}
    assert stored_rows(database, "tenant_head") == [head]


def test_the_same_batch_sent_at_once_by_many_is_stored_once(
    database: Database, another_database: Database
) -> None:
    """F32 for usage: the retries of one batch meet inside the ledger."""
    register(database)
    batch = [make_event(n) for n in range(1, 11)]
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(post, databases, batch) for databases in [database, another_database] * 4
        ]
        stored = [job.result() for job in jobs]
    assert sorted(result.inserted for result in stored) == [0] * 7 + [10]
    assert len(stored_rows(database)) == 10


def test_an_event_of_two_producers_is_stored_once(
    database: Database, another_database: Database
) -> None:
    """A drain tool and the meter may both ship a log."""
    register(database, "meter")
    register(database, "drain")
    batch = [make_event(n) for n in range(1, 31)]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(post, database, batch, "meter"),
                pool.submit(post, another_database, batch, "drain")]  # fmt: skip
        assert sorted(job.result().inserted for job in jobs) == [0, 30]
    assert len(stored_rows(database)) == 30


def test_the_pragmas_that_make_a_commit_durable_are_set(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/l.sqlite3", busy_timeout_s=7, connections=1)
    with engine.connect() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "busy_timeout", "recursive_triggers")
        }
    engine.dispose()
    full = 2
    assert found == {
        "journal_mode": "wal",
        "synchronous": full,
        "busy_timeout": 7000,
        "recursive_triggers": 1,
    }
