"""A session whose pods are there: what they and its meter say becomes its conditions."""

from typing import Any

from gristmill_contracts import conditions, limits
from gristmill_contracts.conditions import condition
from gristmill_contracts.resources import Condition
from gristmill_sessions.attempts import (
    all_ready,
    clock,
    endpoint,
    is_started,
    pending_until_us,
    seconds_us,
)
from gristmill_sessions.cluster import Pod
from gristmill_sessions.observed import Observed, Plan
from gristmill_sessions.policies.attempting import (
    is_forgiven,
    meter_due_us,
    progress_line,
    recovering,
)
from gristmill_sessions.policies.blocking import blocked
from gristmill_sessions.policies.claiming import not_started, standing
from gristmill_sessions.wording import NO_CAPACITY, about, worst


def running(observed: Observed) -> Plan:
    """Always answers: it is the last policy of the chain."""
    if not all_ready(observed):
        return _starting(observed)
    status: dict[str, Any] = {"endpoint": endpoint(observed)}  # Any: fields of the status
    if observed.session.status.start_time_us is None:
        status["start_time_us"] = observed.now_us
    if is_forgiven(observed):
        status["restarts"] = 0
    return Plan(
        policy="running",
        conditions=(
            *standing(),
            condition(conditions.PODS_READY, True, "Running", "all pods are ready"),
            condition(conditions.STARTED, True, "Started", "the session has served"),
            condition(conditions.READY, True, "TakesOperations", "a call now is accepted"),
            _serving(observed),
            blocked(observed),
        ),
        status=status,
    )


def _starting(observed: Observed) -> Plan:
    found = worst(observed)
    reason, message = ("Starting", "the pods are starting")
    if found is not None:
        reason, pod = found
        message = about(observed, pod, reason) + _next(observed, reason, pod)
    kind = "NoCapacity" if reason in NO_CAPACITY else "Recovering"
    line = f"{progress_line(observed)}: {message}"
    notes = (*not_started(observed), *recovering(observed, kind, line))
    return Plan(
        policy="running",
        conditions=(*standing(), condition(conditions.PODS_READY, False, reason, message), *notes),
    )


def _next(observed: Observed, reason: str, pod: Pod) -> str:
    """What happens next, and when."""
    if reason == "NodeNotReady" and pod.node_lost_since_us is not None:
        until = clock(pod.node_lost_since_us + seconds_us(limits.NODE_LOST_S))
        return f" If the node is not back by {until}, a new attempt starts elsewhere."
    due_us = meter_due_us(pod)
    if reason == "MeterNotReady" and due_us is not None:
        return f" It has until {clock(due_us)}."
    if is_started(observed):
        return ""
    return f" The session fails at {clock(pending_until_us(observed))} if it did not start."


def _serving(observed: Observed) -> Condition:
    beat = observed.beat
    if beat is not None and (beat.view.state == "Recovering" or not beat.worker_ready):
        message = (
            f"{progress_line(observed)}: the worker takes up what was done so far from the log"
        )
        return condition(conditions.SERVING, False, "Recovering", message)
    return condition(conditions.SERVING, True, "Serving", "a call now runs at once")
