"""Observed worlds for the planner: short to write, every field can be overridden."""

from typing import Any

from gristmill_contracts import labels
from gristmill_contracts.http import Heartbeat, Problem, SessionView
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.resources import Condition, Metadata
from gristmill_contracts.session import (
    BaseModelRef,
    TrainingSession,
    TrainingSessionSpec,
    TrainingSessionStatus,
)
from gristmill_contracts.usage import Counts
from gristmill_sessions.observed import Observed, Seat

SECOND_US = 1_000_000
CREATED_US = 1_000 * SECOND_US
NOW_US = CREATED_US + 60 * SECOND_US
UID = SessionUid("0b8f5c9e-0000-4000-8000-000000000001")


def condition(
    type_: str, status: str = "True", reason: str = "Because", **fields: Any
) -> Condition:
    return Condition.model_validate({"type": type_, "status": status, "reason": reason, **fields})


def session(
    *conditions: Condition,
    deleted_us: int | None = None,
    adopted: bool = True,
    status: dict[str, Any] | None = None,
    **spec: Any,
) -> TrainingSession:
    """An adopted session `run-1` of tenant `acme`; keywords go to its spec."""
    return TrainingSession(
        metadata=Metadata(
            name="run-1",
            namespace="acme",
            uid=UID,
            resource_version=5,
            generation=1,
            creation_time_us=CREATED_US,
            deletion_time_us=deleted_us,
            finalizers=[labels.METERING_FLUSH] if adopted else [],
            annotations={labels.SESSION_ID: UID} if adopted else {},
        ),
        spec=TrainingSessionSpec(base_model_ref=BaseModelRef(name="tiny"), **spec),
        status=TrainingSessionStatus(conditions=list(conditions), **(status or {})),
    )


def seat(*, stopping: bool = False, attempt: int = 1) -> Seat:
    return Seat(attempt=attempt, endpoint="http://127.0.0.1:1", stopping=stopping)


def beat(
    state: str = "Serving",
    *,
    attempt: int = 1,
    acked: int = 0,
    head: int = 0,
    worker_ready: bool = True,
    error: Problem | None = None,
    **view: Any,
) -> Heartbeat:
    fields: dict[str, Any] = {
        "last_received_number": 0,
        "next_number": 1,
        "missing_number": None,
        "missing_since_us": None,
        "counts": Counts(),
        "last_activity_us": 0,
        "open_operations": 0,
    }
    return Heartbeat(
        view=SessionView(
            uid=UID,
            attempt=attempt,
            state=state,
            error=error,
            **{**fields, **view},  # type: ignore[arg-type]
        ),
        tenant=TenantName("acme"),
        acked_seq=acked,
        head_seq=head,
        snapshot_applied=0,
        worker_ready=worker_ready,
        at_us=NOW_US,
    )


def observed(of: TrainingSession | None = None, **fields: Any) -> Observed:
    """A registered session whose model is there."""
    return Observed(**{"session": of or session(), "now_us": NOW_US, "registered": True, **fields})
