"""Worlds that nobody would think of: whatever is observed, the planner answers soundly, and once.

Unlike the histories these need not be reachable: a status may contradict the pods, clocks may run backwards.
"""

from dataclasses import replace
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_contracts import conditions as known
from gristmill_contracts import labels
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import (
    TERMINAL_STATES,
    FailurePolicy,
    LastFailure,
    SessionLimits,
    State,
    TrainingSession,
)
from gristmill_sessions.attempts import is_lost, own_pods, present_pods, ranks
from gristmill_sessions.cluster import (
    ApiFailure,
    ModelView,
    Pod,
    PodReason,
    TenantView,
    Volume,
)
from gristmill_sessions.events import events_of
from gristmill_sessions.observed import DeletePods, Observed, Place, Plan, Release, StartDrainJob
from gristmill_sessions.planner import make_plan, next_status
from gristmill_testing.cluster_worlds import PINS, job, resource, serving, world
from gristmill_testing.model_cluster import check_status
from gristmill_testing.worlds import CREATED_US, NOW_US, SECOND_US, UID

times = st.integers(min_value=-2000, max_value=2000).map(
    lambda seconds: NOW_US + seconds * SECOND_US
)
maybe_times = st.one_of(st.none(), times)
TYPES = [
    known.ACCEPTED, known.LEDGER_REGISTERED, known.QUOTA_RESERVED, known.PODS_READY, known.READY, known.SERVING,
    known.PARKED, known.DELETED, known.USAGE_FLUSHED, known.STOPPED,
]  # fmt: skip
STARTED_ONLY = [known.BLOCKED]
ENDS = [known.FAILED, known.EXPIRED]
REASONS = [
    "Because",
    "Queued",
    "TenantDeleted",
    "InProgress",
    "GapRecorded",
    "Recovering",
    "QuotaExceeded",
]


@st.composite
def pods(draw: st.DrawFn) -> Pod:
    attempt = draw(st.sampled_from([None, 0, 1, 1, 2, 3]))
    rank = draw(st.sampled_from([None, 0, 0, 1, 2, 9]))
    phase: Any = draw(
        st.sampled_from(["Pending", "Running", "Running", "Failed", "Succeeded", "Unknown"])
    )
    named = draw(st.sampled_from([True, True, True, False]))
    return Pod(
        name=f"run-1-a{attempt}-{rank}" if named else f"odd-{attempt}-{rank}",
        uid=f"uid-{attempt}-{rank}-{named}",
        owner_uid=draw(st.sampled_from([UID, UID, UID, "", "others"])),
        attempt=attempt,
        rank=rank,
        phase=phase,
        ready=draw(st.booleans()) and phase == "Running",
        created_us=CREATED_US,
        deleting_since_us=draw(st.one_of(st.none(), st.none(), times)),
        ip=draw(st.sampled_from(["", "10.0.0.1"])),
        node=draw(st.sampled_from(["", "node-1"])),
        node_lost_since_us=draw(st.one_of(st.none(), st.none(), times)),
        node_gone=draw(st.sampled_from([False, False, True])),
        reason=draw(st.sampled_from(get_args(PodReason))),
        exit_code=draw(st.sampled_from([None, 0, 1, 42, 137])),
        disrupted=draw(st.booleans()),
        meter_started=draw(st.booleans()),
        meter_since_us=draw(maybe_times),
        meter_deaths=draw(st.integers(min_value=0, max_value=3)),
        meter_last_run_s=draw(st.sampled_from([None, 1.0, 100.0])),
        restart=draw(st.sampled_from(["", "", "x"])),
    )


@st.composite
def conditions(draw: st.DrawFn) -> list[Condition]:
    """As they may lie in a status: Started once and for all, Blocked only after it."""
    started = draw(st.booleans())
    types = draw(
        st.lists(st.sampled_from([*TYPES, *(STARTED_ONLY if started else [])]), unique=True)
    )
    made = {type_: draw(st.sampled_from(["True", "False", "Unknown"])) for type_ in types}
    made |= {known.STARTED: "True"} if started else {}
    made |= (
        {draw(st.sampled_from(ENDS)): "True"}
        if draw(st.sampled_from([False, False, False, True]))
        else {}
    )
    return [
        Condition.model_validate(
            {
                "type": type_,
                "status": status,
                "reason": draw(st.sampled_from(REASONS)),
                "message": "as it was",
                "lastTransitionTime": draw(times),
                "observedGeneration": 1,
            }
        )
        for type_, status in made.items()
    ]


