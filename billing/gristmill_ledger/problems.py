"""Errors on their way out: the one place where an HTTP status is chosen."""

from typing import Final

from gristmill_contracts.errors import GristmillError
from gristmill_contracts.http import Problem
from gristmill_ledger.decisions import SequenceGapError

STATUSES: Final = {
    "invalid_request": 400, "unauthenticated": 401, "forbidden": 403, "not_found": 404,
    "conflict": 409, "fenced": 409, "served": 409, "too_large": 413, "torn": 400, "overloaded": 429, "unavailable": 503,
}  # fmt: skip


class TooLargeError(GristmillError):
    """The body, or the list in it, is over its bound. Nothing was changed."""

    code = "too_large"


class TornError(GristmillError):
    """The body is not what its sender summed up. Nothing was changed, and the same may be sent again."""

    code = "torn"
    retryable = True


def status_of(error: GristmillError) -> int:
    return STATUSES.get(error.code, 500)


def problem_of(error: GristmillError) -> Problem:
    expected = error.expected_seq if isinstance(error, SequenceGapError) else None
    return Problem(
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        expected_seq=expected,
        last_number=getattr(error, "last_number", None),
    )
