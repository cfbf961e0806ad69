"""A planted difference of every kind is found, kept, and open until a decision on it is recorded."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from gristmill_contracts import limits
from gristmill_contracts.budgets import Decide
from gristmill_contracts.cluster_http import UsageGap
from gristmill_contracts.errors import ConflictError, NotFoundError
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.reconciliation import (
    NOTHING,
    LogPoint,
    ReconPoint,
    Tally,
    WorkerPoint,
    tally_name,
    tally_of,
)
from gristmill_contracts.usage import Counts, UsageEvent
from gristmill_ledger.budgets.suspense import decide_suspense
from gristmill_ledger.database import Database
from gristmill_ledger.gaps import record_gap
from gristmill_ledger.heartbeats import store_heartbeats
from gristmill_ledger.reconcile.sources import Scope, orphan_holds
from gristmill_ledger.reconcile.store import decide, listed, newest_run_us, open_sums
from gristmill_ledger.reconcile.task import Reconciler, Report
from gristmill_testing import budget_store as budgets
from gristmill_testing.ledger import (
    START_US,
    LedgerClient,
    make_event,
    make_heartbeat,
    running_ledger,
)
from gristmill_testing.ledger_store import NOW_US, post, register, stored_rows

EVENTS = [make_event(n, counts=Counts(prefill=n, sample=2 * n)) for n in range(1, 5)]
EVENTS[2] = make_event(3, kind="attempt", n=1, counts=Counts(prefill=7))


def told_by(events: list[UsageEvent]) -> dict[str, Tally]:
    told: dict[str, Tally] = {}
    for event in events:
        name = tally_name(event.kind, event.operation)
        told[name] = told.get(name, NOTHING) + tally_of(event.counts)
    return told


def beat(
    database: Database,
    events: list[UsageEvent],
    *,
    uid: str = "s-1",
    workers: list[WorkerPoint] | None = None,
    after: int = 0,
    seq: int | None = None,
) -> Heartbeat:
    """A meter's heartbeat that tells of these events, up to `seq` where that is not the last of them."""
    last = after + len(events) if seq is None else seq
    point = ReconPoint(
        log=LogPoint(after=after, seq=last, told=told_by(events)),
        workers=workers or [],
    )
    heartbeat = msgspec.structs.replace(make_heartbeat(uid), recon=point)
    database.write_now(lambda c: store_heartbeats(c, [heartbeat]))
    return heartbeat


async def reconcile(database: Database, **scope: str) -> Report:
    return await Reconciler(database=database).reconcile(Scope(**scope), asked_by="test")


def shapes(report: Report) -> list[tuple[str, str, str]]:
    return sorted((each.pair, each.kind, each.subject) for each in report.found)


def open_rows(database: Database, **scope: str) -> list[Any]:
    return database.read_now(lambda c: listed(c, Scope(**scope), limit=100))


async def test_a_log_that_the_ledger_holds_whole_does_not_differ(database: Database) -> None:
    register(database, "s-1")
    post(database, EVENTS, "s-1")
    beat(database, EVENTS)
    report = await reconcile(database)
    assert (report.run.sessions, report.run.in_flight, report.found) == (1, 0, [])
    (row,) = stored_rows(database, "recon_run")
    assert (row["scope"], row["sessions"], row["differences"]) == ("all", 1, 0)


async def test_only_what_the_meter_told_is_compared(database: Database) -> None:
    """The ledger may hold more by now, and the log may have older usage that was not added up."""
    register(database, "s-1")
    post(database, EVENTS, "s-1")
    beat(database, EVENTS[1:3], after=1)
    assert (await reconcile(database)).found == []


