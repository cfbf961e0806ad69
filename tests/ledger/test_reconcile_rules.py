"""What is a difference and what is none: decided without a database."""

from typing import Any

import pytest

from gristmill_contracts.ids import SessionUid
from gristmill_contracts.reconciliation import (
    STREAM_KIND,
    LogPoint,
    ReconPoint,
    Tally,
    WorkerPoint,
    differences,
    worker_differences,
)
from gristmill_ledger.reconcile.compare import WAIT_US, Session, Stored, judge

NOW_US = 10 * WAIT_US
TOLD = {"usage/forward": Tally(3, train=30), "attempt/sample": Tally(1, prefill=4, sample=6)}
RAN = {"forward": Tally(3, train=30), "optim_step": Tally(2)}


def worker_point(ran: dict[str, Tally], logged: dict[str, Tally], *, cut: int = 0) -> WorkerPoint:
    return WorkerPoint(
        boot_id="boot-1", opening=1, ran=ran, logged=logged, cut_streams=cut, at_us=NOW_US
    )


def session(
    *,
    log: dict[str, Tally] | None = None,
    stored: dict[str, Tally] | None = None,
    unfenced: dict[str, Tally] | None = None,
    acked: int = 4,
    told_us: int = NOW_US,
    **changes: Any,
) -> Session:
    """Four usage events in the log, all of them in the ledger, and nothing that differs unless told."""
    held = TOLD if stored is None else stored
    point = ReconPoint(
        log=LogPoint(after=0, seq=4, told=TOLD if log is None else log),
        workers=changes.pop("workers", []),
        waiting_since_us=changes.pop("waiting_since_us", None),
    )
    return Session(
        tenant="acme",
        uid=SessionUid("s-1"),
        point=point,
        told_us=told_us,
        stored=Stored(
            acked_seq=acked,
            told=held,
            told_unfenced=held if unfenced is None else unfenced,
            **changes,
        ),
    )


def found(session: Session, now_us: int = NOW_US) -> list[tuple[str, str, str, int]]:
    return [
        (each.pair, each.kind, each.subject, each.delta.operations)
        for each in judge(session, now_us).differences
    ]


def test_three_who_say_the_same_do_not_differ() -> None:
    verdict = judge(session(workers=[worker_point(RAN, RAN)]), NOW_US)
    assert (verdict.in_flight, verdict.differences) == (False, ())


@pytest.mark.parametrize(
    ("held", "kind", "operations"),
    [
        (Tally(2, train=20), "missing", -1),
        (Tally(4, train=40), "duplicate", 1),
        (Tally(3, train=31), "mismatch", 0),
        (Tally(3, train=29, prefill=1), "mismatch", 0),
    ],
)
def test_the_ledger_differs_from_the_log_by_one(held: Tally, kind: str, operations: int) -> None:
    stored = TOLD | {"usage/forward": held}
    assert found(session(stored=stored)) == [("meter-ledger", kind, "usage/forward", operations)]


def test_what_only_one_side_knows_differs() -> None:
    assert found(session(stored={"usage/forward": TOLD["usage/forward"]})) == [
        ("meter-ledger", "missing", "attempt/sample", -1)
    ]
    assert found(session(stored=TOLD | {"usage/sample": Tally(1, sample=1)})) == [
        ("meter-ledger", "duplicate", "usage/sample", 1)
    ]


@pytest.mark.parametrize(
    ("logged", "kind", "operations"),
    [
        (Tally(2, train=20), "missing", -1),
        (Tally(4, train=30), "duplicate", 1),
        (Tally(3, train=33), "mismatch", 0),
    ],
)
def test_the_log_differs_from_the_worker_by_one(logged: Tally, kind: str, operations: int) -> None:
    point = worker_point(RAN, RAN | {"forward": logged})
    assert found(session(workers=[point])) == [
        ("worker-meter", kind, "forward of boot boot-1 opening 1", operations)
    ]


def test_time_on_the_device_is_no_difference() -> None:
    assert differences({"forward": Tally(1, device_us=5)}, {"forward": Tally(1)}) == {}


def test_usage_under_way_is_compared_later_and_is_missing_in_the_end() -> None:
    verdict = judge(session(acked=3, stored={}), NOW_US)
    assert (verdict.in_flight, verdict.differences) == (True, ())
    late = session(acked=3, stored={}, told_us=NOW_US - WAIT_US - 1)
    assert found(late) == [("meter-ledger", "missing", "unshipped", -1)]


def test_a_log_that_never_registered_is_under_way_too() -> None:
    known = session()
    unknown = Session(
        tenant=known.tenant, uid=known.uid, point=known.point, told_us=known.told_us, stored=None
    )
    assert judge(unknown, NOW_US).in_flight


def test_rows_of_a_fenced_attempt_may_lie_beside_the_log_or_be_of_it() -> None:
    handed_in = TOLD | {"usage/forward": Tally(4, train=35)}
    assert found(session(stored=handed_in, unfenced=TOLD)) == []
    assert found(session(stored=TOLD, unfenced={})) == []
    assert found(session(stored=handed_in, unfenced={}))[0][1] == "duplicate"


def test_usage_that_is_unknown_differs_by_name() -> None:
    (one,) = judge(session(unknown_events=("e-1",)), NOW_US).differences
    assert (one.kind, one.subject) == ("unknown", "event e-1")


def test_a_worker_that_never_agrees_is_unknown_after_its_time() -> None:
    assert found(session(waiting_since_us=NOW_US - WAIT_US)) == []
    assert found(session(waiting_since_us=NOW_US - WAIT_US - 1)) == [
        ("worker-meter", "unknown", f"since {NOW_US - WAIT_US - 1}", 0)
    ]


def test_the_same_difference_is_the_same_in_every_run_and_another_is_not() -> None:
    ids = [
        judge(session(stored=TOLD | {"usage/forward": held}), now).differences[0].id
        for held, now in (
            (Tally(2, train=20), NOW_US),
            (Tally(2, train=20, device_us=9), NOW_US + 1),
            (Tally(1, train=10), NOW_US),
        )
    ]
    assert ids[0] == ids[1] != ids[2]


STREAMED = Tally(3, prefill=12, sample=30)


@pytest.mark.parametrize(
    ("logged", "cut", "differs"),
    [
        (STREAMED, 0, False),
        (Tally(2, prefill=8, sample=20), 0, True),
        (Tally(2, prefill=8, sample=20), 1, False),
        (Tally(1, prefill=4, sample=10), 1, True),
        (Tally(3, prefill=12, sample=31), 1, True),
        (Tally(4, prefill=12, sample=30), 1, True),
        (STREAMED, 2, False),
    ],
)
def test_a_cut_stream_forgives_what_it_ran_in_vain_and_no_more(
    logged: Tally, cut: int, differs: bool
) -> None:
    point = worker_point({STREAM_KIND: STREAMED}, {STREAM_KIND: logged}, cut=cut)
    assert bool(worker_differences(point)) is differs


def test_a_cut_stream_forgives_nothing_else() -> None:
    ran = {STREAM_KIND: STREAMED, "sample": Tally(1, sample=2)}
    point = worker_point(ran, {STREAM_KIND: STREAMED}, cut=1)
    assert set(worker_differences(point)) == {"sample"}
