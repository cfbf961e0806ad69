"""Sentences about pods: what happened, to which pod, and what can be done. Pure.

Nothing here depends on the moment: a message that grows older would be a write every second.
"""

from typing import Final

from gristmill_sessions.attempts import pod_name, present_pods, ranks
from gristmill_sessions.cluster import Pod
from gristmill_sessions.observed import Observed

MESSAGE_CHARS_MAX: Final = 1024

ORDER: Final[tuple[str, ...]] = (
    "NodeNotReady",
    "ImageInvalid",
    "ImagePullFailed",
    "StartFailed",
    "ResourceNotOffered",
    "Unschedulable",
    "ClaimPending",
    "VolumePending",
    "MeterNotReady",
    "PullingImage",
    "LoadingWeights",
    "Starting",
)
"""Of several pods that are not ready, the one whose reason comes first is shown."""

STUCK: Final = "do not end though their grace is over"
SLOW: Final = "The deletion takes longer than it should."
"""Marks in messages that an Event is told of when they first appear."""

NO_CAPACITY: Final = frozenset(
    {"ResourceNotOffered", "Unschedulable", "ClaimPending", "VolumePending"}
)
"""The cluster has no room for the pod."""

HAPPENED: Final[dict[str, str]] = {
    "NodeNotReady": "is on a node that is not ready",
    "ImageInvalid": "names an image that can not be pulled",
    "ImagePullFailed": "can not pull an image",
    "StartFailed": "has a container that can not be started",
    "ResourceNotOffered": "asks for a resource that no node offers",
    "Unschedulable": "fits on no node now",
    "ClaimPending": "waits for its devices",
    "VolumePending": "waits for its volume",
    "MeterNotReady": "waits for its meter",
    "PullingImage": "pulls an image",
    "LoadingWeights": "loads the model's weights",
    "Starting": "is starting",
    "WorkerFailed": "ended: the worker failed",
    "OutOfMemory": "ended: a container used more memory than it may",
    "Evicted": "was evicted from its node",
    "Preempted": "made room for a pod of higher priority",
    "Disrupted": "was ended by the cluster",
    "NodeLost": "was on a node that is lost",
    "MeterFailed": "ended: the meter failed",
    "MeteringUnavailable": "has no working meter, and nothing runs without one",
    "PodDeleted": "was deleted by somebody",
}

REMEDY: Final[dict[str, str]] = {
    "ImageInvalid": "Correct spec.image of the BaseModel (a new object) and create the session again.",
    "ImagePullFailed": "Check that the image exists and that the node may pull it; the pull is tried again.",
    "StartFailed": "It is tried again; `kubectl describe pod` shows the runtime's answer.",
    "ResourceNotOffered": "Choose another profile of the model, or add nodes that offer the resource.",
    "Unschedulable": "It starts when a node has room: stop another session, or add nodes.",
    "ClaimPending": "It starts when the devices are allocated; see its ResourceClaim.",
    "VolumePending": "Check spec.storage.storageClassName and that the class can provide the volume.",
    "MeterNotReady": "The attempt is given up if the meter does not start; see the logs of container `meter`.",
    "OutOfMemory": "Choose a profile with more memory, or send smaller batches.",
    "WorkerFailed": "The logs of container `worker` say why.",
    "MeterFailed": "The logs of container `meter` say why.",
    "MeteringUnavailable": "The logs of container `meter` say why; check that it reaches the ledger.",
}


def held_up(pod: Pod) -> str:
    """Reason of one pod that is not ready."""
    if pod.node_lost_since_us is not None:
        return "NodeNotReady"
    if pod.reason in ORDER:
        return pod.reason
    return "LoadingWeights" if pod.phase == "Running" else "Starting"


def worst(observed: Observed) -> tuple[str, Pod] | None:
    """The pod of the present attempt that is shown when not all are ready, and its reason."""
    waiting = [pod for pod in present_pods(observed).values() if not pod.ready]
    if not waiting:
        return None
    pod = min(waiting, key=lambda each: (ORDER.index(held_up(each)), each.rank or 0))
    return held_up(pod), pod


def about(observed: Observed, pod: Pod, reason: str) -> str:
    """`pod run-1-a1-0 (rank 0 of 2) fits on no node now: 0/3 nodes ... It starts when ...`"""
    who = f"pod {pod.name}"
    if ranks(observed) > 1 and pod.rank is not None:
        who += f" (rank {pod.rank} of {ranks(observed)})"
    if reason in ("NodeNotReady", "NodeLost"):
        who += f" (node {pod.node})"
    said = f": {pod.message.rstrip('. ')}" if pod.message else ""
    remedy = f" {REMEDY[reason]}" if reason in REMEDY else ""
    return f"{who} {HAPPENED.get(reason, 'is not ready')}{said}.{remedy}"


def vanished(observed: Observed) -> str:
    """Which ranks have no pod any more."""
    there = present_pods(observed)
    gone = [rank for rank in range(ranks(observed)) if rank not in there]
    names = ", ".join(pod_name(observed, observed.attempt, rank) for rank in gone)
    return f"pod {names} is gone: somebody deleted it, or its node went."


def clip(message: str) -> str:
    return message[:MESSAGE_CHARS_MAX]
