"""What the planner answers in each situation of a session's life, and in which order it asks."""

from typing import Any

import pytest

from gristmill_contracts import conditions as known
from gristmill_contracts import limits
from gristmill_contracts.http import Problem
from gristmill_contracts.session import FailurePolicy, SessionLimits, TrainingSession
from gristmill_contracts.usage import Counts
from gristmill_sessions.observed import (
    Adopt,
    DeleteSession,
    Drain,
    Observed,
    Place,
    Plan,
    Register,
    Release,
    RemoveFiles,
    Withdraw,
    WorkerFailures,
)
from gristmill_sessions.planner import make_plan, next_status, write_is_due
from gristmill_sessions.policies.deletion import FLUSH_S_MAX
from gristmill_testing.worlds import (
    CREATED_US,
    NOW_US,
    SECOND_US,
    beat,
    condition,
    observed,
    seat,
    session,
)

STARTED = condition("Started")
CLOSED = beat("Closed", acked=7, head=7)
UNFLUSHED = beat("Closed", acked=6, head=7)
DELETED_US = NOW_US - SECOND_US
OVERDUE_US = NOW_US - FLUSH_S_MAX * SECOND_US


def failures(count: int, code: int = 1) -> WorkerFailures:
    return WorkerFailures(count=count, exit_code=code, message="it ended")


def over(kind: str, **fields: Any) -> TrainingSession:
    """A session at its end, a moment ago."""
    return session(condition(kind), STARTED, status={"end_time_us": NOW_US - SECOND_US}, **fields)


def no_start(text: str) -> Observed:
    waiting = condition("Accepted", "False", "ModelNotFound", message=text)
    late = CREATED_US + 31 * SECOND_US
    return observed(
        session(waiting, limits=SessionLimits(pending_seconds=30)), now_us=late, model_found=False
    )


