"""A training session as its resource and as SageMaker tells it. Pure: no clock, no store.

The resource's state is the truth. This wire alone reports Running as soon as the session is accepted
and takes operations, because its SDK gives a session up that is not Running within ten minutes, and
it reports a wish to stop or delete at once, before anybody acted on it.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from gristmill_contracts import conditions, labels
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.http import SessionView
from gristmill_contracts.session import (
    State,
    TrainingSession,
)
from gristmill_contracts.usage import Counts
from gristmill_gateway import locations
from gristmill_gateway.sagemaker import arns
from gristmill_gateway.sagemaker.arns import Scope
from gristmill_gateway.sagemaker.control_validate import (
    KeptRequest,
    ListTrainingSessions,
)
from gristmill_sessions.identity import session_name

ERROR_DETAILS_CHARS_MAX: Final = 1024
DELETABLE: Final[frozenset[State]] = frozenset({"Stopped", "Failed", "Expired", "DeletionFailed"})
STOPPABLE: Final[frozenset[State]] = frozenset(
    {"Created", "Scheduled", "Running", "Blocked", "Expired"}
)
ENDED: Final[frozenset[State]] = frozenset({"Failed", "Stopped", "Expired"})

Shape = dict[str, Any]  # Any: a shape of the service model as JSON


def find_session(sessions: Iterable[TrainingSession], name: str) -> TrainingSession | None:
    """The session that is called so on this wire."""
    return next((session for session in sessions if session_name(session) == name), None)


# --- status --------------------------------------------------------------------------------------


def takes_operations(session: TrainingSession) -> bool:
    """It was accepted, and the ledger knows whom to bill: what is submitted now waits for its pod.

    The ledger is told last and never untold, so that this is true for good.
    """
    return _is_true(session, conditions.READY, conditions.LEDGER_REGISTERED)


def holds_usage(session: TrainingSession) -> bool:
    """Some meter may have usage of it that nobody else knows yet."""
    begun = _is_true(session, conditions.READY, conditions.STARTED)
    return begun and session.status.state not in ENDED


def _is_true(session: TrainingSession, *types: str) -> bool:
    return any(conditions.is_true(session.status.conditions, each) for each in types)


def reported_status(session: TrainingSession, view: SessionView | None) -> State:
    """TrainingSessionStatus. view: what the meter says just now, None where none can be asked."""
    state = session.status.state
    if session.metadata.deletion_time_us is not None:
        return "DeletionFailed" if state == "DeletionFailed" else "Deleting"
    if state == "Expired" and stop_wanted(session):
        # The SDK's delete(stop_if_active=True) waits for Stopped, Failed or DeletionFailed alone.
        return "Stopped"
    if state in ENDED or state in ("Deleting", "DeletionFailed"):
        return state
    if stop_wanted(session):
        return "Stopping"
    if state in ("Created", "Scheduled") and takes_operations(session):
        state = "Running"
    if state in ("Running", "Blocked") and view is not None:
        state = _state_at_meter(state, view)
    return state


def _state_at_meter(state: State, view: SessionView) -> State:
    """Fresher than the resource, which follows by heartbeats."""
    if view.state == "Failed":
        return "Failed"
    if view.state == "Blocked":
        return "Blocked"
    unblocked = state == "Blocked" and view.state == "Serving"
    return "Running" if unblocked else state


def stop_wanted(session: TrainingSession) -> bool:
    """Somebody asked for its end, in the spec or, as this wire does in a cluster, by annotation."""
    asked = labels.STOP_REQUESTED in session.metadata.annotations
    return asked or session.spec.desired_state == "Stopped"


def with_stop_wish(
    session: TrainingSession, *, by_annotation: bool, now: datetime
) -> TrainingSession:
    """The session as its stop asks for it. by_annotation: whoever keeps specs in git would take back the other."""
    if not by_annotation:
        spec = session.spec.model_copy(update={"desired_state": "Stopped"})
        return session.model_copy(update={"spec": spec})
    asked = {labels.STOP_REQUESTED: now.strftime("%Y-%m-%dT%H:%M:%SZ")}
    annotations = session.metadata.annotations | asked
    metadata = session.metadata.model_copy(update={"annotations": annotations})
    return session.model_copy(update={"metadata": metadata})


def check_stop(name: str, status: State) -> None:
    """Raises InvalidRequestError, in the words the SDK reads, where there is nothing left to stop."""
    if status not in STOPPABLE:
        raise InvalidRequestError(
            f"Training session {name} cannot be stopped: invalid session state transition from "
            f"{status} to Stopping"
        )


def check_delete(name: str, status: State) -> bool:
    """Whether there is something to delete. Raises InvalidRequestError for a session not ended."""
    if status == "Deleting":
        return False
    if status not in DELETABLE:
        raise InvalidRequestError(
            f"Training session {name} cannot be deleted: invalid session state transition from "
            f"{status} to Deleting; stop it first with StopTrainingSession"
        )
    return True


# --- lists ---------------------------------------------------------------------------------------


def place(session: TrainingSession) -> list[int | str]:
    """Where a session stands in a list, which has the newest first."""
    return [session.metadata.creation_time_us, session.metadata.uid]


def choose(
    sessions: Iterable[TrainingSession], request: ListTrainingSessions
) -> list[TrainingSession]:
    """The sessions that pass the filters of a list, in its order."""
    return sorted((each for each in sessions if _passes(each, request)), key=place, reverse=True)


def _passes(session: TrainingSession, request: ListTrainingSessions) -> bool:
    created = seconds(session.metadata.creation_time_us)
    return (
        (request.name_contains or "") in session_name(session)
        and request.status_equals in (None, reported_status(session, None))
        and (request.creation_time_after is None or created > request.creation_time_after)
        and (request.creation_time_before is None or created < request.creation_time_before)
    )


# --- describe ------------------------------------------------------------------------------------


def describe(
    session: TrainingSession,
    scope: Scope,
    bucket: str,
    view: SessionView | None,
    usage: Counts | None,
) -> Shape:
    """TrainingSessionDetail. usage: exact settled tokens; None = unknown now, and then left out."""
    name = session_name(session)
    status = reported_status(session, view)
    kept = kept_request(session)
    spec = session.spec
    path = spec.output.path or locations.session_output("", name, scope.account_id, bucket).uri
    detail: Shape = {
        "TrainingSessionArn": arns.session_arn(scope, name),
        "TrainingSessionName": name,
        "TrainingSessionStatus": status,
        "ModelPackageGroupArn": arns.group_arn(scope, spec.output.checkpoint_group),
        "CreationTime": seconds(session.metadata.creation_time_us),
        "LastModifiedTime": seconds(modified_us(session)),
        "LastReceivedSequenceNumber": last_received(session, view),
        "LoraConfig": {"Rank": spec.lora.rank, "Alpha": spec.lora.alpha},
        "ModelConfig": kept.get("ModelConfig")
        or {"BaseModelArn": arns.model_arn(scope.region, spec.base_model_ref.name)},
        "OutputConfig": {"S3Location": {"Path": path}},
        "Tags": kept.get("Tags", []),
    }
    if "VpcConfig" in kept:
        detail["VpcConfig"] = kept["VpcConfig"]
    if spec.role_arn:
        detail["RoleArn"] = spec.role_arn
    if session.status.end_time_us is not None:
        detail["EndTime"] = seconds(session.status.end_time_us)
    if usage is not None:
        detail["BillableTokenUsage"] = {
            "PrefillTokenCount": usage.prefill,
            "SampleTokenCount": usage.sample,
            "TrainingTokenCount": usage.train,
        }
    if status in ("Failed", "Blocked", "DeletionFailed"):
        detail["ErrorDetails"] = error_details(session, view)[:ERROR_DETAILS_CHARS_MAX]
    return detail


def summary(session: TrainingSession, scope: Scope) -> Shape:
    """TrainingSessionSummary."""
    return {
        "TrainingSessionArn": arns.session_arn(scope, session_name(session)),
        "TrainingSessionStatus": reported_status(session, None),
        "CreationTime": seconds(session.metadata.creation_time_us),
        "LastModifiedTime": seconds(modified_us(session)),
    }


def error_details(session: TrainingSession, view: SessionView | None) -> str:
    """Why a session is Failed or Blocked: the meter's own words first, for they are the newest."""
    if view is not None and view.error is not None:
        return view.error.message
    if view is not None and view.missing_number is not None:
        return (
            f"operation {view.missing_number} is missing: later ones wait for it, and the session fails "
            "if it does not arrive in time; submit it"
        )
    if session.status.last_failure is not None:
        failure = session.status.last_failure
        return failure.message or failure.reason
    for kind in (conditions.FAILED, conditions.BLOCKED, conditions.DELETED, conditions.SERVING):
        found = conditions.find(session.status.conditions, kind)
        if found is not None and found.message:
            return found.message
    return f"the session is {session.status.state}"


def last_received(session: TrainingSession, view: SessionView | None) -> int:
    """Highest sequence number received. 0 = none yet."""
    known = session.status.last_received_sequence
    return known if view is None else max(known, view.last_received_number)


def modified_us(session: TrainingSession) -> int:
    """When the session last changed its state or a condition."""
    status = session.status
    times = [condition.last_transition_time_us for condition in status.conditions]
    times += [time for time in (status.start_time_us, status.end_time_us) if time is not None]
    return max([session.metadata.creation_time_us, *times])


def seconds(time_us: int) -> float:
    """Microseconds as a JSON 1.1 timestamp, to the millisecond."""
    return round(time_us / 1e6, 3)


def kept_request(session: TrainingSession) -> Shape:
    """What a create sent. The annotation is anybody's to edit, so it may hold anything."""
    text = session.metadata.annotations.get(labels.SAGEMAKER_REQUEST, "")
    try:
        kept = KeptRequest.model_validate_json(text)
    except ValueError:
        return {}
    return kept.model_dump(by_alias=True, exclude_none=True)
