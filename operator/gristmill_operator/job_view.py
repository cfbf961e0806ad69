"""A session's drain Job of the API server in the planner's words. Pure."""

from collections.abc import Iterable
from typing import Literal

from gristmill_contracts import labels
from gristmill_operator.children.manifest import COMPONENT, DRAIN
from gristmill_operator.pod_view import number, time_us
from gristmill_operator.seams import Json
from gristmill_sessions.cluster import DrainJob


def drain_view(jobs: Iterable[Json]) -> DrainJob | None:
    """That of the newest attempt; None = there is none."""
    found = [view for body in jobs if (view := _view(body)) is not None]
    return max(found, key=lambda view: view.attempt, default=None)


def _view(body: Json) -> DrainJob | None:
    meta = body["metadata"]
    known = meta.get("labels") or {}
    attempt = number(known.get(labels.ATTEMPT))
    if known.get(COMPONENT) != DRAIN or attempt is None:
        return None
    state, finished_us, message = _end(body.get("status") or {})
    return DrainJob(
        name=meta["name"],
        uid=meta["uid"],
        attempt=attempt,
        state=state,
        finished_us=finished_us,
        message=message,
    )


def _end(status: Json) -> tuple[Literal["Running", "Succeeded", "Failed"], int | None, str]:
    for condition in status.get("conditions") or ():
        if condition["status"] != "True":
            continue
        when = time_us(condition.get("lastTransitionTime"))
        if condition["type"] == "Complete":
            return "Succeeded", when, ""
        if condition["type"] == "Failed":
            said = condition.get("message") or condition.get("reason") or ""
            return "Failed", when, str(said)
    return "Running", None, ""
