"""When an attempt is over, and whether another one follows. One rank that ends, ends them all.

The next attempt's number, the count of failures and the failure itself reach the status in one write: whoever
looks again, after a restart too, finds the failed pods to be of an earlier attempt, and counts nothing twice.
"""

from dataclasses import dataclass
from typing import Any, Final

from gristmill_contracts import conditions, limits
from gristmill_contracts.conditions import condition
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import LastFailure, PinnedStatus, WorkersStatus
from gristmill_sessions.attempts import (
    UNCOUNTED,
    clock,
    cluster_of,
    created_count,
    is_lost,
    is_started,
    not_before_us,
    pod_name,
    present_pods,
    ranks,
    restart_wanted,
    seconds_us,
)
from gristmill_sessions.cluster import Pod
from gristmill_sessions.failure import PROGRESS_RESETS_AFTER_S, GiveUp, judge
from gristmill_sessions.observed import Observed, Plan
from gristmill_sessions.policies.blocking import blocked
from gristmill_sessions.wording import about, clip, held_up, vanished

METER_DEATHS_MAX: Final = 2
METER_SHORT_RUN_S: Final = 60.0
ENDED: Final = ("WorkerFailed", "OutOfMemory", "MeterFailed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why an attempt is over."""

    reason: str
    message: str
    pod: Pod | None = None
    rank: int | None = None

    @property
    def counted(self) -> bool:
        return self.reason not in UNCOUNTED and self.reason not in WITHDRAWN


WITHDRAWN: Final = frozenset({"RestartRequested", "QuotaExceeded", "CreationRefused"})
"""The attempt was taken back, nothing of it failed."""


def fatal(observed: Observed) -> Plan | None:
    """What no further attempt could change fails the session at once."""
    failure = cluster_of(observed).failure
    if failure is not None and failure.reason == "Invalid" and _is_incomplete(observed):
        message = (
            f"the API server refuses the pods of attempt {observed.attempt} as invalid: {failure.message.rstrip('. ')}. "
            "Correct the BaseModel's profile or the spec, and create the session again."
        )
        return _failed(observed, Cause(reason="ConfigRefused", message=message), "ConfigRefused")
    for pod in present_pods(observed).values():
        if not pod.ready and held_up(pod) == "ImageInvalid":
            cause = Cause(
                reason="ImageInvalid",
                message=about(observed, pod, "ImageInvalid"),
                pod=pod,
                rank=pod.rank,
            )
            return _failed(observed, cause, "ImageInvalid")
    return None


def attempt_over(observed: Observed) -> Plan | None:
    """The present attempt can not go on: the next one is claimed, or the session has failed."""
    status = observed.session.status
    if observed.attempt == 0 or status.attempt != observed.attempt:
        return None
    cause = find_cause(observed)
    if cause is None:
        return None
    if not cause.counted:
        return _next_attempt(observed, cause, status.restarts)
    failures = status.restarts + 1
    code = None if cause.pod is None else cause.pod.exit_code
    verdict = judge(observed.session.spec.failure_policy, failures, code, cause.message)
    if isinstance(verdict, GiveUp):
        metering = cause.reason == "MeteringUnavailable" and verdict.reason == "MaxRestartsExceeded"
        reason = "MeteringUnavailable" if metering else verdict.reason
        return _failed(
            observed, Cause(reason=reason, message=verdict.message, pod=cause.pod), reason
        )
    return _next_attempt(observed, cause, failures)


def find_cause(observed: Observed) -> Cause | None:
    """The root: what came from outside explains the ends of the other ranks, so it is asked first."""
    pods = sorted(present_pods(observed).values(), key=lambda each: each.rank or 0)
    return (
        _from_outside(observed, pods)
        or _without_meter(observed, pods)
        or _ended(observed, pods)
        or _withdrawn(observed, pods)
    )


def _from_outside(observed: Observed, pods: list[Pod]) -> Cause | None:
    for pod in pods:
        if is_lost(observed, pod):
            return _cause(observed, pod, "NodeLost")
    for pod in pods:
        if pod.disrupted and (pod.ended or pod.deleting):
            known = pod.reason if pod.reason in UNCOUNTED else "Disrupted"
            return _cause(observed, pod, known)
    for pod in pods:
        if pod.deleting:
            return _cause(observed, pod, "PodDeleted")
    if created_count(observed) >= ranks(observed) > len(pods):
        missing = next(
            rank for rank in range(ranks(observed)) if rank not in {pod.rank for pod in pods}
        )
        return Cause(reason="PodDeleted", message=vanished(observed), rank=missing)
    return None


def _without_meter(observed: Observed, pods: list[Pod]) -> Cause | None:
    """Nothing runs unmetered: a meter that does not come up, or does not stay, ends the attempt."""
    for pod in pods:
        short = pod.meter_last_run_s is not None and pod.meter_last_run_s < METER_SHORT_RUN_S
        died = pod.meter_deaths >= METER_DEATHS_MAX and short and not pod.ready
        due_us = meter_due_us(pod)
        if died or (due_us is not None and observed.now_us >= due_us):
            return _cause(observed, pod, "MeteringUnavailable")
    return None


def meter_due_us(pod: Pod) -> int | None:
    """When a meter that is starting must have started."""
    if pod.meter_started or pod.meter_since_us is None:
        return None
    return pod.meter_since_us + seconds_us(limits.METER_START_S)


def _ended(observed: Observed, pods: list[Pod]) -> Cause | None:
    fatal_codes = observed.session.spec.failure_policy.fatal_exit_codes
    ended = [pod for pod in pods if pod.ended]
    if not ended:
        return None
    pod = min(ended, key=lambda each: (each.exit_code not in fatal_codes, each.rank or 0))
    reason = pod.reason if pod.reason in ENDED else "WorkerFailed"
    return _cause(observed, pod, "MeteringUnavailable" if reason == "MeterFailed" else reason)


def _withdrawn(observed: Observed, pods: list[Pod]) -> Cause | None:
    """The user wants other pods, or only a part of the ranks could be made: that part is given back."""
    wanted = restart_wanted(observed)
    for pod in pods:
        if pod.restart != wanted:
            message = "a restart was asked for: the pods end at a snapshot, and the session goes on in new ones."
            return Cause(reason="RestartRequested", message=message, pod=pod)
    failure = cluster_of(observed).failure
    if failure is None or failure.reason not in ("QuotaExceeded", "Refused"):
        return None
    if not 0 < len(pods) < ranks(observed):
        return None
    quota = failure.reason == "QuotaExceeded"
    message = (
        f"only {len(pods)} of {ranks(observed)} pods could be made; they are given back, so that nobody waits for a "
        f"part: {failure.message}"
    )
    return Cause(
        reason="QuotaExceeded" if quota else "CreationRefused", message=message, pod=pods[0]
    )


def _is_incomplete(observed: Observed) -> bool:
    return observed.attempt > 0 and len(present_pods(observed)) < ranks(observed)


def _cause(observed: Observed, pod: Pod, reason: str) -> Cause:
    return Cause(reason=reason, message=about(observed, pod, reason), pod=pod, rank=pod.rank)


# --- what follows --------------------------------------------------------------------------------


def _next_attempt(observed: Observed, cause: Cause, restarts: int) -> Plan:
    number = observed.attempt + 1
    status: dict[str, Any] = {  # Any: fields of the status
        "attempt": number,
        "restarts": restarts,
        "endpoint": "",
        "workers": WorkersStatus(desired=ranks(observed)),
    }
    if cause.reason == "RestartRequested":
        status["pinned"] = _pinned_anew(observed)
    else:
        status["last_failure"] = _failure(observed, cause)
    said = f"{cause.message} Attempt {number} follows{_counted(observed, cause, restarts)}."
    return Plan(
        policy="attempt_over",
        conditions=(
            condition(conditions.PODS_READY, False, cause.reason, clip(said)),
            *recovering(observed, "Recovering", clip(said)),
        ),
        status=status,
    )


def _counted(observed: Observed, cause: Cause, restarts: int) -> str:
    if cause.reason in UNCOUNTED:
        return ", and the failure does not count against failurePolicy.maxRestarts"
    if not cause.counted:
        return ""
    return f", after restart {restarts} of {observed.session.spec.failure_policy.max_restarts}"


def recovering(observed: Observed, reason: str, message: str) -> tuple[Condition, ...]:
    """Of a session that started: it is Ready as long as it is on its way back. Before that it is neither."""
    if not is_started(observed):
        return ()
    lost = reason == "NoCapacity"
    return (
        condition(conditions.READY, not lost, reason if lost else "Recovering", message),
        condition(conditions.SERVING, False, reason, message),
        blocked(observed),
    )


def progress_line(observed: Observed) -> str:
    """`attempt 3, restart 2 of 3`"""
    status, policy = observed.session.status, observed.session.spec.failure_policy
    line = f"attempt {observed.attempt}, restart {status.restarts} of {policy.max_restarts}"
    due = not_before_us(observed)
    return f"{line}; not before {clock(due)}" if due > observed.now_us else line


def _pinned_anew(observed: Observed) -> PinnedStatus:
    """A restart moves the session onto the present images; its prices stay what they were."""
    pins, known = cluster_of(observed).pins, observed.session.status.pinned
    if known is None:
        return pins
    return pins.model_copy(
        update={"rate_card_uid": known.rate_card_uid, "rate_card_hash": known.rate_card_hash}
    )


def _failure(observed: Observed, cause: Cause) -> LastFailure:
    pod, rank = cause.pod, cause.rank
    if pod is not None:
        name, rank, code = pod.name, pod.rank, pod.exit_code
    else:
        name, code = "" if rank is None else pod_name(observed, observed.attempt, rank), None
    return LastFailure(
        reason=cause.reason,
        message=clip(cause.message),
        exit_code=code,
        pod=name,
        rank=rank,
        time_us=observed.now_us,
    )


def _failed(observed: Observed, cause: Cause, reason: str) -> Plan:
    said = clip(cause.message)
    return Plan(
        policy="failed",
        conditions=(condition(conditions.FAILED, True, reason, said),),
        status={
            "end_time_us": observed.now_us,
            "last_failure": _failure(observed, cause),
        },
    )


# --- a session that recovered --------------------------------------------------------------------


def restarts_forgiven_us(observed: Observed) -> int | None:
    """When the failures so far stop to count; None = they do not, or there are none."""
    ready = conditions.find(observed.conditions, conditions.PODS_READY)
    if observed.session.status.restarts == 0 or ready is None or ready.status != "True":
        return None
    return ready.last_transition_time_us + seconds_us(PROGRESS_RESETS_AFTER_S)


def is_forgiven(observed: Observed) -> bool:
    """It ran for long enough, and worked in that time."""
    due_us, beat = restarts_forgiven_us(observed), observed.beat
    if due_us is None or beat is None or observed.now_us < due_us:
        return False
    return beat.view.last_activity_us > due_us - seconds_us(PROGRESS_RESETS_AFTER_S)
