"""How what runs of a session is brought to an end: its meter is told, its pods go, its log is shipped.

One procedure for stop, end and deletion. Each step is looked for in the world, none is remembered:
directive -> pods deleted -> drain Job -> a recorded gap where nothing is left that could ship the log.
"""

from dataclasses import dataclass
from typing import Final

from gristmill_contracts import conditions, limits
from gristmill_contracts.conditions import condition
from gristmill_contracts.resources import Condition
from gristmill_sessions.attempts import (
    clock,
    cluster_of,
    is_lost,
    named,
    own_pods,
    present_pods,
    seconds_us,
    stray_pods,
)
from gristmill_sessions.cluster import DrainJob, Pod
from gristmill_sessions.observed import (
    VOLUME_LOST,
    Action,
    DeletePods,
    Drain,
    Observed,
    RecordGap,
    RemoveDrainJob,
    StartDrainJob,
)
from gristmill_sessions.wording import STUCK

HEARTBEAT_SILENT_S: Final = 10.0
"""After this long without a heartbeat nobody sends any more: five were due."""
JOB_PAUSE_S: Final = 60.0
"""A drain Job that failed is made again after this; one that ended well has this long to be heard of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to do now so that nothing of the session is left."""

    message: str
    """What it waits for."""
    reason: str = "Draining"
    actions: tuple[Action, ...] = ()
    done: bool = False
    """No pod is left, and the ledger has all usage or a record of what is missing."""
    again_at_us: int | None = None

    @property
    def flushed(self) -> Condition:
        return condition(conditions.USAGE_FLUSHED, self.done, self.reason, self.message)


def close(observed: Observed, since_us: int) -> Step:
    """since_us: when the end was asked for. Called again and again until it is done."""
    step = _ask_meter(observed, since_us) or _delete_pods(observed)
    if step is not None:
        return step
    if not observed.flushed:
        return _ship(observed)
    job = cluster_of(observed).job
    if job is not None:
        return Step(actions=(_remove(job),), message=f"Job {job.name} is being deleted")
    return _flushed(observed)


def _flushed(observed: Observed) -> Step:
    """Nothing is left to do. What was said of it stays said."""
    noted = conditions.find(observed.conditions, conditions.USAGE_FLUSHED)
    if noted is not None and noted.status == "True":
        return Step(done=True, reason=noted.reason, message=noted.message)
    if cluster_of(observed).gap_recorded:
        message = (
            f"the log of attempt {observed.attempt} is gone, and the gap is recorded at the ledger"
        )
        return Step(done=True, reason="GapRecorded", message=message)
    return Step(done=True, reason="Flushed", message="the ledger has all usage of the session")


def _delete_pods(observed: Observed) -> Step | None:
    """None = none is left, or only such as nobody waits for."""
    pods = own_pods(observed)
    removed = remove_pods(observed, pods)
    if removed:
        then = "its usage is with the ledger" if observed.flushed else "the log is shipped then"
        return Step(actions=removed, message=f"pods are being deleted, {then}: {named(pods)}")
    left = [pod for pod in pods if not is_lost(observed, pod)]
    if not left:
        return None
    return Step(message=stuck(observed, left), again_at_us=_stuck_at_us(left, observed.now_us))


# --- a meter that lives --------------------------------------------------------------------------


def _ask_meter(observed: Observed, since_us: int) -> Step | None:
    """Ask the meter to end the session, for as long as there is a meter that may do so."""
    meter = present_pods(observed).get(0)
    if observed.flushed or meter is None or not _meter_lives(observed, meter):
        return None
    until_us = since_us + seconds_us(limits.DIRECTIVE_WAIT_S)
    if observed.now_us >= until_us and not _is_draining(observed):
        return None
    strays = remove_pods(observed, stray_pods(observed))
    drain: tuple[Action, ...] = () if cluster_of(observed).directive_given else (Drain(),)
    problem = f" The ledger did not take the directive: {observed.error}" if observed.error else ""
    beat = observed.beat
    if beat is not None and beat.view.state in ("Draining", "Closed"):
        message = (
            f"the meter in pod {meter.name} finishes what runs and posts its usage; the ledger has it up to "
            f"{beat.acked_seq} of {beat.head_seq}"
        )
    else:
        message = (
            f"the meter in pod {meter.name} is told to end the session; if it does not by {clock(until_us)}, its "
            f"pods are deleted and a Job ships the log.{problem}"
        )
    return Step(
        actions=(*strays, *drain),
        message=message,
        again_at_us=max(until_us, observed.now_us + seconds_us(HEARTBEAT_SILENT_S)),
    )


def _meter_lives(observed: Observed, pod: Pod) -> bool:
    runs = pod.phase == "Running" and pod.meter_since_us is not None
    return runs and not pod.deleting and not is_lost(observed, pod)


def _is_draining(observed: Observed) -> bool:
    """The meter was told and is heard of: what runs may take its time."""
    beat = observed.beat
    if beat is None or beat.view.state not in ("Draining", "Closed"):
        return False
    return observed.now_us < beat.at_us + seconds_us(limits.DIRECTIVE_WAIT_S)