CASES: list[tuple[str, Observed, str, tuple[object, ...]]] = [
    # --- starting
    ("a new session is adopted first", observed(session(adopted=False)), "adopt", (Adopt(),)),
    ("a missing model waits", observed(model_found=False), "acceptance", ()),
    ("too many workers wait", observed(session(workers=2)), "acceptance", ()),
    ("a suspended tenant's session waits", observed(tenant_suspended=True), "acceptance", ()),
    (
        "nothing starts before the ledger knows",
        observed(registered=False),
        "registration",
        (Register(),),
    ),
    ("then it is placed", observed(), "placement", (Place(1),)),
    (
        "a further attempt keeps its number",
        observed(session(status={"attempt": 3})),
        "placement",
        (Place(3),),
    ),
    ("a seated one waits for its meter", observed(seat=seat()), "serving", ()),
    ("and is served", observed(seat=seat(), heartbeat=beat()), "serving", ()),
    (
        "a heartbeat of an earlier attempt is not its own",
        observed(seat=seat(attempt=2), heartbeat=beat("Failed", attempt=1)),
        "serving",
        (),
    ),
    (
        "a started session goes on without its model",
        observed(session(STARTED), seat=seat(), heartbeat=beat(), model_found=False),
        "serving",
        (),
    ),
    # --- stopping
    (
        "a stop is handed to the meter",
        observed(session(STARTED, desired_state="Stopped"), seat=seat(), heartbeat=beat()),
        "stop",
        (Drain(),),
    ),
    (
        "and handed over once",
        observed(
            session(STARTED, desired_state="Stopped"),
            seat=seat(stopping=True),
            heartbeat=beat("Draining"),
        ),
        "stop",
        (),
    ),
    (
        "one that was never placed stops at once",
        observed(session(desired_state="Stopped")),
        "stop",
        (),
    ),
    (
        "a stopped session keeps its seat for its results",
        observed(
            over("Stopped", desired_state="Stopped"), seat=seat(stopping=True), heartbeat=CLOSED
        ),
        "ended",
        (),
    ),
    (
        "and loses it when they may go",
        observed(
            over("Stopped", desired_state="Stopped"),
            seat=seat(stopping=True),
            heartbeat=CLOSED,
            now_us=NOW_US + int(limits.RESULT_RETENTION_S) * SECOND_US,
        ),
        "ended",
        (Withdraw(),),
    ),
    (
        "but not before its usage is posted",
        observed(
            over("Stopped", desired_state="Stopped"),
            seat=seat(stopping=True),
            heartbeat=UNFLUSHED,
            now_us=NOW_US + int(limits.RESULT_RETENTION_S) * SECOND_US,
        ),
        "ended",
        (),
    ),
    # --- failing
    (
        "what the meter failed is failed",
        observed(session(STARTED), seat=seat(), heartbeat=beat("Failed")),
        "meter_failure",
        (),
    ),
    (
        "a failed session is drained",
        observed(over("Failed"), seat=seat(), heartbeat=beat("Failed")),
        "ended",
        (Drain(),),
    ),
    (
        "a worker that ends too often fails it",
        observed(session(STARTED), seat=seat(), heartbeat=beat(), failures=failures(4)),
        "restarts_exceeded",
        (),
    ),
    (
        "one that ends as often as allowed does not",
        observed(session(STARTED), seat=seat(), heartbeat=beat(), failures=failures(3)),
        "serving",
        (),
    ),
    (
        "a fatal exit fails it at once",
        observed(
            session(STARTED, failure_policy=FailurePolicy(fatal_exit_codes=[42])),
            seat=seat(),
            failures=failures(1, 42),
        ),
        "restarts_exceeded",
        (),
    ),
    (
        "what failed while it was being stopped has failed",
        observed(
            session(STARTED, desired_state="Stopped"),
            seat=seat(stopping=True),
            heartbeat=beat("Failed"),
        ),
        "meter_failure",
        (),
    ),
    (
        "a lifetime that ends while it is being stopped has ended",
        observed(
            session(
                STARTED,
                desired_state="Stopped",
                limits=SessionLimits(lifetime_seconds=60),
                status={"start_time_us": NOW_US - 60 * SECOND_US},
            ),
            seat=seat(stopping=True),
            heartbeat=beat("Draining"),
        ),
        "expiry",
        (),
    ),
    ("one that never starts is given up", no_start("no model"), "pending_timeout", ()),
    (
        "one that started has no pending time",
        observed(
            session(STARTED, limits=SessionLimits(pending_seconds=30)),
            seat=seat(),
            heartbeat=beat(),
        ),
        "serving",
        (),
    ),
    (
        "a stop wins over a worker that fails",
        observed(session(desired_state="Stopped"), seat=seat(), failures=failures(9)),
        "stop",
        (Drain(),),
    ),
    # --- expiring
    (
        "a lifetime ends",
        observed(
            session(
                STARTED,
                limits=SessionLimits(lifetime_seconds=60),
                status={"start_time_us": NOW_US - 60 * SECOND_US},
            ),
            seat=seat(),
            heartbeat=beat(),
        ),
        "expiry",
        (),
    ),
    (
        "not a moment early",
        observed(
            session(
                STARTED,
                limits=SessionLimits(lifetime_seconds=60),
                status={"start_time_us": NOW_US - 60 * SECOND_US + 1},
            ),
            seat=seat(),
            heartbeat=beat(),
        ),
        "serving",
        (),
    ),
    ("an expired session is drained", observed(over("Expired"), seat=seat()), "ended", (Drain(),)),
    # --- deleting
    (
        "a deleted session is drained first",
        observed(session(deleted_us=DELETED_US), seat=seat(), heartbeat=beat()),
        "deletion",
        (Drain(),),
    ),
    (
        "and waits for the ledger",
        observed(session(deleted_us=DELETED_US), seat=seat(stopping=True), heartbeat=UNFLUSHED),
        "deletion",
        (),
    ),
    (
        "and waits for a word of its meter",
        observed(session(deleted_us=DELETED_US), seat=seat(stopping=True)),
        "deletion",
        (),
    ),
    (
        "then it goes",
        observed(session(deleted_us=DELETED_US), seat=seat(stopping=True), heartbeat=CLOSED),
        "deletion",
        (Withdraw(), RemoveFiles(flushed=True), Release()),
    ),
    (
        "one without a seat goes at once",
        observed(session(deleted_us=DELETED_US)),
        "deletion",
        (RemoveFiles(flushed=True), Release()),
    ),
    (
        "the wait for the ledger is bounded, and the log is kept aside",
        observed(session(deleted_us=OVERDUE_US), seat=seat(stopping=True), heartbeat=UNFLUSHED),
        "deletion",
        (Withdraw(), RemoveFiles(flushed=False), Release()),
    ),
    (
        "a deletion is before everything",
        observed(
            session(condition("Failed"), deleted_us=DELETED_US, desired_state="Stopped"),
            registered=False,
        ),
        "deletion",
        (RemoveFiles(flushed=True), Release()),
    ),
    (
        "finalizers of others are left alone",
        observed(session(deleted_us=DELETED_US, adopted=False)),
        "deletion",
        (),
    ),
    (
        "a finished session deletes itself when asked to",
        observed(over("Failed", ttl_seconds_after_finished=1)),
        "ended",
        (DeleteSession(),),
    ),
    ("not a moment early", observed(over("Failed", ttl_seconds_after_finished=2)), "ended", ()),
]