@st.composite
def sessions(draw: st.DrawFn) -> TrainingSession:
    count, failure = draw(st.sampled_from([1, 2, 3])), None
    if draw(st.booleans()):
        reason = draw(st.sampled_from(["WorkerFailed", "Evicted", "QuotaExceeded", "NodeLost"]))
        failure = LastFailure(reason=reason, message="it ended", time_us=draw(maybe_times))
    annotations = draw(
        st.sampled_from([{}, {}, {labels.RESTART: "x"}, {labels.STOP_REQUESTED: "now"}])
    )
    return resource(
        *[each for each in draw(conditions()) if each.type != known.LEDGER_REGISTERED],
        attempt=draw(st.sampled_from([0, 1, 1, 2])),
        workers=count,
        created=draw(st.integers(min_value=0, max_value=count)),
        adopted=draw(st.sampled_from([True, True, True, False])),
        annotations=annotations,
        deleted_us=draw(st.one_of(st.none(), st.none(), times)),
        desired_state=draw(st.sampled_from(["Running", "Running", "Parked", "Stopped"])),
        limits=SessionLimits(
            pending_seconds=draw(st.sampled_from([30, 86_400])), lifetime_seconds=600
        ),
        failure_policy=FailurePolicy(fatal_exit_codes=[42]),
        ttl_seconds_after_finished=draw(st.sampled_from([None, 0, 60])),
        status={
            "last_failure": failure,
            "restarts": draw(st.integers(min_value=0, max_value=4)),
            "start_time_us": draw(maybe_times),
            "end_time_us": draw(maybe_times),
            "pinned": draw(st.sampled_from([None, PINS])),
        },
    )


@st.composite
def worlds(draw: st.DrawFn) -> Observed:
    made: Any = draw(st.sampled_from([None, "Running", "Succeeded", "Failed"]))
    tenant = TenantView(
        name="acme",
        found=draw(st.sampled_from([True, True, True, False])),
        suspended=draw(st.sampled_from([False, False, True])),
        terminating=draw(st.sampled_from([False, False, False, True])),
        budget_exhausted=draw(st.sampled_from([False, False, True])),
        position=draw(st.sampled_from([None, None, 2])),
        max_running=2,
    )
    failure: Any = draw(
        st.sampled_from(
            [None, None, "QuotaExceeded", "Refused", "Invalid", "NameTaken", "Unavailable"]
        )
    )
    state = draw(
        st.sampled_from(["Serving", "Recovering", "Blocked", "Failed", "Draining", "Closed"])
    )
    beat = serving(
        attempt=draw(st.sampled_from([1, 2])), state=state, acked=draw(st.sampled_from([3, 7]))
    )
    beat.at_us = draw(times)
    return world(
        draw(sessions()),
        *draw(st.lists(pods(), max_size=5, unique_by=lambda each: each.name)),
        heartbeat=draw(st.sampled_from([None, beat])),
        registered=draw(st.booleans()),
        error=draw(st.sampled_from(["", "", "it did not work"])),
        settled=draw(st.sampled_from([True, True, True, False])),
        tenant=tenant,
        model=ModelView(found=draw(st.booleans()), ready=draw(st.booleans())),
        failure=None if failure is None else ApiFailure(reason=failure, message="the API's words"),
        job=None
        if made is None
        else job(made, attempt=draw(st.sampled_from([1, 2])), finished_us=draw(maybe_times)),
        volume=Volume(
            found=draw(st.booleans()), deleting=draw(st.booleans()), owned=draw(st.booleans())
        ),
        namespace_terminating=draw(st.sampled_from([False, False, True])),
        ledger_read=draw(st.booleans()),
        directive_given=draw(st.booleans()),
        gap_recorded=draw(st.booleans()),
    )


def check_actions(seen: Observed, plan: Plan) -> None:
    """What no plan may ever want."""
    own = {pod.uid: pod for pod in own_pods(seen)}
    present = {pod.uid for pod in present_pods(seen).values()}
    keeps = seen.session.metadata.deletion_time_us is None and not plan.policy.startswith(
        ("halt", "over")
    )
    for action in plan.actions:
        if isinstance(action, DeletePods):
            for ref in action.pods:
                assert ref.uid in own, f"would delete {ref.name} of others"
                assert not action.force or own[ref.uid].node_gone, (
                    "would force a pod of a living node"
                )
                assert not keeps or ref.uid not in present, "would delete what it wants to keep"
        if isinstance(action, Place):
            waits = [
                pod for uid, pod in own.items() if uid not in present and not is_lost(seen, pod)
            ]
            assert not waits, f"would start attempt {action.attempt} beside {waits}"
            assert action.attempt == seen.session.status.attempt, (
                "would start an attempt that nobody claimed"
            )
            assert len(present) < ranks(seen)
            assert seen.session.status.state not in TERMINAL_STATES
        if isinstance(action, StartDrainJob):
            assert all(is_lost(seen, pod) for pod in own.values()), "a second writer on the volume"
    if Release() in plan.actions:
        assert seen.session.metadata.deletion_time_us is not None
        assert plan.actions[-1] == Release(), "the finalizer goes last"


@settings(max_examples=250, deadline=None)
@given(worlds())
def test_every_world_has_a_sound_answer(seen: Observed) -> None:
    plan = make_plan(seen)
    check_actions(seen, plan)
    status = next_status(seen, plan)
    assert status.state in get_args(State)
    if plan.policy != "settling":
        check_status(seen, status)
    assert plan.again_at_us is None or plan.again_at_us > seen.now_us
    for event in events_of(seen.session.status, status, plan, seen):
        assert event.message
        assert event.reason.isalnum()


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_to_look_again_at_what_did_not_change_says_nothing_new(seen: Observed) -> None:
    """A plan without actions is repeated word for word until something happens."""
    last = None
    for _ in range(12):
        plan = make_plan(seen)
        status = next_status(seen, plan)
        if plan.actions or (status == seen.session.status and plan == last):
            return
        seen = replace(seen, session=seen.session.model_copy(update={"status": status}))
        last = plan
    raise AssertionError(f"does not come to rest: {plan}")
