"""From our errors to a Problem and an HTTP status."""

from typing import Final

import torch

from gristmill_contracts.errors import (
    GristmillError,
    InvalidRequestError,
    OperationFailedError,
    OutOfMemoryError,
)
from gristmill_contracts.http import Problem

_STATUS: Final = {
    "invalid_request": 400,
    "not_found": 404,
    "conflict": 409,
    "overloaded": 429,
    "unavailable": 503,
}
_MEMORY_WORDS: Final = ("out of memory", "can't allocate memory", "not enough memory")


def status_of(error: GristmillError) -> int:
    return _STATUS.get(error.code, 500)


def problem_of(error: GristmillError) -> Problem:
    return Problem(code=error.code, message=error.message, retryable=error.retryable)


def error_of(problem: Problem, prefix: str) -> GristmillError:
    """The error that another rank had, as one of our own kinds."""
    kinds = {
        kind.code: kind for kind in (InvalidRequestError, OperationFailedError, OutOfMemoryError)
    }
    return kinds.get(problem.code, GristmillError)(prefix + problem.message)


def translated(error: Exception) -> GristmillError:
    """Ours as it is; torch's and Python's lack of memory; anything else is our bug."""
    if isinstance(error, GristmillError):
        return error
    text = str(error)
    torch_memory = isinstance(error, RuntimeError) and any(w in text.lower() for w in _MEMORY_WORDS)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or torch_memory:
        return OutOfMemoryError(
            "the device ran out of memory; nothing of the operation stays, send fewer or shorter "
            f"datums or samples ({text.splitlines()[0] if text else 'no detail'})"
        )
    return GristmillError(f"the worker failed on its own: {type(error).__name__}: {text}")
