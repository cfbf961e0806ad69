"""What the API server refuses, as errors of ours. Messages keep what the server said."""

import json
from typing import ClassVar, Final

from gristmill_contracts.errors import (
    ConflictError,
    ForbiddenError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)


class AlreadyExistsError(ConflictError):
    """An object of this name exists."""


class QuotaError(OverloadedError):
    """A ResourceQuota is full, is not counted yet, or was changed by others meanwhile. May succeed later."""

    exceeded: ClassVar[bool] = False


class QuotaExceededError(QuotaError):
    """A ResourceQuota has no room."""

    exceeded: ClassVar[bool] = True


class ThrottledError(OverloadedError):
    """The API server has too much to do."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GoneError(GristmillError):
    """The version that was asked for is no longer kept; list again."""


class NotLeaderError(GristmillError):
    """This process does not lead, or no longer: it must not write."""


def problem_of(what: str, status: int, body: bytes, retry_after: str | None) -> GristmillError:
    """The error that an answer with a failing status means. `what`: as in "create pods a/b"."""
    reason, said = _read_status(body)
    message = f"the API server refused to {what}: {said or f'status {status}'}"
    quota = next((error for words, error in _OF_QUOTAS if words in said), None)
    if status == 403 and quota is not None:
        return quota(message)
    if status == 409:
        return _conflict(message, reason, said)
    if status == 429 or (status == 503 and retry_after):
        return ThrottledError(message, _seconds(retry_after))
    if "denied request" in said or "denied the request" in said:
        # A policy or webhook of the platform's, whatever status it chose: it may be changed. What is
        # invalid is so for ever.
        return ForbiddenError(message)
    if status in _BY_STATUS:
        return _BY_STATUS[status](message)
    return UnavailableError(message) if status >= 500 else InvalidRequestError(message)


def _conflict(message: str, reason: str, said: str) -> GristmillError:
    if reason == "AlreadyExists":
        return AlreadyExistsError(message)
    if "resourcequotas" in said:
        return QuotaError(message)
    return ConflictError(message)


_OF_QUOTAS: Final = (
    ("exceeded quota", QuotaExceededError),
    # Its controller has not counted the bounds yet: nothing is wrong with what was asked.
    ("status unknown for quota", QuotaError),
)
_BY_STATUS: dict[int, type[GristmillError]] = {
    401: UnauthenticatedError,
    403: ForbiddenError,
    404: NotFoundError,
    410: GoneError,
}


def _read_status(body: bytes) -> tuple[str, str]:
    """Reason and message of a `Status`; what is no Status is shown as it is, cut."""
    try:
        status = json.loads(body)
    except ValueError:
        return "", body[:200].decode(errors="replace").strip()
    if not isinstance(status, dict):
        return "", ""
    return str(status.get("reason", "")), str(status.get("message", ""))


def _seconds(retry_after: str | None) -> float | None:
    try:
        return None if retry_after is None else min(300.0, max(0.0, float(retry_after)))
    except ValueError:
        return None
