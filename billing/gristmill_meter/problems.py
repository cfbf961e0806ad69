"""Errors as HTTP answers: the only table of statuses in the meter."""

from typing import Final

import msgspec
from starlette.responses import Response

from gristmill_contracts.errors import GristmillError
from gristmill_contracts.http import CONTENT_TYPE, Problem

STATUSES: Final[dict[str, int]] = {
    "invalid_request": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "not_found": 404,
    "conflict": 409,
    "fenced": 421,
    "overloaded": 429,
    "unavailable": 503,
    "log_full": 503,
    "volume_failed": 503,
}
"""Everything else is our own fault: 500."""


def problem_of(error: GristmillError) -> Problem:
    return Problem(
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        last_number=getattr(error, "last_number", None),
    )


def problem_response(error: GristmillError) -> Response:
    status = STATUSES.get(error.code, 500)
    headers = {"Retry-After": "1"} if error.retryable else {}
    content = msgspec.msgpack.encode(problem_of(error))
    return Response(content, status_code=status, media_type=CONTENT_TYPE, headers=headers)