async def test_usage_that_has_not_arrived_is_under_way(database: Database) -> None:
    register(database, "s-1")
    post(database, EVENTS[:2], "s-1")
    heartbeat = beat(database, EVENTS)
    database.write_now(
        lambda c: store_heartbeats(
            c, [msgspec.structs.replace(heartbeat, at_us=limits.QUANTITY_MAX // 2)]
        )
    )
    report = await reconcile(database)
    assert (report.run.sessions, report.run.in_flight, report.found) == (0, 1, [])


async def test_a_missing_operation_is_found(database: Database) -> None:
    """The ledger acknowledged four events, and two of them were others again."""
    register(database, "s-1")
    again = [msgspec.structs.replace(EVENTS[0], producer_seq=n) for n in (3, 4)]
    post(database, [*EVENTS[:2], *again], "s-1")
    beat(database, EVENTS)
    assert shapes(await reconcile(database)) == [
        ("meter-ledger", "missing", "attempt/sample"),
        ("meter-ledger", "missing", "usage/sample"),
    ]


async def test_a_duplicate_operation_is_found(database: Database) -> None:
    register(database, "s-1")
    post(database, EVENTS, "s-1")
    beat(database, EVENTS[:3], seq=4)
    (one,) = (await reconcile(database)).found
    assert (one.pair, one.kind, one.subject) == ("meter-ledger", "duplicate", "usage/sample")
    assert one.delta == Tally(1, prefill=4, sample=8)


async def test_other_tokens_than_the_log_holds_are_found(database: Database) -> None:
    register(database, "s-1")
    post(database, EVENTS, "s-1")
    changed = [*EVENTS[:3], make_event(4, counts=Counts(prefill=4, sample=9))]
    beat(database, changed)
    (one,) = (await reconcile(database)).found
    assert (one.kind, one.delta) == ("mismatch", Tally(sample=-1))


async def test_an_event_whose_id_is_taken_is_found(database: Database) -> None:
    register(database, "s-1")
    post(database, EVENTS, "s-1")
    other = make_event(1, producer_seq=5, counts=Counts(train=1))
    post(database, [other], "s-1")
    beat(database, EVENTS)
    (one,) = (await reconcile(database)).found
    assert (one.pair, one.kind) == ("meter-ledger", "mismatch")
    assert one.subject.startswith(f"event {other.event_id} as ")


async def test_unknown_usage_and_gaps_are_found(database: Database) -> None:
    register(database, "s-1")
    unknown = make_event(1, counts=None)
    post(database, [unknown], "s-1")
    beat(database, [unknown])
    gap = UsageGap(attempt=1, acked_seq=1, head_seq=4, reason="volume_gone", at_us=START_US)
    database.write_now(lambda c: record_gap(c, "s-1", gap))
    report = await reconcile(database)
    assert [each.kind for each in report.found] == ["unknown", "unknown"]
    assert {each.delta.operations for each in report.found} == {1, -3}


async def test_a_log_that_differs_from_its_worker_is_found(database: Database) -> None:
    register(database, "s-1")
    post(database, EVENTS, "s-1")
    ran = {"sample": Tally(4, prefill=10, sample=20)}
    logged = {"sample": Tally(3, prefill=6, sample=12)}
    point = WorkerPoint(boot_id="b", opening=2, ran=ran, logged=logged, at_us=START_US)
    beat(database, EVENTS, workers=[point])
    (one,) = (await reconcile(database)).found
    assert (one.pair, one.kind) == ("worker-meter", "missing")
    assert one.delta == Tally(-1, prefill=-4, sample=-8)


def suspend(database: Database) -> str:
    """A hold whose meter went silent; returns its lease."""
    budgets.session(database)
    budgets.put(database, 10_000)
    lease = budgets.take(database, 1, 100)
    budgets.sweep(database, NOW_US + 2 * int(limits.BUDGET_LEASE_S * 1e6))
    return lease.id


async def test_an_orphan_reservation_is_found_and_its_end_is_the_decision(
    database: Database,
) -> None:
    lease = suspend(database)
    (one,) = (await reconcile(database)).found
    assert (one.kind, one.subject, one.amount) == (
        "orphan_reservation", f"lease {lease} of acme/all", 100,
    )  # fmt: skip
    decision = Decide(kind="void", reason="its node burnt", by="ann")
    database.write_now(
        lambda c: decide_suspense(c, lease, "acme/all", decision, by="cli", now_us=NOW_US)
    )
    assert (await reconcile(database)).found == []
    assert open_rows(database) == []
    (row,) = stored_rows(database, "recon_decision")
    assert (row["decided_by"], row["reason"]) == (
        "ann",
        "the hold ended: decided: its node burnt",
    )


def forget(database: Database, lease: str) -> None:
    """Lose the state of a hold, as a bug would."""
    with database.engine.begin() as connection:
        connection.execute(
            text("DELETE FROM reservation_balance WHERE lease = :lease"), {"lease": lease}
        )


async def test_a_hold_that_neither_lives_nor_ended_is_found(database: Database) -> None:
    budgets.session(database)
    budgets.put(database, 10_000)
    lost, lives, ended = (budgets.take(database, seq, 100 * seq) for seq in (1, 2, 3))
    budgets.give_back(database, ended.id)
    forget(database, lost.id)
    (one,) = (await reconcile(database)).found
    assert (one.kind, one.tenant, one.session, one.subject, one.amount) == (
        "orphan_reservation", "acme", "s-1", f"lease {lost.id} of acme/all", 100,
    )  # fmt: skip
    assert (await reconcile(database, tenant="acme")).found == [one]
    assert (await reconcile(database, tenant="bolt")).found == []
    assert (await reconcile(database, session="s-2")).found == []
    forget(database, lives.id)
    assert len((await reconcile(database)).found) == 2


async def test_holds_that_ended_are_not_read_again(database: Database) -> None:
    """What is read does not grow with them: it is told apart from them by the database as they end, and
    with all that were ever taken out of reach the answer is the same."""
    budgets.session(database)
    budgets.put(database, 10_000)
    for seq in range(1, 6):
        budgets.give_back(database, budgets.take(database, seq, 100).id)
    lives = budgets.take(database, 6, 100)
    assert stored_rows(database, "reservation_open") == [{"lease": lives.id, "budget": "acme/all"}]
    assert len(stored_rows(database, "reservation")) == 6
    with database.engine.connect() as connection:
        for table in ("reservation", "reservation_resolution"):
            connection.execute(text(f"ALTER TABLE {table} RENAME TO {table}_out_of_reach"))
        assert list(orphan_holds(connection, Scope())) == []
        connection.rollback()


async def plant(database: Database) -> Any:
    """One open difference."""
    register(database, "s-1")
    post(database, EVENTS, "s-1")
    beat(database, [*EVENTS[:3], make_event(4, counts=Counts(prefill=4, sample=9))])
    await reconcile(database)
    (row,) = open_rows(database)
    return row


async def test_a_difference_is_one_however_often_it_is_found_and_ages(database: Database) -> None:
    first = await plant(database)
    again = await reconcile(database)
    assert again.recorded is not None
    assert again.recorded.new == []
    assert len(again.found) == 1
    (row,) = open_rows(database)
    assert (row.id, row.found_us, row.run) == (first.id, first.found_us, first.run)


async def test_only_a_recorded_decision_resolves_a_difference(database: Database) -> None:
    row = await plant(database)
    beat(database, EVENTS)
    assert (await reconcile(database)).found == []
    assert [each.id for each in open_rows(database)] == [row.id]
    database.write_now(lambda c: decide(c, row.id, by="ann", reason="a test", now_us=NOW_US))
    assert open_rows(database) == []
    (kept,) = database.read_now(lambda c: listed(c, Scope(), limit=10, all_of_them=True))
    assert (kept.decided_by, kept.reason, kept.at_us) == ("ann", "a test", NOW_US)


async def test_a_decision_is_final_and_the_same_one_again_changes_nothing(
    database: Database,
) -> None:
    row = await plant(database)
    for _ in range(2):
        database.write_now(lambda c: decide(c, row.id, by="ann", reason="a test", now_us=NOW_US))
    with pytest.raises(ConflictError, match="that is final"):
        database.write_now(lambda c: decide(c, row.id, by="bob", reason="a test", now_us=NOW_US))
    with pytest.raises(NotFoundError):
        database.write_now(lambda c: decide(c, "none", by="bob", reason="a test", now_us=NOW_US))
    await reconcile(database)
    assert open_rows(database) == []


async def test_a_scope_looks_at_no_other_session(database: Database) -> None:
    await plant(database)
    register(database, "s-2", tenant="umbrella", session="s-2")
    assert (await reconcile(database, session="s-2")).found == []
    assert (await reconcile(database, tenant="umbrella")).found == []
    assert len((await reconcile(database, tenant="acme")).found) == 1
    assert len(open_rows(database, session="s-1")) == 1
    assert open_rows(database, session="s-2") == []


async def test_a_session_whose_meter_tells_nothing_is_counted_and_not_judged(
    database: Database,
) -> None:
    database.write_now(lambda c: store_heartbeats(c, [make_heartbeat("s-9")]))
    report = await reconcile(database)
    assert (report.run.silent, report.run.sessions) == (1, 0)


async def test_an_hour_is_recorded_once_by_whichever_replica(
    database: Database, another_database: Database
) -> None:
    await plant(database)
    runs = len(stored_rows(database, "recon_run"))
    both = [Reconciler(database=each) for each in (database, another_database)]
    slots = [
        await each.reconcile(Scope(), slot="hour 1", asked_by="", skip_even=True) for each in both
    ]
    assert [each.recorded is None for each in slots] == [False, True]
    assert len(stored_rows(database, "recon_run")) == runs + 1


async def test_the_hourly_run_takes_what_was_even_as_read(database: Database) -> None:
    register(database, "s-1")
    post(database, EVENTS, "s-1")
    beat(database, EVENTS)
    reconciler = Reconciler(database=database)
    first, second = [
        await reconciler.reconcile(Scope(), slot=f"hour {n}", asked_by="", skip_even=True)
        for n in (1, 2)
    ]
    assert (first.run.sessions, second.run.sessions) == (1, 0)
    beat(database, [*EVENTS[:3], make_event(4, counts=Counts(prefill=4, sample=9))])
    third = await reconciler.reconcile(Scope(), slot="hour 3", asked_by="", skip_even=True)
    assert len(third.found) == 1


async def test_sums_past_64_bits_are_added_up_and_kept_within_bounds(database: Database) -> None:
    big = limits.QUANTITY_MAX
    events = [make_event(n, counts=Counts(sample=big)) for n in (1, 2, 3)]
    register(database, "s-1")
    post(database, events, "s-1")
    beat(database, events[:1], seq=3)
    (one,) = (await reconcile(database)).found
    assert (one.delta.operations, one.delta.sample) == (2, 2 * big)
    (row,) = open_rows(database)
    assert row.sample == limits.RESOURCE_INTEGER_MAX


async def test_the_sums_of_what_is_open_are_told(database: Database) -> None:
    await plant(database)
    (one,) = database.read_now(open_sums)
    assert (one.pair, one.kind, one.differences, one.tokens) == (
        "meter-ledger", "mismatch", 1, 1,
    )  # fmt: skip
    assert database.read_now(newest_run_us) is not None


async def test_more_sessions_than_a_page_are_all_looked_at(database: Database) -> None:
    beats = [
        msgspec.structs.replace(
            make_heartbeat(f"s-{n:04}"), recon=ReconPoint(log=LogPoint(after=0, seq=0, told={}))
        )
        for n in range(205)
    ]
    database.write_now(lambda c: store_heartbeats(c, beats))
    report = await reconcile(database)
    assert report.run.sessions + report.run.in_flight == 205


async def test_everything_is_compared_once_an_hour(database: Database) -> None:
    await plant(database)
    reconciler = Reconciler(database=database)
    hour_us = 3600 * 10**6
    times = (START_US, START_US + hour_us - 1, START_US + hour_us)
    found = [await reconciler.hourly(at_us) for at_us in times]
    assert [report is None for report in found] == [False, True, False]
    slots = {row["slot"] for row in stored_rows(database, "recon_run") if row["asked_by"] == ""}
    assert slots == {f"hour {START_US // hour_us}", f"hour {START_US // hour_us + 1}"}


async def test_a_running_ledger_compares_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RECON_LOOK_S", 0.01)
    async with running_ledger(tmp_path) as client, asyncio.timeout(60):
        while "gristmill_recon_run_age_seconds -1.0" in await metrics(client):
            await asyncio.sleep(0.02)
        ran = await client.ledger.database.read(newest_run_us)
        assert ran is not None


async def metrics(client: LedgerClient) -> str:
    return (await client.call("GET", "/metrics"))[1].decode()


KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/reconcile", {}),
        ("/v1/reconcile/decisions", {"difference": "x", "reason": "y"}),
        ("/v1/corrections", {"event": "x", "reason": "y", "train": "1"}),
    ],
)
async def test_only_people_and_the_operator_compare_decide_and_correct(
    tmp_path: Path, path: str, asked: dict[str, str]
) -> None:
    key_file = tmp_path / "cluster.key"
    key_file.write_bytes(KEY)
    async with running_ledger(tmp_path / "ledger", cluster_key_file=key_file) as client:
        statuses = {
            name: (await caller.call("POST", path, **asked))[0]
            for name, caller in {
                "nobody": client,
                "gateway": client.as_service(KEY, "gateway"),
                "meter": client.as_meter(KEY, "s-1"),
                "cli": client.as_service(KEY, "cli"),
                "operator": client.as_service(KEY, "operator"),
            }.items()
        }
    refused = {name for name, status in statuses.items() if status in (401, 403)}
    assert refused == {"nobody", "gateway", "meter"}
    assert {statuses["cli"], statuses["operator"]} <= {200, 404}