@pytest.mark.parametrize(
    ("world", "policy", "actions"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_planner_answers(world: Observed, policy: str, actions: tuple[object, ...]) -> None:
    plan = make_plan(world)
    assert (plan.policy, plan.actions) == (policy, actions)


def said(plan: Plan, type_: str) -> tuple[str, str]:
    found = known.find(plan.conditions, type_)
    assert found is not None, plan
    return found.status, found.reason


def test_a_session_runs_from_its_first_working_heartbeat_on() -> None:
    loading = observed(seat=seat(), heartbeat=beat(worker_ready=False))
    status = next_status(loading, make_plan(loading))
    assert (status.state, status.endpoint) == ("Created", "http://127.0.0.1:1")
    working = observed(session(condition("QuotaReserved")), seat=seat(), heartbeat=beat())
    status = next_status(working, make_plan(working))
    assert (status.state, status.start_time_us) == ("Running", NOW_US)


def test_a_start_time_is_kept_over_restarts() -> None:
    world = observed(session(STARTED, status={"start_time_us": 7}), seat=seat(), heartbeat=beat())
    assert next_status(world, make_plan(world)).start_time_us == 7


def test_a_recovering_session_stays_running_and_ready_but_does_not_serve() -> None:
    world = observed(
        session(STARTED),
        seat=seat(),
        heartbeat=beat("Recovering", worker_ready=False),
        failures=failures(2),
    )
    plan = make_plan(world)
    assert next_status(world, plan).state == "Running"
    assert said(plan, known.READY) == ("True", "TakesOperations")
    assert said(plan, known.SERVING) == ("False", "Recovering")
    assert said(plan, known.PODS_READY) == ("False", "WorkerFailed")


def test_a_session_without_its_meter_is_running_and_not_ready() -> None:
    world = observed(session(STARTED), seat=seat(), heartbeat=beat(), meter_answers=False)
    plan = make_plan(world)
    assert next_status(world, plan).state == "Running"
    assert said(plan, known.READY) == ("False", "MeterAway")
    assert said(plan, known.SERVING) == ("False", "MeterAway")


def test_a_gap_blocks_a_session_and_its_number_is_named() -> None:
    gap = beat("Blocked", missing_number=4, last_received_number=9)
    world = observed(session(STARTED), seat=seat(), heartbeat=gap)
    plan = make_plan(world)
    assert said(plan, known.BLOCKED) == ("True", "SequenceGap")
    status = next_status(world, plan)
    assert (status.state, status.last_received_sequence) == ("Blocked", 9)
    blocked = known.find(status.conditions, known.BLOCKED)
    assert blocked is not None
    assert "operation 4 is missing" in blocked.message


def test_an_exhausted_budget_blocks_a_session_in_the_ledgers_words() -> None:
    problem = Problem(
        code="budget_exhausted", message="budget acme/tenant has 0 left", retryable=True
    )
    world = observed(
        session(STARTED), seat=seat(), heartbeat=beat("Blocked", error=problem, missing_number=4)
    )
    plan = make_plan(world)
    assert said(plan, known.BLOCKED) == ("True", "BudgetExhausted")
    status = next_status(world, plan)
    assert status.state == "Blocked"
    blocked = known.find(status.conditions, known.BLOCKED)
    assert blocked is not None
    assert "budget acme/tenant has 0 left" in blocked.message


def test_a_filled_gap_unblocks_it() -> None:
    world = observed(session(STARTED, condition("Blocked")), seat=seat(), heartbeat=beat())
    assert next_status(world, make_plan(world)).state == "Running"


def test_a_suspended_tenant_blocks_what_runs() -> None:
    world = observed(session(STARTED), seat=seat(), heartbeat=beat(), tenant_suspended=True)
    plan = make_plan(world)
    assert said(plan, known.BLOCKED) == ("True", "TenantSuspended")
    assert next_status(world, plan).state == "Blocked"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("log_lost", "LogLost"),
        ("replay_diverged", "ReplayDiverged"),
        ("operation_failed", "SequenceGapTimedOut"),
        ("volume_failed", "VolumeFailed"),
        ("something_new", "MeterReported"),
    ],
)
def test_a_failure_at_the_meter_keeps_its_words(code: str, reason: str) -> None:
    failed = beat("Failed", error=Problem(code=code, message="number 4 did not arrive"))
    world = observed(session(STARTED), seat=seat(), heartbeat=failed)
    status = next_status(world, make_plan(world))
    assert (status.state, status.end_time_us) == ("Failed", NOW_US)
    assert status.last_failure is not None
    assert status.last_failure.reason == reason
    assert status.last_failure.message == "number 4 did not arrive"