# --- pods ----------------------------------------------------------------------------------------


def remove_pods(observed: Observed, pods: list[Pod]) -> tuple[Action, ...]:
    """Delete them, with their grace; by force where their node is gone and nobody could confirm it."""
    gone = [pod.ref for pod in pods if pod.node_gone]
    asked = [pod.ref for pod in pods if not pod.deleting and not pod.node_gone]
    actions: list[Action] = [DeletePods(pods=tuple(asked))] if asked else []
    actions += [DeletePods(pods=tuple(gone), force=True)] if gone else []
    return tuple(actions)


def stuck_pods(observed: Observed, pods: list[Pod]) -> list[Pod]:
    """Those that are being deleted for longer than their grace and some time for the node."""
    limit_us = seconds_us(STUCK_AFTER_S)
    return [
        pod
        for pod in pods
        if pod.deleting_since_us is not None and observed.now_us >= pod.deleting_since_us + limit_us
    ]


STUCK_AFTER_S: Final = limits.POD_GRACE_S + 60


def stuck(observed: Observed, left: list[Pod]) -> str:
    """What is said of pods that are being deleted."""
    late = stuck_pods(observed, left)
    if not late:
        return f"waits for pods to end: {named(left)}"
    nodes = ", ".join(sorted({pod.node for pod in late if pod.node})) or "none"
    return (
        f"pods {named(late)} {STUCK}; look at the kubelet of node {nodes}, or "
        f"delete them by force once nothing of them runs any more"
    )


def _stuck_at_us(left: list[Pod], now_us: int) -> int | None:
    times = [
        pod.deleting_since_us + seconds_us(STUCK_AFTER_S) for pod in left if pod.deleting_since_us
    ]
    return min((time for time in times if time > now_us), default=None)


# --- a log without a meter -----------------------------------------------------------------------


def _ship(observed: Observed) -> Step:
    """No pod is left, and usage may be on the volume."""
    cluster, job = cluster_of(observed), cluster_of(observed).job
    if job is not None and job.attempt != observed.attempt:
        return Step(
            actions=(_remove(job),), message=f"Job {job.name} of an earlier attempt is deleted"
        )
    gone = not cluster.volume.found or cluster.volume.deleting
    if job is None and (cluster.namespace_terminating or gone):
        return _give_up(observed)
    if job is None:
        return Step(
            actions=(StartDrainJob(attempt=observed.attempt),),
            message=f"no pod is left to post the usage of attempt {observed.attempt}: a Job ships the log"
            + (
                f". It could not be made, and is tried again: {observed.error}"
                if observed.error
                else ""
            ),
        )
    if job.state == "Running":
        return Step(message=f"Job {job.name} ships the log to the ledger")
    again_us = (job.finished_us or observed.now_us) + seconds_us(JOB_PAUSE_S)
    if observed.now_us < again_us:
        return Step(
            reason="Draining" if job.state == "Succeeded" else "FlushFailed",
            message=_of_job(job) + f" It is made again at {clock(again_us)}.",
            again_at_us=again_us,
        )
    return Step(
        actions=(_remove(job),), message=_of_job(job) + " It is made again.", reason="FlushFailed"
    )


def _of_job(job: DrainJob) -> str:
    if job.state == "Succeeded":
        return f"Job {job.name} shipped the log, and the ledger has not said so yet."
    said = f": {job.message.rstrip('. ')}" if job.message else ""
    return f"Job {job.name} could not ship the log{said}. See `kubectl logs job/{job.name}`."


def _give_up(observed: Observed) -> Step:
    """There is no volume, or no Job can be made to read it: what is missing is recorded, never silent."""
    beat = observed.heartbeat
    silent_us = 0 if beat is None else beat.at_us + seconds_us(HEARTBEAT_SILENT_S)
    if not cluster_of(observed).ledger_read or observed.now_us < silent_us:
        return Step(
            message="waits for the last word of the meter at the ledger",
            again_at_us=max(silent_us, observed.now_us + seconds_us(HEARTBEAT_SILENT_S)),
        )
    terminating = cluster_of(observed).namespace_terminating
    why = "the namespace is being deleted" if terminating else "the volume is gone"
    failed = f" The ledger did not take it, and is asked again: {observed.error}"
    return Step(
        actions=(record_gap(observed, "NamespaceTerminating" if terminating else VOLUME_LOST),),
        reason="FlushFailed" if observed.error else "Draining",
        message=f"{why}, and with it the log of attempt {observed.attempt}: the gap is being recorded at the ledger."
        + (failed if observed.error else ""),
    )


def record_gap(observed: Observed, reason: str) -> RecordGap:
    """What the ledger has, and how much there is as far as anybody knows."""
    beat = observed.heartbeat
    sent = beat is not None and beat.view.attempt == observed.attempt
    return RecordGap(
        attempt=observed.attempt,
        acked_seq=beat.acked_seq if beat is not None else 0,
        head_seq=beat.head_seq if beat is not None and sent else None,
        reason=reason,
    )


def _remove(job: DrainJob) -> RemoveDrainJob:
    return RemoveDrainJob(name=job.name, uid=job.uid)
