"""A pod of the API server in the planner's words. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gristmill_contracts import labels
from gristmill_contracts.resources import parse_time
from gristmill_operator.children.containers import METER, WORKER
from gristmill_operator.seams import Json
from gristmill_sessions.cluster import Phase, Pod, PodReason

PHASES: Final[Mapping[str, Phase]] = {
    "Pending": "Pending",
    "Running": "Running",
    "Succeeded": "Succeeded",
    "Failed": "Failed",
}
WAITING: Final[Mapping[str, PodReason]] = {
    "InvalidImageName": "ImageInvalid",
    "ErrImagePull": "ImagePullFailed",
    "ImagePullBackOff": "ImagePullFailed",
    "ErrImageNeverPull": "ImagePullFailed",
    "ImageInspectError": "ImagePullFailed",
    "RegistryUnavailable": "ImagePullFailed",
    "SignatureValidationFailed": "ImagePullFailed",
    "CreateContainerConfigError": "StartFailed",
    "CreateContainerError": "StartFailed",
    "RunContainerError": "StartFailed",
    "PostStartHookError": "StartFailed",
}
"""Reasons of the kubelet for a container that waits, where they are more than a matter of time."""
DISRUPTIONS: Final[Mapping[str, PodReason]] = {
    "PreemptionByScheduler": "Preempted",
    "DeletionByTaintManager": "NodeLost",
    "DeletionByPodGC": "NodeLost",
    "EvictionByEvictionAPI": "Evicted",
    "TerminationByKubelet": "Evicted",
}
ENDINGS: Final[Mapping[str, PodReason]] = {
    "Evicted": "Evicted",
    "Preempting": "Preempted",
    "NodeShutdown": "Evicted",
    "Terminated": "Evicted",
    "NodeLost": "NodeLost",
}
"""status.reason of a pod that was ended from outside."""
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    lost_since_us: int | None = None
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What the session's pods ask for, and what there is."""

    wanted: str = ""
    """Resource name; "" = none."""
    offered: frozenset[str] = field(default_factory=frozenset)
    """Extended resources that some node has."""

    @property
    def missing(self) -> bool:
        return bool(self.wanted) and self.wanted not in self.offered


def pod_view(body: Json, node: NodeView, devices: Devices) -> Pod:
    meta, status = body["metadata"], body.get("status") or {}
    known = meta.get("labels") or {}
    meter = _container(status, "initContainerStatuses", METER)
    worker = _container(status, "containerStatuses", WORKER)
    phase = PHASES.get(status.get("phase", "Pending"), "Unknown")
    rank = number(known.get(labels.RANK))
    ready = _condition(status, "Ready").get("status") == "True"
    reason, message = _why(status, phase, meter, worker, devices, ready=ready)
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        owner_uid=_controller_uid(meta),
        attempt=number(known.get(labels.ATTEMPT)),
        rank=rank,
        phase=phase,
        ready=ready,
        created_us=time_us(meta.get("creationTimestamp")) or 0,
        deleting_since_us=_deleting_since(meta),
        ip=status.get("podIP", ""),
        node=(body.get("spec") or {}).get("nodeName", ""),
        node_lost_since_us=node.lost_since_us,
        node_gone=node.gone,
        reason=reason,
        message=message,
        exit_code=_state(worker, "terminated").get("exitCode"),
        disrupted=_is_disrupted(status),
        restart=(meta.get("annotations") or {}).get(labels.RESTART, ""),
        **(_meter(meter, running=phase == "Running") if not rank else {}),
    )


def node_view(node: Json | None, missed_since_us: int | None) -> NodeView:
    """`node` None = it is gone, and this was first noticed at `missed_since_us`."""
    if node is None:
        return NodeView(lost_since_us=missed_since_us, gone=True)
    taints = (node.get("spec") or {}).get("taints") or ()
    gone = any(each.get("key") == OUT_OF_SERVICE for each in taints)
    ready = _condition(node.get("status") or {}, "Ready")
    if ready.get("status") == "True":
        return NodeView(gone=gone)
    since = time_us(ready.get("lastTransitionTime"))
    return NodeView(lost_since_us=since if since is not None else missed_since_us, gone=gone)


# --- why it is not ready, or ended ---------------------------------------------------------------


def _why(
    status: Json, phase: Phase, meter: Json, worker: Json, devices: Devices, *, ready: bool
) -> tuple[PodReason, str]:
    if phase in ("Succeeded", "Failed"):
        return _ending(status, meter, worker)
    if ready:
        return "", ""
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return _unscheduled(str(scheduled.get("message", "")), devices)
    return _stuck(meter, worker) or _starting(meter, worker)


