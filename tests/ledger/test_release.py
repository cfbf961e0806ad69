"""One attempt of a session may release results at a time, whoever beats and in whatever order."""

from concurrent.futures import ThreadPoolExecutor

import msgspec

from gristmill_contracts import limits
from gristmill_ledger.database import Database
from gristmill_ledger.release import GRANT_US, clock_us, grant_releases
from gristmill_testing.ledger import make_heartbeat
from gristmill_testing.ledger_store import NOW_US, register

SECOND = 1_000_000


def beat(database: Database, attempt: int, at_us: int, *, released: bool = False) -> bool:
    """Whether the attempt of session `a` was granted."""
    told = msgspec.structs.replace(make_heartbeat("a", attempt=attempt), released=released)
    granted = database.write_now(lambda c: grant_releases(c, [told], at_us))
    assert granted in ({}, {"a": limits.RELEASE_GRANT_S})
    return bool(granted)


def own(database: Database, attempt: int) -> None:
    register(database, "a", session="a", attempt=attempt)


def test_the_first_attempt_is_granted_with_its_first_heartbeat(database: Database) -> None:
    own(database, 1)
    assert beat(database, 1, NOW_US)
    assert beat(database, 1, NOW_US + 2 * SECOND)


def test_nobody_is_granted_before_a_registration(database: Database) -> None:
    assert not beat(database, 1, NOW_US)


def test_the_next_attempt_waits_until_the_grant_before_has_run_out(database: Database) -> None:
    own(database, 1)
    beat(database, 1, NOW_US)
    own(database, 2)
    assert not beat(database, 1, NOW_US + 1), "a newer one has registered"
    assert not beat(database, 2, NOW_US + GRANT_US - 1)
    assert beat(database, 2, NOW_US + GRANT_US)
    assert not beat(database, 1, NOW_US + GRANT_US + 1)
    assert not beat(database, 1, NOW_US + 9 * GRANT_US), "its time does not come again"


def test_a_grant_that_was_given_up_is_free_at_once(database: Database) -> None:
    own(database, 1)
    beat(database, 1, NOW_US)
    assert not beat(database, 1, NOW_US + 1, released=True)
    own(database, 2)
    assert beat(database, 2, NOW_US + 2)


def test_an_older_attempt_cannot_give_up_the_newer_ones_grant(database: Database) -> None:
    own(database, 1)
    own(database, 2)
    assert beat(database, 2, NOW_US)
    beat(database, 1, NOW_US, released=True)
    own(database, 3)
    assert not beat(database, 3, NOW_US + 1)


def test_the_same_attempt_that_starts_again_is_granted_at_once(database: Database) -> None:
    own(database, 1)
    beat(database, 1, NOW_US)
    own(database, 1)
    assert beat(database, 1, NOW_US + 1)


def test_attempts_that_beat_at_once_through_two_ledgers_are_never_both_granted(
    database: Database, another_database: Database
) -> None:
    """Each thinks that it is the owner, as around the registration of the newer one."""
    for round_number in range(20):
        at_us = NOW_US + round_number * 3 * GRANT_US
        older, newer = 2 * round_number + 1, 2 * round_number + 2
        own(database, older)
        beat(database, older, at_us)
        own(database, newer)
        until_us = at_us + GRANT_US
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(beat, database, newer, until_us)
            second = pool.submit(beat, another_database, newer, until_us)
            assert first.result()
            assert second.result()
        assert not beat(another_database, older, until_us + 1)


def test_the_clock_is_the_databases(database: Database, another_database: Database) -> None:
    first = database.read_now(clock_us)
    second = another_database.read_now(clock_us)
    assert first <= second < first + 60 * SECOND
