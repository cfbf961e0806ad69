"""Sixteen writers on one tenant: each number once, each event once, one chain."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from gristmill_ledger.chain.verify import verify_database
from gristmill_ledger.database import Database, open_engine
from gristmill_ledger.events import Post, store_batches
from gristmill_testing.ledger import make_batch, make_event
from gristmill_testing.ledger_store import NOW_US, register, stored_rows

WRITERS = 16
BATCH = 100


def write(url: str, writer: int, events: int) -> None:
    """A process's own connection: only the database's locks part it from the others. Each batch is sent
    twice, as after an answer that was lost."""
    database = Database(
        open_engine(url, busy_timeout_s=120, connections=1), readers=1, writes_pending_max=1
    )
    name = f"s-{writer}"
    try:
        for first in range(1, events + 1, BATCH):
            numbers = range(first, min(first + BATCH, events + 1))
            batch = make_batch(name, [make_event(n, session=name) for n in numbers])
            store = partial(store_batches, posts=[Post(batch=batch)], book="default", now_us=NOW_US)
            for _ in range(2):
                (answer,) = database.write_now(store)
                assert not isinstance(answer, Exception), answer
    finally:
        database.close()


def write_all(database: Database, url: str, events: int) -> None:
    for writer in range(WRITERS):
        register(database, f"s-{writer}", session=f"s-{writer}")
    with ThreadPoolExecutor(WRITERS) as pool:
        jobs = [pool.submit(write, url, writer, events) for writer in range(WRITERS)]
        for job in jobs:
            job.result()


def check_all(database: Database, url: str, events: int) -> None:
    report = verify_database(url, keys=[])
    assert report.faults() == []
    assert report.rows == WRITERS * events
    with database.engine.connect() as connection:
        distinct, last = connection.exec_driver_sql(
            "SELECT count(DISTINCT event_id), max(seq) FROM usage_event"
        ).one()
    assert (distinct, last) == (WRITERS * events, WRITERS * events)
    acked = {row["acked_seq"] for row in stored_rows(database, "producer")}
    assert acked == {events}


def test_f60_sixteen_writers_of_one_tenant_make_one_chain(
    database: Database, migrated_url: str
) -> None:
    write_all(database, migrated_url, 500)
    check_all(database, migrated_url, 500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_f60_sixteen_writers_with_ten_thousand_events_each(
    database: Database, migrated_url: str
) -> None:
    write_all(database, migrated_url, 10_000)
    check_all(database, migrated_url, 10_000)


def test_f24_an_id_whose_insert_failed_once_is_counted_when_it_comes_again(
    database: Database,
) -> None:
    """The look-up and the row are of one transaction: nothing is claimed by what was never stored."""
    register(database)
    batch = make_batch("p", [make_event(1), make_event(2)])
    store = partial(store_batches, posts=[Post(batch=batch)], book="default", now_us=NOW_US)

    def fail(connection: object) -> None:
        store(connection)  # type: ignore[arg-type]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        database.write_now(fail)
    assert stored_rows(database) == []
    (answer,) = database.write_now(store)
    assert not isinstance(answer, Exception)
    assert (answer.inserted, answer.duplicates) == (2, 0)
    assert [row["seq"] for row in stored_rows(database)] == [1, 2]
