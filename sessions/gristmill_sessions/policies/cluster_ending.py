"""How a session of a cluster ends: stopped, over, deleted."""

from typing import Final

from gristmill_contracts import conditions, labels, limits
from gristmill_contracts.conditions import condition
from gristmill_contracts.resources import Condition
from gristmill_sessions.attempts import (
    cluster_of,
    is_lost,
    named,
    own_pods,
    seconds_us,
)
from gristmill_sessions.observed import (
    Action,
    DeleteSession,
    KeepVolume,
    Observed,
    Plan,
    Release,
    RemoveVolume,
)
from gristmill_sessions.policies.closing import (
    Step,
    close,
    record_gap,
    remove_pods,
    stuck_pods,
)
from gristmill_sessions.queue import is_over
from gristmill_sessions.wording import SLOW

# --- stopped -------------------------------------------------------------------------------------


def stop_wanted(observed: Observed) -> bool:
    """Once asked for it is for ever: the annotation may be taken back, the stop may not."""
    session = observed.session
    return (
        session.spec.desired_state == "Stopped"
        or labels.STOP_REQUESTED in session.metadata.annotations
        or conditions.find(observed.conditions, conditions.STOPPED) is not None
    )


def halt(observed: Observed) -> Plan | None:
    """A stop: the meter finishes what runs, and stopped is what has no pod and no usage left to post."""
    if not stop_wanted(observed):
        return None
    known = conditions.find(observed.conditions, conditions.STOPPED)
    step = close(observed, observed.now_us if known is None else known.last_transition_time_us)
    if step.done:
        said = condition(
            conditions.STOPPED, True, "Stopped", f"the session was stopped as asked; {step.message}"
        )
        return Plan(
            policy="halt",
            actions=step.actions,
            conditions=(
                said,
                *_flush_note(observed, step),
                *_over("the session was stopped", idle=True),
            ),
            status={"queue": None, "end_time_us": observed.now_us},
        )
    stopping = "the session is being stopped"
    return Plan(
        policy="halt",
        actions=step.actions,
        conditions=(
            condition(conditions.STOPPED, False, "Stopping", step.message),
            *_flush_note(observed, step),
            condition(conditions.READY, False, "Stopping", stopping),
            condition(conditions.SERVING, False, "Stopping", stopping),
        ),
        status={"queue": None},
        again_at_us=step.again_at_us,
    )


# --- over ----------------------------------------------------------------------------------------


def over(observed: Observed) -> Plan | None:
    """A session at its end gives up its pods, and may delete itself after a while. It never comes back."""
    if not is_over(observed.session):
        return None
    status, spec = observed.session.status, observed.session.spec
    end_us = status.end_time_us or observed.now_us
    step = close(observed, end_us)
    ttl_s, actions, again_us = spec.ttl_seconds_after_finished, step.actions, step.again_at_us
    if step.done and ttl_s is not None:
        gone_us = end_us + seconds_us(ttl_s)
        due = observed.now_us >= gone_us
        actions = (*actions, DeleteSession()) if due else actions
        again_us = None if due else gone_us
    return Plan(
        policy="over",
        actions=actions,
        conditions=(
            *_flush_note(observed, step),
            *_over("the session is over", idle=not own_pods(observed)),
        ),
        status={"queue": None, "end_time_us": end_us},
        again_at_us=again_us,
    )


def _over(message: str, *, idle: bool) -> tuple[Condition, ...]:
    """idle: no pod is left, so nothing is held of any quota."""
    released = (
        condition(conditions.PODS_READY, False, "Ended", f"{message}; no pod is left"),
        condition(conditions.QUOTA_RESERVED, False, "Released", f"{message}; its place is free"),
    )
    return (
        condition(conditions.READY, False, "Ended", f"{message}; results are kept for a while"),
        condition(conditions.SERVING, False, "Ended", message),
        condition(conditions.BLOCKED, False, "Ended", message),
        *(released if idle else ()),
    )


def _flush_note(observed: Observed, step: Step) -> tuple[Condition, ...]:
    """Only of a session that may have usage: the others would be told of a ledger that never heard of them."""
    return (step.flushed,) if observed.ran else ()


# --- deleted -------------------------------------------------------------------------------------


FLUSH_ABANDON_US: Final = seconds_us(limits.FLUSH_ABANDON_S)
FINALIZER_SLOW_S: Final = 300.0
"""A deletion that takes longer is told of."""


