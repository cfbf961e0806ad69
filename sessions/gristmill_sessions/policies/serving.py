"""A session that has its place: what its meter says becomes its conditions."""

from typing import Any

from gristmill_contracts import conditions
from gristmill_contracts.conditions import condition
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.resources import Condition
from gristmill_sessions.observed import Observed, Plan
from gristmill_sessions.policies.blocking import blocked_at_meter


def serving(observed: Observed) -> Plan:
    """Always answers: it is the last policy of the chain."""
    beat = observed.beat
    if observed.seat is None or beat is None:
        waiting = condition(
            conditions.PODS_READY, False, "Starting", "the meter takes up the session"
        )
        started = conditions.is_true(observed.conditions, conditions.STARTED)
        return Plan(policy="serving", conditions=() if started else (waiting,))
    if not observed.meter_answers:
        return Plan(
            policy="serving",
            conditions=(
                condition(conditions.READY, False, "MeterAway", "its meter is started again"),
                condition(conditions.SERVING, False, "MeterAway", "its meter is started again"),
            ),
        )
    working = beat.worker_ready and beat.view.state in ("Serving", "Blocked")
    status: dict[str, Any] = {"endpoint": observed.seat.endpoint}  # Any: fields of the status
    if working and observed.session.status.start_time_us is None:
        status["start_time_us"] = observed.now_us
    first = (condition(conditions.STARTED, True, "Started"),) if working else ()
    return Plan(
        policy="serving",
        conditions=(
            condition(conditions.LEDGER_REGISTERED, True, "Registered"),
            condition(conditions.PODS_READY, beat.worker_ready, *_pods(observed, beat)),
            *first,
            condition(conditions.READY, True, "TakesOperations"),
            condition(conditions.SERVING, working, *_serving(observed, beat, working=working)),
            _blocked(observed, beat),
        ),
        status=status,
    )


def _pods(observed: Observed, beat: Heartbeat) -> tuple[str, str]:
    if beat.worker_ready:
        return "Running", ""
    if observed.failures.count:
        return "WorkerFailed", observed.failures.message
    return "LoadingWeights", ""


def _serving(observed: Observed, beat: Heartbeat, *, working: bool) -> tuple[str, str]:
    if working:
        return "Serving", ""
    if not conditions.is_true(observed.conditions, conditions.STARTED):
        return "LoadingWeights", ""
    attempts = observed.session.spec.failure_policy.max_restarts
    return "Recovering", f"restart {observed.failures.count} of {attempts}; the log is replayed"


def _blocked(observed: Observed, beat: Heartbeat) -> Condition:
    view = beat.view
    if observed.tenant_suspended:
        tenant = observed.session.metadata.namespace
        return condition(
            conditions.BLOCKED, True, "TenantSuspended", f"tenant {tenant!r} is suspended"
        )
    if view.state == "Blocked":
        return blocked_at_meter(view)
    return condition(conditions.BLOCKED, False, "Unblocked")
