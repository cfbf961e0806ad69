"""What the supervisor concludes from heartbeats and ends of workers. No process is started."""

from typing import Any

import pytest

from gristmill_cli.local.layout import GroupKey
from gristmill_cli.local.world import Need, World, blamed, needs
from gristmill_contracts import labels
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.usage import Counts
from gristmill_testing.worlds import UID, beat, condition, seat, session

ACME = GroupKey("acme", "tiny")
OTHER = GroupKey("acme", "other")
STARTED = condition("Started")


def named(uid: str, model: str = "tiny", *, started: bool = True) -> TrainingSession:
    made = session(*([STARTED] if started else []))
    meta = made.metadata.model_copy(
        update={"uid": uid, "annotations": {labels.SESSION_ID: uid}, "name": uid}
    )
    ref = made.spec.base_model_ref.model_copy(update={"name": model})
    spec = made.spec.model_copy(update={"base_model_ref": ref})
    return made.model_copy(update={"metadata": meta, "spec": spec})


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({}, {}),
        ({"a": "Serving"}, {ACME: Need(meter=True, worker=True)}),
        ({"a": None}, {ACME: Need(meter=True, worker=True)}),
        ({"a": "Closed"}, {ACME: Need(meter=True, worker=False)}),
        ({"a": "Closed", "b": "Serving"}, {ACME: Need(meter=True, worker=True)}),
        ({"b": "Serving", "a": "Closed"}, {ACME: Need(meter=True, worker=True)}),
        ({"a": "Draining"}, {ACME: Need(meter=True, worker=True)}),
        ({"a": "Failed"}, {ACME: Need(meter=True, worker=True)}),
    ],
)
def test_a_group_needs_a_meter_for_every_seat_and_a_worker_until_all_are_closed(
    states: dict[str, str | None], expected: dict[GroupKey, Need]
) -> None:
    sessions = [named(uid) for uid in states]
    seats = {SessionUid(uid): seat() for uid in states}
    beats = {SessionUid(uid): beat(state) for uid, state in states.items() if state is not None}
    assert needs(sessions, seats, beats) == expected


def test_groups_are_apart_and_a_session_without_a_seat_needs_nothing() -> None:
    sessions = [named("a"), named("b", "other"), named("c", "third")]
    seats = {SessionUid("a"): seat(), SessionUid("b"): seat()}
    assert set(needs(sessions, seats, {})) == {ACME, OTHER}


@pytest.mark.parametrize(
    ("fields", "started", "hit"),
    [
        ({"open_operations": 1}, True, True),
        ({"open_operations": 0}, True, False),
        ({"open_operations": None}, True, True),
        ({"open_operations": 0}, False, True),
        ({"state": "Closed", "open_operations": None}, True, False),
        (None, True, True),
    ],
)
def test_a_dead_worker_is_blamed_on_sessions_that_it_may_have_run(
    fields: dict[str, Any] | None, started: bool, hit: bool
) -> None:
    sessions = [named("a", started=started), named("b", "other")]
    seats = {SessionUid("a"): seat(), SessionUid("b"): seat()}
    beats = {} if fields is None else {SessionUid("a"): beat(**fields)}
    found = [each.metadata.uid for each in blamed(sessions, seats, beats, ACME)]
    assert found == (["a"] if hit else [])


def test_ends_are_counted_until_the_session_gets_further() -> None:
    world = World()
    run = session(STARTED)
    for code in (-9, 1):
        world.worker_ended([run], code, "w.log")
    assert (world.failures[UID].count, world.failures[UID].exit_code) == (2, 1)
    world.take_heartbeats([beat(head=0)])
    assert world.failures[UID].count == 2
    world.take_heartbeats([beat(head=1)])
    assert UID not in world.failures
    world.worker_ended([run], 1, "w.log")
    world.take_heartbeats([beat(head=1)])
    assert world.failures[UID].count == 1
    world.take_heartbeats([beat(head=1, counts=Counts(train=5))])
    assert UID not in world.failures


def test_what_is_observed_is_what_is_known() -> None:
    world = World(registered={UID}, seats={UID: seat()}, errors={UID: "no"})
    world.take_heartbeats([beat()])
    found = world.observe(session(), now_us=5, models={"tiny"}, suspended={"acme"})
    assert (found.model_found, found.tenant_suspended, found.registered) == (True, True, True)
    assert (found.seat, found.error, found.now_us) == (seat(), "no", 5)
    assert found.beat is not None
    world.forget(UID)
    found = world.observe(session(), now_us=5, models=set(), suspended=set())
    assert (found.model_found, found.tenant_suspended, found.registered) == (False, False, False)
    assert (found.seat, found.heartbeat, found.error) == (None, None, "")


def test_a_worker_waits_as_the_most_patient_of_its_sessions_asks() -> None:
    world = World()
    run, other = session(STARTED), named("b")
    assert world.pause_s([run, other], jitter=0) == 0
    world.worker_ended([run, other], 1, "w.log")
    assert world.pause_s([run, other], jitter=0) == 0, "the first restart is at once"
    world.worker_ended([run], 1, "w.log")
    assert world.pause_s([run, other], jitter=0) == 10
    world.worker_ended([run], 1, "w.log")
    assert world.pause_s([run, other], jitter=0) == 20
    world.take_heartbeats([beat(head=1)])
    assert world.pause_s([run, other], jitter=0) == 0