def test_a_session_given_up_says_what_it_waited_for() -> None:
    world = no_start("there is no base model 'x'")
    status = next_status(world, make_plan(world))
    assert status.state == "Failed"
    assert status.last_failure is not None
    assert status.last_failure.reason == "PendingTimeout"
    assert "there is no base model 'x'" in status.last_failure.message


def test_the_exit_code_of_a_worker_is_kept() -> None:
    world = observed(session(STARTED), seat=seat(), failures=failures(4, -9))
    status = next_status(world, make_plan(world))
    assert status.last_failure is not None
    assert (status.last_failure.reason, status.last_failure.exit_code) == (
        "MaxRestartsExceeded",
        -9,
    )


def test_a_stop_is_complete_once_all_usage_is_posted() -> None:
    stopping = session(STARTED, desired_state="Stopped")
    waiting = observed(stopping, seat=seat(stopping=True), heartbeat=UNFLUSHED)
    assert next_status(waiting, make_plan(waiting)).state == "Stopping"
    done = observed(stopping, seat=seat(stopping=True), heartbeat=CLOSED)
    status = next_status(done, make_plan(done))
    assert (status.state, status.end_time_us) == ("Stopped", NOW_US)


def test_a_deletion_that_keeps_failing_shows_it_when_its_time_is_over() -> None:
    early = observed(session(deleted_us=DELETED_US), error="disk says no")
    assert next_status(early, make_plan(early)).state == "Deleting"
    late = observed(session(deleted_us=OVERDUE_US), error="disk says no")
    plan = make_plan(late)
    assert next_status(late, plan).state == "DeletionFailed"
    assert Release() in plan.actions


def test_usage_and_activity_come_from_the_heartbeat() -> None:
    counts = Counts(prefill=1, cached_prefill=2, sample=3, train=4)
    told = beat(counts=counts, last_activity_us=NOW_US, last_received_number=5)
    world = observed(session(STARTED), seat=seat(), heartbeat=told)
    status = next_status(world, make_plan(world))
    assert status.usage.model_dump() == {"prefill": 1, "cached_prefill": 2, "sample": 3, "train": 4}
    assert status.last_activity_time_us == NOW_US - NOW_US % (60 * SECOND_US)


def test_what_only_informs_is_not_written_at_every_heartbeat() -> None:
    world = observed(session(STARTED), seat=seat(), heartbeat=beat())
    before = next_status(world, make_plan(world))
    informed = before.model_copy(update={"last_received_sequence": 9})
    changed = before.model_copy(update={"state": "Blocked"})
    assert not write_is_due(before, before, since_last_s=1e9)
    assert not write_is_due(before, informed, since_last_s=9)
    assert write_is_due(before, informed, since_last_s=10)
    assert write_is_due(before, changed, since_last_s=0)
