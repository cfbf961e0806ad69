"""Observations of a session in a cluster: short to write, every part can be overridden."""

from typing import Any

from gristmill_contracts import labels
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import PinnedStatus, TrainingSession, WorkersStatus
from gristmill_sessions.cluster import Cluster, DrainJob, ModelView, Pod, TenantView, Volume
from gristmill_sessions.observed import Observed
from gristmill_testing.worlds import CREATED_US, NOW_US, UID, beat, condition, observed, session

STARTED = condition("Started", message="the session has served", observed_generation=1)
REGISTERED = condition(
    "LedgerRegistered", message="the ledger knows whom to bill", observed_generation=1
)
PINS = PinnedStatus(image="worker@2", meter_image="meter@2", template_hash="new")
TENANT = TenantView(name="acme")
BOUND = Volume(found=True, owned=True)


def pod(rank: int = 0, attempt: int = 1, **fields: Any) -> Pod:
    """A pod of session `run-1` that serves."""
    return Pod(
        **{
            "name": f"run-1-a{attempt}-{rank}",
            "uid": f"uid-{attempt}-{rank}",
            "owner_uid": UID,
            "attempt": attempt,
            "rank": rank,
            "phase": "Running",
            "ready": True,
            "created_us": CREATED_US,
            "ip": f"10.0.{attempt}.{rank}",
            "node": "node-1",
            "meter_since_us": CREATED_US,
            **fields,
        }
    )


def pending(rank: int = 0, attempt: int = 1, **fields: Any) -> Pod:
    """A pod that is not ready."""
    known = {"phase": "Pending", "ready": False, "ip": "", "node": "", "meter_since_us": None}
    return pod(rank, attempt, **{**known, "meter_started": False, **fields})


def ended(rank: int = 0, attempt: int = 1, code: int = 1, **fields: Any) -> Pod:
    """A pod whose worker ended."""
    known = {"phase": "Failed", "ready": False, "exit_code": code, "reason": "WorkerFailed"}
    return pod(rank, attempt, **{**known, **fields})


def resource(
    *conditions: Condition,
    attempt: int = 1,
    workers: int = 1,
    created: int | None = None,
    status: dict[str, Any] | None = None,
    annotations: dict[str, str] | None = None,
    adopted: bool = True,
    **fields: Any,
) -> TrainingSession:
    """A session of tenant `acme` at this attempt, that the ledger knows of."""
    count = WorkersStatus(desired=workers, created=workers if created is None else created)
    known = {"attempt": attempt, "pinned": PINS, **({"workers": count} if attempt else {})}
    made = session(
        *(REGISTERED, *conditions),
        adopted=adopted,
        status={**known, **(status or {})},
        **{"workers": workers, **fields},
    )
    meta = made.metadata
    changed = meta.model_copy(
        update={
            "labels": {labels.TENANT: "acme"} if adopted else {},
            "annotations": {**meta.annotations, **(annotations or {})},
        }
    )
    return made.model_copy(update={"metadata": changed})


def new(**fields: Any) -> TrainingSession:
    """One that has no attempt yet."""
    return resource(attempt=0, **fields)


def running(*conditions: Condition, **fields: Any) -> TrainingSession:
    """One that has served."""
    return resource(STARTED, *conditions, **fields)


def world(
    of: TrainingSession,
    *pods: Pod,
    heartbeat: Heartbeat | None = None,
    now_us: int = NOW_US,
    registered: bool = True,
    error: str = "",
    **cluster: Any,
) -> Observed:
    """What the operator sees. Keywords go to `Cluster`."""
    shown = {"tenant": TENANT, "pins": PINS, "volume": BOUND, **cluster}
    return observed(
        of,
        heartbeat=heartbeat,
        now_us=now_us,
        registered=registered,
        error=error,
        cluster=Cluster(pods=pods, **shown),
    )


def job(state: Any = "Running", attempt: int = 1, **fields: Any) -> DrainJob:
    return DrainJob(
        name=f"run-1-drain-a{attempt}", uid="job", attempt=attempt, state=state, **fields
    )


def model(**fields: Any) -> ModelView:
    return ModelView(**fields)


def serving(attempt: int = 1, **fields: Any) -> Heartbeat:
    return beat(**{"attempt": attempt, "acked": 3, "head": 7, **fields})