def removal(observed: Observed) -> Plan | None:
    """A deleted session goes once its pods are gone and the ledger has its usage, or knows that it is lost."""
    meta = observed.session.metadata
    if meta.deletion_time_us is None:
        return None
    if labels.METERING_FLUSH not in meta.finalizers:
        others = ", ".join(meta.finalizers) or "nothing"
        return _deleting("InProgress", f"waits for finalizers of others: {others}")
    since_us = _noticed_us(observed)
    step = close(observed, since_us)
    overdue_us = since_us + FLUSH_ABANDON_US
    overdue = observed.now_us >= overdue_us
    if step.done:
        return _go(observed, step, recorded=step.reason == "GapRecorded")
    if overdue and not observed.flushed:
        return _abandon(observed)
    left = [pod for pod in stuck_pods(observed, own_pods(observed)) if not is_lost(observed, pod)]
    reason = "PodStuckTerminating" if overdue and left else "InProgress"
    failed = f" The last step failed and is tried again: {observed.error}" if observed.error else ""
    slow_us = meta.deletion_time_us + seconds_us(FINALIZER_SLOW_S)
    slow = f" {SLOW}" if observed.now_us >= slow_us else ""
    again = [
        time
        for time in (step.again_at_us, slow_us, overdue_us)
        if time is not None and time > observed.now_us
    ]
    return _deleting(
        reason,
        step.message + failed + slow,
        actions=step.actions,
        notes=_flush_note(observed, step),
        again_at_us=min(again, default=None),
    )


def _noticed_us(observed: Observed) -> int:
    """When the deletion was noticed: however long nobody looked, the meter is asked, and has its time."""
    known = conditions.find(observed.conditions, conditions.DELETED)
    return observed.now_us if known is None else known.last_transition_time_us


def _go(observed: Observed, step: Step, *, recorded: bool) -> Plan:
    """All is told: the volume is left or removed, and the resource may go."""
    failed = bool(observed.error)
    message = f"{step.message}; the volume and the finalizer follow"
    return _deleting(
        "InProgress",
        f"{message}. The last step failed and is tried again: {observed.error}"
        if failed
        else message,
        actions=(*step.actions, *_volume(observed, flushed=not recorded), Release()),
        notes=_flush_note(observed, step),
    )


def _abandon(observed: Observed) -> Plan:
    """The time for the usage to come in is over. The volume is kept: it holds what nobody has."""
    attempt, pods = observed.attempt, own_pods(observed)
    message = (
        f"the usage of attempt {attempt} did not come in within {limits.FLUSH_ABANDON_S:.0f} s: a gap is recorded at "
        f"the ledger, and the volume is kept with the label {labels.UNFLUSHED}"
    )
    if observed.error:
        message += f". This failed and is tried again: {observed.error}"
    if pods:
        message += f". Pods left: {named(pods)}"
    return _deleting(
        "FlushFailed" if observed.error else "InProgress",
        message,
        actions=(
            *remove_pods(observed, pods),
            record_gap(observed, "FlushAbandoned"),
            *_volume(observed, flushed=False),
            Release(),
        ),
        notes=(condition(conditions.USAGE_FLUSHED, False, "Abandoned", message),),
    )


def _volume(observed: Observed, *, flushed: bool) -> tuple[Action, ...]:
    cluster = cluster_of(observed)
    volume = cluster.volume
    if not volume.found or volume.deleting or cluster.namespace_terminating:
        return ()
    if not flushed:
        return (KeepVolume(unflushed=True),)
    if observed.session.spec.storage.retain == "Retain":
        return (KeepVolume(unflushed=False),) if volume.owned else ()
    return () if volume.unflushed else (RemoveVolume(),)


def _deleting(
    reason: str,
    message: str,
    *,
    actions: tuple[Action, ...] = (),
    notes: tuple[Condition, ...] = (),
    again_at_us: int | None = None,
) -> Plan:
    gone = "the session is being deleted"
    return Plan(
        policy="removal",
        actions=actions,
        conditions=(
            condition(conditions.DELETED, False, reason, message),
            condition(conditions.READY, False, "Deleting", gone),
            condition(conditions.SERVING, False, "Deleting", gone),
            *notes,
        ),
        status={"queue": None},
        again_at_us=again_at_us,
    )
