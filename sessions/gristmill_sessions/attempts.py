"""What the pods of a session tell about its attempts. Pure readings of an observation of a cluster.

An attempt is one set of pods, one of each rank, that live and die together. Its number is claimed in the
status before any of its pods exists, so that no two attempts ever have the same one.
"""

import hashlib
from collections.abc import Iterable
from typing import Final

from gristmill_contracts import conditions, labels, limits
from gristmill_contracts.resources import format_time
from gristmill_sessions.cluster import Cluster, Pod
from gristmill_sessions.failure import backoff_s
from gristmill_sessions.identity import session_uid
from gristmill_sessions.observed import Observed

SECOND_US: Final = 1_000_000
NODE_LOST_US: Final = int(limits.NODE_LOST_S * SECOND_US)
UNCOUNTED: Final = frozenset({"Evicted", "Preempted", "Disrupted", "NodeLost", "PodDeleted"})
"""Reasons of a failure that the session has no part in."""
QUOTA_PAUSE_S: Final = 30.0
"""Pause after pods were taken back because not all of an attempt's fit into the quota."""


def cluster_of(observed: Observed) -> Cluster:
    if observed.cluster is None:
        raise AssertionError("a policy of clusters was asked about one machine")
    return observed.cluster


def ranks(observed: Observed) -> int:
    """How many pods an attempt has: fixed at the first one."""
    status, spec = observed.session.status, observed.session.spec
    if status.attempt > 0 and status.workers.desired > 0:
        return status.workers.desired
    named = "workers" in spec.model_fields_set
    return spec.workers if named else cluster_of(observed).model.workers


def pod_name(observed: Observed, attempt: int, rank: int) -> str:
    return f"{observed.session.metadata.name}-a{attempt}-{rank}"


def own_pods(observed: Observed) -> list[Pod]:
    """Those that the session controls. Others that carry its label are never touched."""
    uid = observed.session.metadata.uid
    return [pod for pod in cluster_of(observed).pods if pod.owner_uid == uid]


def present_pods(observed: Observed) -> dict[int, Pod]:
    """Rank -> pod of the present attempt. Only the right name counts: two pods can not have it."""
    attempt, count = observed.attempt, ranks(observed)
    return {
        pod.rank: pod
        for pod in own_pods(observed)
        if pod.attempt == attempt
        and pod.rank is not None
        and 0 <= pod.rank < count
        and pod.name == pod_name(observed, attempt, pod.rank)
    }


def stray_pods(observed: Observed) -> list[Pod]:
    """Own pods of earlier attempts, or of no known attempt and rank."""
    kept = {pod.uid for pod in present_pods(observed).values()}
    return [pod for pod in own_pods(observed) if pod.uid not in kept]


def is_lost(observed: Observed, pod: Pod) -> bool:
    """Its node is not ready for so long that nobody waits for the pod any more."""
    since = pod.node_lost_since_us
    overdue = since is not None and observed.now_us >= since + NODE_LOST_US
    return pod.node_gone or overdue


def is_volume_gone(observed: Observed) -> bool:
    """The present attempt was claimed, its claim is not there, and no pod could still have it open: of rank 0, as
    others have none, on a node that is heard of."""
    cluster, status = cluster_of(observed), observed.session.status
    if observed.attempt == 0 or status.attempt != observed.attempt:
        return False
    holds = any(
        pod.node and not pod.rank and not pod.ended and not is_lost(observed, pod)
        for pod in own_pods(observed)
    )
    return not (cluster.volume.found or cluster.namespace_terminating or holds)


def all_ready(observed: Observed) -> bool:
    pods = present_pods(observed)
    return len(pods) == ranks(observed) and all(_serves(pod) for pod in pods.values())


def created_count(observed: Observed) -> int:
    """How many pods of the present attempt there ever were. One that is missing was lost, and is not made again."""
    status, cluster = observed.session.status, cluster_of(observed)
    if status.attempt != observed.attempt:
        return len(present_pods(observed))
    return max(len(present_pods(observed)), status.workers.created, cluster.placed)


def ready_count(observed: Observed) -> int:
    return sum(_serves(pod) for pod in present_pods(observed).values())


def _serves(pod: Pod) -> bool:
    return pod.ready and not pod.ended and not pod.deleting


def endpoint(observed: Observed) -> str:
    """Where the meter of the present attempt listens; "" = it does not serve."""
    if not all_ready(observed):
        return ""
    ip = present_pods(observed)[0].ip
    host = f"[{ip}]" if ":" in ip else ip
    return f"http://{host}:{labels.METER_PORT}" if ip else ""


def restart_wanted(observed: Observed) -> str:
    return observed.session.metadata.annotations.get(labels.RESTART, "")


def is_started(observed: Observed) -> bool:
    return conditions.is_true(observed.conditions, conditions.STARTED)


# --- times ---------------------------------------------------------------------------------------


def seconds_us(seconds: float) -> int:
    return int(seconds * SECOND_US)


def clock(time_us: int) -> str:
    """A moment for people, to the second: a message must not change while nothing happens."""
    return format_time(time_us - time_us % SECOND_US)


def not_before_us(observed: Observed) -> int:
    """When the present attempt's pods may be made."""
    status = observed.session.status
    failure = status.last_failure
    if failure is None or failure.time_us is None:
        return 0
    return failure.time_us + seconds_us(_pause_s(observed, failure.reason, failure.time_us))


def _pause_s(observed: Observed, reason: str, failed_us: int) -> float:
    policy, restarts = observed.session.spec.failure_policy, observed.session.status.restarts
    if reason == "QuotaExceeded":
        return QUOTA_PAUSE_S
    if reason == "NodeLost":
        return 0.0
    if reason in UNCOUNTED:
        # At once, but for an attempt that was cut short before it was ready: that could go on for ever.
        ready = conditions.find(observed.conditions, conditions.PODS_READY)
        was_ready = ready is not None and ready.last_transition_time_us >= failed_us
        return 0.0 if was_ready else float(policy.backoff_seconds)
    return backoff_s(policy, restarts, jitter(observed))


def jitter(observed: Observed) -> float:
    """-1 to 1: the same for one attempt however often it is asked for."""
    text = f"{session_uid(observed.session)}/{observed.attempt}"
    return hashlib.sha256(text.encode()).digest()[0] / 127.5 - 1


def pending_until_us(observed: Observed) -> int:
    session = observed.session
    return session.metadata.creation_time_us + session.spec.limits.pending_seconds * SECOND_US


def named(pods: Iterable[Pod]) -> str:
    return ", ".join(sorted(pod.name for pod in pods))
