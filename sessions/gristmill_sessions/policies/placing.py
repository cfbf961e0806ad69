"""The pods of an attempt are made once those of all earlier ones are gone. Strays are always removed."""

from gristmill_contracts import conditions
from gristmill_contracts.conditions import condition
from gristmill_contracts.resources import Condition
from gristmill_sessions.attempts import (
    clock,
    cluster_of,
    is_lost,
    is_started,
    is_volume_gone,
    named,
    not_before_us,
    pending_until_us,
    present_pods,
    ranks,
    stray_pods,
)
from gristmill_sessions.observed import Observed, Place, Plan
from gristmill_sessions.policies.attempting import progress_line, recovering
from gristmill_sessions.policies.claiming import standing
from gristmill_sessions.policies.closing import remove_pods, stuck, stuck_pods

ASK_AGAIN_S = 30


def strays(observed: Observed) -> Plan | None:
    """Pods of earlier attempts and of none go, survivors of a failed one among them: with their grace."""
    actions = remove_pods(observed, stray_pods(observed))
    return Plan(policy="strays", actions=actions) if actions else None


def placement(observed: Observed) -> Plan | None:
    """Make what is missing of the present attempt, when nothing stands in the way."""
    attempt = observed.attempt
    is_whole = len(present_pods(observed)) == ranks(observed)
    if attempt == 0 or (is_whole and not is_volume_gone(observed)):
        return None
    if observed.session.status.attempt != attempt:
        # The status was lost, or is behind the pods: it comes first.
        return Plan(policy="placement", status={"attempt": attempt})
    waiting = _old_pods(observed) or _pause(observed) or _surroundings(observed)
    if waiting is not None:
        return waiting
    lost = tuple(pod.uid for pod in stray_pods(observed) if is_lost(observed, pod))
    return Plan(
        policy="placement",
        actions=(Place(attempt, beside=lost),),
        conditions=_placing(observed),
    )


def _old_pods(observed: Observed) -> Plan | None:
    """The volume has one writer: the pods of earlier attempts must be gone, or beyond reach."""
    left = [pod for pod in stray_pods(observed) if not is_lost(observed, pod)]
    if not left:
        return None
    late = stuck_pods(observed, left)
    reason = "PodStuckTerminating" if late else "PodsTerminating"
    message = stuck(observed, left) if late else f"waits for pods to end: {named(left)}"
    return _wait(
        observed,
        reason,
        f"{message}. Attempt {observed.attempt} starts then.",
        again_at_us=observed.now_us + ASK_AGAIN_S * 1_000_000,
    )


def _pause(observed: Observed) -> Plan | None:
    due_us = not_before_us(observed)
    if observed.now_us >= due_us:
        return None
    failure = observed.session.status.last_failure
    reason = failure.reason if failure is not None and failure.reason else "Backoff"
    why = f"{failure.message.rstrip()} " if failure is not None and failure.message else ""
    message = f"{why}Attempt {observed.attempt} starts at {clock(due_us)}."
    if reason == "QuotaExceeded":
        return _wait(observed, reason, message, again_at_us=due_us, quota=False)
    return _wait(observed, reason, message, again_at_us=due_us)


def _surroundings(observed: Observed) -> Plan | None:
    tenant, model = cluster_of(observed).tenant, cluster_of(observed).model
    name = observed.session.spec.base_model_ref.name
    if tenant.suspended:
        message = f"tenant {tenant.name!r} is suspended: no pods are made until its spec.suspended is false"
        return _wait(observed, "TenantSuspended", message)
    if not tenant.found or tenant.terminating:
        message = f"the tenant of namespace {observed.session.metadata.namespace!r} is gone: no pods are made"
        return _wait(observed, "TenantDeleted", message)
    if not model.found or not model.ready:
        why = (
            model.message or "it is not there" if not model.found else model.message or "not ready"
        )
        return _wait(observed, "WaitingForModel", f"BaseModel {name!r} can not be used: {why}")
    if cluster_of(observed).namespace_terminating:
        return _wait(
            observed, "NamespaceTerminating", "the namespace is being deleted: no pods are made"
        )
    return None


def _wait(
    observed: Observed,
    reason: str,
    message: str,
    *,
    again_at_us: int | None = None,
    quota: bool = True,
) -> Plan:
    """No pod is made now, and this is why."""
    held = (condition(conditions.PODS_READY, False, reason, message[:1024]),)
    refused = (
        () if quota else (condition(conditions.QUOTA_RESERVED, False, reason, message[:1024]),)
    )
    line = f"{progress_line(observed)}: {message}"[:1024]
    return Plan(
        policy="placement",
        conditions=(*held, *refused, *recovering(observed, "Recovering", line)),
        again_at_us=again_at_us,
    )


def _placing(observed: Observed) -> tuple[Condition, ...]:
    """What is said while the API server is asked for pods."""
    failure = cluster_of(observed).failure
    count, attempt = ranks(observed), observed.attempt
    if failure is None and observed.error:
        held, reason = (
            f"the pods could not be made, it is tried again: {observed.error}",
            "ApiUnavailable",
        )
    elif failure is None:
        making = f"{count} pods of attempt {attempt} are being made"
        if present_pods(observed):
            making = f"what is missing of attempt {attempt} is being made: a pod, or the volume"
        return (
            *standing(),
            condition(conditions.PODS_READY, False, "Creating", making),
            *recovering(observed, "Recovering", f"{progress_line(observed)}: {making}"),
        )
    elif failure.reason == "QuotaExceeded":
        held = (
            f"the namespace's quota does not admit the pods of attempt {attempt}: {failure.message.rstrip('. ')}. It is "
            f"tried again; end another session or have the Tenant's quota raised.{_until(observed)}"
        )
        return (
            condition(conditions.QUOTA_RESERVED, False, "QuotaExceeded", held),
            condition(conditions.PODS_READY, False, "QuotaExceeded", held),
            *recovering(observed, "NoCapacity", f"{progress_line(observed)}: {held}"),
        )
    else:
        reason, held = _refusal(observed, failure.reason, failure.message)
    return (
        *standing(),
        condition(conditions.PODS_READY, False, reason, held),
        *recovering(observed, "NoCapacity", f"{progress_line(observed)}: {held}"),
    )


def _refusal(observed: Observed, reason: str, message: str) -> tuple[str, str]:
    said, attempt = message.rstrip(". "), observed.attempt
    if reason == "NameTaken":
        return "NameTaken", (
            f"objects that are not the session's have the names of its pods: {said}. They are left alone; delete or "
            f"rename them.{_until(observed)}"
        )
    if reason == "Unavailable":
        return "ApiUnavailable", f"the API server did not make the pods, it is tried again: {said}."
    return "CreationRefused", (
        f"the cluster refuses the pods of attempt {attempt}: {said}. It is tried again; ask who runs the admission "
        f"policy that is named.{_until(observed)}"
    )


def _until(observed: Observed) -> str:
    """When it is given up. Not of a session that started: that one waits."""
    if is_started(observed):
        return ""
    return f" The session fails at {clock(pending_until_us(observed))} if it did not start."
