"""How a session comes to its end: failed, expired, stopped; and what is left to do afterwards."""

from typing import Any, Final

from gristmill_contracts import conditions, limits
from gristmill_contracts.conditions import condition
from gristmill_contracts.session import LastFailure
from gristmill_sessions.failure import GiveUp, judge
from gristmill_sessions.observed import Action, DeleteSession, Drain, Observed, Plan, Withdraw

REASONS: Final = {
    "log_lost": "LogLost",
    "replay_diverged": "ReplayDiverged",
    "fenced": "Fenced",
    "volume_failed": "VolumeFailed",
    "operation_failed": "SequenceGapTimedOut",
}
"""Reason of `Failed=True` for the code of the error that a meter failed a session with."""
MESSAGE_CHARS_MAX: Final = 1024
TO_START: Final = (
    conditions.ACCEPTED,
    conditions.LEDGER_REGISTERED,
    conditions.QUOTA_RESERVED,
    conditions.PODS_READY,
)
"""What a session needs before its first start."""


def ended(observed: Observed) -> Plan | None:
    """A session at its end is drained, keeps its results for a while, and may delete itself."""
    is_over = any(
        conditions.is_true(observed.conditions, type_)
        for type_ in (conditions.FAILED, conditions.EXPIRED, conditions.STOPPED)
    )
    if not is_over:
        return None
    end_us = observed.session.status.end_time_us or observed.now_us
    ttl_s = observed.session.spec.ttl_seconds_after_finished
    times = [end_us + int(limits.RESULT_RETENTION_S * 1e6)] if observed.seat else []
    times += [] if ttl_s is None else [end_us + ttl_s * 1_000_000]
    actions: tuple[Action, ...] = ()
    if observed.seat is not None and not observed.seat.stopping:
        actions = (Drain(),)
    elif ttl_s is not None and observed.now_us >= end_us + ttl_s * 1_000_000:
        actions = (DeleteSession(),)
    elif observed.seat is not None and observed.flushed and observed.now_us >= times[0]:
        actions = (Withdraw(),)
    later = [time for time in times if time > observed.now_us]
    return Plan(
        policy="ended",
        actions=actions,
        conditions=(
            condition(conditions.READY, False, "Ended"),
            condition(conditions.SERVING, False, "Ended"),
        ),
        again_at_us=min(later, default=None),
    )


def expiry(observed: Observed) -> Plan | None:
    """The lifetime counts from the first start."""
    lifetime_s = observed.session.spec.limits.lifetime_seconds
    start_us = observed.session.status.start_time_us
    if (
        lifetime_s is None
        or start_us is None
        or observed.now_us < start_us + lifetime_s * 1_000_000
    ):
        return None
    message = f"limits.lifetimeSeconds of {lifetime_s} is over"
    return Plan(
        policy="expiry",
        conditions=(condition(conditions.EXPIRED, True, "LifetimeReached", message),),
        status={"end_time_us": observed.now_us},
    )


def meter_failure(observed: Observed) -> Plan | None:
    """The meter says that the session cannot go on."""
    beat = observed.beat
    if beat is None or beat.view.state != "Failed":
        return None
    error = beat.view.error
    code, message = ("", "the meter failed it") if error is None else (error.code, error.message)
    return _failed(observed, "meter_failure", REASONS.get(code, "MeterReported"), message)


def restarts_exceeded(observed: Observed) -> Plan | None:
    failures = observed.failures
    verdict = judge(
        observed.session.spec.failure_policy, failures.count, failures.exit_code, failures.message
    )
    if not isinstance(verdict, GiveUp):
        return None
    return _failed(
        observed, "restarts_exceeded", verdict.reason, verdict.message, failures.exit_code
    )


def pending_timeout(observed: Observed) -> Plan | None:
    """A session that never starts is given up, with the reason that it waited for last."""
    if conditions.is_true(observed.conditions, conditions.STARTED):
        return None
    pending_s = observed.session.spec.limits.pending_seconds
    if observed.now_us < observed.session.metadata.creation_time_us + pending_s * 1_000_000:
        return None
    waits = [
        each.message or each.reason
        for each in observed.conditions
        if each.status == "False" and each.type in TO_START
    ]
    message = f"not started within limits.pendingSeconds of {pending_s}: {'; '.join(waits)}"
    return _failed(observed, "pending_timeout", "PendingTimeout", message)


def _failed(
    observed: Observed, policy: str, reason: str, message: str, exit_code: int | None = None
) -> Plan:
    text = message[:MESSAGE_CHARS_MAX]
    status: dict[str, Any] = {  # Any: fields of the status
        "end_time_us": observed.now_us,
        "last_failure": LastFailure(reason=reason, message=text, exit_code=exit_code),
    }
    return Plan(
        policy=policy,
        conditions=(condition(conditions.FAILED, True, reason, text),),
        status=status,
    )


def stop(observed: Observed) -> Plan | None:
    """The wish to stop is carried out by the meter; stopped is what has no usage left to post."""
    if observed.session.spec.desired_state != "Stopped":
        return None
    if observed.flushed:
        return Plan(
            policy="stop",
            conditions=(condition(conditions.STOPPED, True, "Stopped"),),
            status={"end_time_us": observed.now_us},
        )
    stopping = observed.seat is not None and observed.seat.stopping
    return Plan(
        policy="stop",
        actions=() if stopping else (Drain(),),
        conditions=(
            condition(conditions.STOPPED, False, "Stopping", "the meter finishes what runs"),
            condition(conditions.READY, False, "Stopping"),
            condition(conditions.SERVING, False, "Stopping"),
        ),
    )
