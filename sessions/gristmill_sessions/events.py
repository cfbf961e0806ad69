"""Which Kubernetes Events follow from a step of a session. Pure.

What changed in the conditions is what is told; counting, series and bounds are the recorder's. Who made the
same step again tells the same Events again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from gristmill_contracts import conditions as known
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import TrainingSessionStatus
from gristmill_sessions.attempts import own_pods, present_pods
from gristmill_sessions.observed import Observed, Plan, RecordGap
from gristmill_sessions.wording import MESSAGE_CHARS_MAX, SLOW, STUCK, worst

EventType = Literal["Normal", "Warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent:
    """regarding = the session; `pod` is the name of the related pod, "" = none."""

    type: EventType
    reason: str
    message: str
    pod: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One condition before and after a step. `before` None = it was not there."""

    before: Condition | None
    after: Condition

    @property
    def turned(self) -> bool:
        """Status or reason are new."""
        if self.before is None:
            return True
        return (self.before.status, self.before.reason) != (self.after.status, self.after.reason)

    def became(self, status: str) -> bool:
        was = "" if self.before is None else self.before.status
        return self.after.status == status and was != status


def events_of(
    before: TrainingSessionStatus, after: TrainingSessionStatus, plan: Plan, observed: Observed
) -> tuple[SessionEvent, ...]:
    """In the order in which they are to be read. `plan` was carried out, and led from `before` to `after`;
    of one that was not carried out, because an action had failed, pass it without its actions."""
    found = [
        *_of_failure(before, after),
        *_of_conditions(before, after, observed),
        *_of_pods(before, after),
        *_of_gaps(plan),
        *_of_delays(before, after, observed),
    ]
    return tuple(found)


def _of_conditions(
    before: TrainingSessionStatus, after: TrainingSessionStatus, observed: Observed
) -> Iterator[SessionEvent]:
    for condition in after.conditions:
        change = Change(before=known.find(before.conditions, condition.type), after=condition)
        tell = TOLD.get(condition.type)
        if tell is None or not change.turned:
            continue
        event = tell(change, before)
        if event is not None:
            related = _related(observed) if condition.type == known.PODS_READY else ""
            yield _event(event[0], event[1], condition.message or condition.reason, related)


Told = tuple[EventType, str] | None


def _accepted(change: Change, _before: TrainingSessionStatus) -> Told:
    if change.after.status == "False":
        return "Warning", change.after.reason
    return ("Normal", "Accepted") if change.became("True") else None


def _quota(change: Change, _before: TrainingSessionStatus) -> Told:
    if change.became("True"):
        return "Normal", "QuotaReserved"
    reason = change.after.reason
    if change.after.status != "False" or reason == "Released":
        return None
    return ("Warning" if reason in ("QuotaExceeded", "BudgetExhausted") else "Normal"), reason


def _registered(change: Change, _before: TrainingSessionStatus) -> Told:
    failed = change.after.reason == "RegistrationFailed"
    return ("Warning", "RegistrationFailed") if failed else None


PODS_WARNED: Final = frozenset(
    {
        "Unschedulable", "ResourceNotOffered", "ClaimPending", "VolumePending", "ImagePullFailed", "ImageInvalid",
        "StartFailed", "NodeNotReady", "CreationRefused", "NameTaken", "ApiUnavailable", "PodStuckTerminating",
        "WaitingForModel", "TenantSuspended", "TenantDeleted",
    }
)  # fmt: skip
"""Reasons of `PodsReady=False` that somebody should know of. Ends of pods are told by the failure itself."""


def _pods(change: Change, _before: TrainingSessionStatus) -> Told:
    if change.after.status != "False":
        return None
    if change.after.reason == "RestartRequested":
        return "Normal", "RestartRequested"
    return ("Warning", change.after.reason) if change.after.reason in PODS_WARNED else None


def _started(change: Change, _before: TrainingSessionStatus) -> Told:
    return ("Normal", "Started") if change.became("True") else None


def _serving(change: Change, before: TrainingSessionStatus) -> Told:
    """The first time is told by Started."""
    again = change.became("True") and known.is_true(before.conditions, known.STARTED)
    return ("Normal", "Recovered") if again else None


def _blocked(change: Change, _before: TrainingSessionStatus) -> Told:
    if change.after.status == "True":
        return "Warning", change.after.reason
    lifted = change.before is not None and change.before.status == "True"
    return ("Normal", "Unblocked") if lifted and change.after.reason == "Unblocked" else None


