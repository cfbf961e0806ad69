"""Errors of our own tree as errors of each AWS protocol: the only table of statuses in the gateway.

Names that a service model has come from it; those of authentication are what AWS answers for every
service of the protocol.
"""

from dataclasses import dataclass
from typing import Final

from gristmill_contracts.errors import ForbiddenError, GristmillError
from gristmill_gateway.sigv4 import Fault, SignatureError

RETRY_AFTER_S: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WireError:
    """name: the exception's. status: HTTP."""

    name: str
    status: int
    message: str
    retryable: bool = False


class TooLargeError(GristmillError):
    """A body larger than its bound. Nothing of it was read."""

    code = "too_large"


class AccessDeniedError(ForbiddenError):
    """The caller's account has no right to do this."""

    code = "access_denied"


class LimitExceededError(GristmillError):
    """A quota of the tenant has no room for it."""

    code = "limit_exceeded"


class UnknownOperationError(GristmillError):
    """A request for what this service does not have."""

    code = "unknown_operation"


Row = tuple[str, int]

_FAULTS: Final[dict[Fault, str]] = {
    "missing": "MissingAuthenticationTokenException",
    "malformed": "IncompleteSignatureException",
    "unknown_key": "UnrecognizedClientException",
    "skew": "InvalidSignatureException",
    "scope": "InvalidSignatureException",
    "signature": "InvalidSignatureException",
    "body_hash": "InvalidSignatureException",
}
_S3_FAULTS: Final[dict[Fault, str]] = {
    "missing": "AccessDenied",
    "malformed": "AuthorizationHeaderMalformed",
    "unknown_key": "InvalidAccessKeyId",
    "skew": "RequestTimeTooSkewed",
    "scope": "AuthorizationHeaderMalformed",
    "signature": "SignatureDoesNotMatch",
    "body_hash": "XAmzContentSHA256Mismatch",
}
_CONTROL: Final[dict[str, Row]] = {
    "invalid_request": ("ValidationException", 400),
    "not_found": ("ResourceNotFound", 400),
    "conflict": ("ResourceInUse", 400),
    "fenced": ("ResourceInUse", 400),
    "forbidden": ("AccessDeniedException", 400),
    "access_denied": ("AccessDeniedException", 400),
    "limit_exceeded": ("ResourceLimitExceeded", 400),
    "overloaded": ("ThrottlingException", 400),
    "unavailable": ("ServiceUnavailable", 503),
    "log_full": ("ServiceUnavailable", 503),
    "volume_failed": ("ServiceUnavailable", 503),
    "too_large": ("RequestEntityTooLargeException", 413),
    "unknown_operation": ("UnknownOperationException", 400),
}
_RUNTIME: Final[dict[str, Row]] = {
    "invalid_request": ("ValidationException", 400),
    "not_found": ("ResourceNotFoundException", 404),
    "conflict": ("ConflictException", 409),
    "forbidden": ("ValidationException", 400),
    "access_denied": ("AccessDeniedException", 403),
    "log_lost": ("ConflictException", 409),
    "replay_diverged": ("ConflictException", 409),
    "overloaded": ("ThrottlingException", 429),
    "budget_exhausted": ("ThrottlingException", 429),
    "operation_failed": ("InternalServerException", 500),
    "out_of_memory": ("InternalServerException", 500),
    "fenced": ("InternalServerException", 503),
    "unavailable": ("InternalServerException", 503),
    "log_full": ("InternalServerException", 503),
    "volume_failed": ("InternalServerException", 503),
    "too_large": ("RequestEntityTooLargeException", 413),
    "unknown_operation": ("UnknownOperationException", 404),
}
_INTERNAL_MESSAGE: Final = (
    "an internal error occurred; the server's log has it under this request id"
)


def control_error(error: GristmillError) -> WireError:
    """For AWS JSON 1.1. Anything without a row is our own fault: InternalFailure."""
    if isinstance(error, SignatureError):
        return WireError(name=_FAULTS[error.fault], status=400, message=error.message)
    return _by_row(error, _CONTROL, ("InternalFailure", 500))


def runtime_error(error: GristmillError) -> WireError:
    """For REST-JSON. The SDK sends again what is 429, 5xx, Throttling or InternalServer."""
    if isinstance(error, SignatureError):
        return WireError(name=_FAULTS[error.fault], status=403, message=error.message)
    return _by_row(error, _RUNTIME, ("InternalServerException", 500))


def s3_code(error: GristmillError) -> str | None:
    """For the S3 wire: what happens before its own code sees a request; None for all else."""
    if isinstance(error, SignatureError):
        return _S3_FAULTS[error.fault]
    return {"too_large": "EntityTooLarge", "overloaded": "SlowDown"}.get(error.code)


def internal_error(name: str) -> WireError:
    """For an exception that nobody foresaw. Its text may hold anything, so it stays in the log."""
    return WireError(name=name, status=500, message=_INTERNAL_MESSAGE, retryable=True)


def _by_row(error: GristmillError, rows: dict[str, Row], internal: Row) -> WireError:
    known = rows.get(error.code)
    name, status = known or internal
    message = error.message if known else _INTERNAL_MESSAGE
    return WireError(
        name=name,
        status=status,
        message=message,
        retryable=status in (429, 500, 503) or error.retryable,
    )