def _starting(meter: Json, worker: Json) -> tuple[PodReason, str]:
    """A matter of time."""
    if _runs(meter) and not meter.get("started"):
        return "MeterNotReady", "the meter does not answer its start-up probe yet"
    if not _runs(worker):
        return "PullingImage", "the node mounts volumes and pulls images"
    return "LoadingWeights", "the worker loads the model, or replays the session's log"


def _unscheduled(message: str, devices: Devices) -> tuple[PodReason, str]:
    if devices.missing:
        offered = ", ".join(sorted(devices.offered)) or "no devices at all"
        return (
            "ResourceNotOffered",
            f"no node offers {devices.wanted}; nodes offer {offered}. {message}".rstrip(),
        )
    lower = message.lower()
    if "resourceclaim" in lower:
        return "ClaimPending", message
    if "persistentvolumeclaim" in lower or "persistent volume" in lower:
        return "VolumePending", message
    return "Unschedulable", message


def _stuck(meter: Json, worker: Json) -> tuple[PodReason, str] | None:
    """A container that waits for more than its turn."""
    for name, container in ((METER, meter), (WORKER, worker)):
        waiting = _state(container, "waiting")
        reason = WAITING.get(str(waiting.get("reason", "")))
        if reason is not None:
            return reason, f"container {name}: {waiting.get('message') or waiting['reason']}"
        if waiting.get("reason") == "CrashLoopBackOff" and name == METER:
            last = (container.get("lastState") or {}).get("terminated") or {}
            return "MeterNotReady", f"the meter ended with exit code {last.get('exitCode')}"
    return None


def _ending(status: Json, meter: Json, worker: Json) -> tuple[PodReason, str]:
    said = str(status.get("message", ""))
    target = _condition(status, "DisruptionTarget")
    if target.get("status") == "True":
        reason = DISRUPTIONS.get(str(target.get("reason")), "Evicted")
        return reason, str(target.get("message") or said)
    if status.get("reason") in ENDINGS:
        return ENDINGS[status["reason"]], said
    ended = _state(worker, "terminated")
    if not ended:
        died = _state(meter, "terminated")
        if died:
            return (
                "MeterFailed",
                f"the meter ended with exit code {died.get('exitCode')}. {said}".rstrip(),
            )
        return "StartFailed", said or str(status.get("reason") or "the pod never started")
    text = str(ended.get("message") or said)
    if ended.get("reason") == "OOMKilled":
        return "OutOfMemory", text or "the worker took more memory than its limit"
    return "WorkerFailed", text or f"the worker ended with exit code {ended.get('exitCode')}"


def _is_disrupted(status: Json) -> bool:
    target = _condition(status, "DisruptionTarget").get("status") == "True"
    return target or status.get("reason") in ENDINGS


# --- parts of a status ---------------------------------------------------------------------------


def _meter(meter: Json, *, running: bool) -> dict[str, Any]:  # Any: fields of Pod
    since = time_us(_state(meter, "running").get("startedAt"))
    last = (meter.get("lastState") or {}).get("terminated") or {}
    begun, ended = time_us(last.get("startedAt")), time_us(last.get("finishedAt"))
    is_dead = bool(_state(meter, "terminated")) or (
        _state(meter, "waiting").get("reason") == "CrashLoopBackOff"
    )
    return {
        # Where nobody tells of containers the phase must do.
        "meter_started": bool(meter.get("started")) if meter else running,
        "meter_since_us": since,
        "meter_deaths": int(meter.get("restartCount", 0)) + int(is_dead),
        "meter_last_run_s": None if begun is None or ended is None else (ended - begun) / 1e6,
    }


def _container(status: Json, group: str, name: str) -> Json:
    found: Iterable[Json] = status.get(group) or ()
    return next((each for each in found if each["name"] == name), {})


def _state(container: Json, state: str) -> Json:
    found: Json | None = (container.get("state") or {}).get(state)
    return found or {}


def _runs(container: Json) -> bool:
    return "running" in (container.get("state") or {})


def _condition(status: Json, type_: str) -> Json:
    found: Iterable[Json] = status.get("conditions") or ()
    return next((each for each in found if each["type"] == type_), {})


def _controller_uid(meta: Json) -> str:
    owners: Iterable[Json] = meta.get("ownerReferences") or ()
    return next((str(each["uid"]) for each in owners if each.get("controller")), "")


def _deleting_since(meta: Json) -> int | None:
    """The time of deletion lies ahead by the grace that the pod has."""
    deleted = time_us(meta.get("deletionTimestamp"))
    if deleted is None:
        return None
    return deleted - int(meta.get("deletionGracePeriodSeconds") or 0) * 1_000_000


def number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def time_us(text: str | None) -> int | None:
    """RFC 3339 as microseconds since 1970."""
    if not text:
        return None
    parsed = parse_time(text)
    return parsed if isinstance(parsed, int) else None