def _stopped(change: Change, _before: TrainingSessionStatus) -> Told:
    return "Normal", "Stopped" if change.after.status == "True" else "Stopping"


def _failed(change: Change, _before: TrainingSessionStatus) -> Told:
    return ("Warning", change.after.reason) if change.became("True") else None


def _expired(change: Change, _before: TrainingSessionStatus) -> Told:
    return ("Normal", "Expired") if change.became("True") else None


def _parked(change: Change, _before: TrainingSessionStatus) -> Told:
    unserved = change.after.reason == "ParkingNotServed"
    return ("Warning", "ParkingNotServed") if unserved else None


def _flushed(change: Change, _before: TrainingSessionStatus) -> Told:
    return ("Warning", "FlushFailed") if change.after.reason == "FlushFailed" else None


def _deleted(change: Change, _before: TrainingSessionStatus) -> Told:
    return (
        ("Warning", change.after.reason) if change.after.reason in known.DELETION_ERRORS else None
    )


TOLD: Final[dict[str, Callable[[Change, TrainingSessionStatus], Told]]] = {
    known.ACCEPTED: _accepted,
    known.LEDGER_REGISTERED: _registered,
    known.QUOTA_RESERVED: _quota,
    known.PODS_READY: _pods,
    known.STARTED: _started,
    known.SERVING: _serving,
    known.BLOCKED: _blocked,
    known.STOPPED: _stopped,
    known.FAILED: _failed,
    known.EXPIRED: _expired,
    known.PARKED: _parked,
    known.USAGE_FLUSHED: _flushed,
    known.DELETED: _deleted,
}


def _of_failure(
    before: TrainingSessionStatus, after: TrainingSessionStatus
) -> Iterator[SessionEvent]:
    """A pod that ended, and what follows of it. The end of the session is told by its condition."""
    failure = after.last_failure
    if failure is None or failure == before.last_failure or after.attempt == before.attempt:
        return
    said = known.find(after.conditions, known.PODS_READY)
    message = failure.message if said is None else said.message
    yield _event("Warning", failure.reason, message, failure.pod)


def _of_pods(before: TrainingSessionStatus, after: TrainingSessionStatus) -> Iterator[SessionEvent]:
    workers = after.workers
    had = before.workers.created if before.attempt == after.attempt else 0
    if workers.desired and workers.created >= workers.desired > had:
        message = f"{workers.desired} pods of attempt {after.attempt} were made; the scheduler places them now"
        yield _event("Normal", "PodsCreated", message)


def _of_gaps(plan: Plan) -> Iterator[SessionEvent]:
    gaps = [action for action in plan.actions if isinstance(action, RecordGap)]
    for gap in gaps:
        total = "an unknown number" if gap.head_seq is None else str(gap.head_seq)
        message = (
            f"usage of attempt {gap.attempt} is not with the ledger: it has {gap.acked_seq} of {total} records "
            f"({gap.reason}). The gap is recorded there; a kept volume is labelled for a later import"
        )
        yield _event("Warning", "UsageFlushAbandoned", message)


ENDING: Final = frozenset({known.STOPPED, known.DELETED, known.USAGE_FLUSHED})


def _of_delays(
    before: TrainingSessionStatus, after: TrainingSessionStatus, observed: Observed
) -> Iterator[SessionEvent]:
    """What takes longer than it should, once when it is first said."""
    marks = ((STUCK, "PodStuckTerminating"), (SLOW, "FinalizerSlow"))
    for mark, reason in marks:
        said = next((each.message for each in after.conditions if _newly(mark, each, before)), "")
        if said:
            yield _event("Warning", reason, said, _first_leaving(observed))


def _newly(mark: str, condition: Condition, before: TrainingSessionStatus) -> bool:
    if condition.type not in ENDING or mark not in condition.message:
        return False
    return not any(mark in each.message for each in before.conditions)


def _first_leaving(observed: Observed) -> str:
    return min((pod.name for pod in own_pods(observed) if pod.deleting), default="")


def _related(observed: Observed) -> str:
    """The pod that PodsReady speaks of."""
    found = worst(observed)
    if found is not None:
        return found[1].name
    pods = present_pods(observed)
    return pods[0].name if 0 in pods else ""


def _event(type_: EventType, reason: str, message: str, pod: str = "") -> SessionEvent:
    return SessionEvent(type=type_, reason=reason, message=message[:MESSAGE_CHARS_MAX], pod=pod)
