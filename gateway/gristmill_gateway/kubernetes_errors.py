"""What the API server refused, as errors of our own tree. Pure.

The API server's own words go to the client: they name the field, the quota or the rule.
"""

import json
from typing import Any, Final

from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from gristmill_gateway.wire_errors import LimitExceededError

TEXT_CHARS_MAX: Final = 2048
_QUOTA_WORDS: Final = ("exceeded quota", "failed quota", "insufficient quota")
_QUOTA_UNKNOWN: Final = "status unknown for quota"
"""A quota that its controller has not counted yet refuses all that it bounds, for seconds."""


class GoneError(GristmillError):
    """A watch asked for a version that the API server keeps no longer: list again."""

    code = "gone"


class QuotaBusyError(UnavailableError):
    """The namespace's quota was being counted by another request: the same request may succeed."""


_PLAIN: Final[dict[int, type[GristmillError]]] = {
    400: InvalidRequestError,
    404: NotFoundError,
    410: GoneError,
    413: InvalidRequestError,
    415: InvalidRequestError,
    422: InvalidRequestError,
}


def api_error(status: int, answer: bytes, doing: str) -> GristmillError:
    """doing: what was asked for, as `create trainingsessions/run-1 in namespace gm-acme`."""
    problem = _status_object(answer)
    reason = str(problem.get("reason", ""))
    message = str(problem.get("message") or f"status {status}")[:TEXT_CHARS_MAX]
    if status == 409:
        return _conflict(problem, reason, message)
    if status == 403:
        return _forbidden(message, doing)
    if status in _PLAIN:
        return _PLAIN[status](message)
    if status == 429:
        return OverloadedError(f"the API server is overloaded ({message}); try again shortly")
    return UnavailableError(f"the API server could not {doing} ({message}); try again shortly")


def _conflict(problem: dict[str, Any], reason: str, message: str) -> GristmillError:
    details = problem.get("details") or {}
    if reason != "AlreadyExists" and details.get("kind") == "resourcequotas":
        return QuotaBusyError(f"{message}; try again shortly")
    return ConflictError(message)


def _forbidden(message: str, doing: str) -> GristmillError:
    if any(words in message for words in _QUOTA_WORDS):
        return LimitExceededError(
            f"{message}; delete what is not needed any more, or have the tenant's quota raised"
        )
    if _QUOTA_UNKNOWN in message:
        return UnavailableError(
            f"the cluster does not count what the tenant's quota bounds yet ({message}); nothing was made; "
            "try again in half a minute, or wait with: kubectl wait tenant/<name> --for=condition=Ready"
        )
    return ForbiddenError(f"cannot {doing}: {message}")


def _status_object(answer: bytes) -> dict[str, Any]:
    try:
        problem = json.loads(answer)
    except ValueError:
        return {"message": answer[:200].decode(errors="replace")}
    return problem if isinstance(problem, dict) else {}
