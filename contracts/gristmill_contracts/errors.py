"""One tree of errors. `code` never changes once released; messages may.

A message holds the subject, the two values that disagree, and the remedy. HTTP statuses are chosen
in each process's `problems` module from the code, nowhere else.
"""

from typing import ClassVar


class GristmillError(Exception):
    """Base of everything we raise on purpose."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class InvalidRequestError(GristmillError):
    """A field of the request is wrong. Nothing was changed."""

    code = "invalid_request"


class UnauthenticatedError(GristmillError):
    """The caller could not be identified."""

    code = "unauthenticated"


class ForbiddenError(GristmillError):
    """The caller is known and may not do this."""

    code = "forbidden"


class NotFoundError(GristmillError):
    """There is no such object, or it is somebody else's."""

    code = "not_found"


class ConflictError(GristmillError):
    """The request disagrees with what is already recorded. Nothing was changed."""

    code = "conflict"


class OverloadedError(GristmillError):
    """A bounded queue is full; the same request may succeed later."""

    code = "overloaded"
    retryable = True


class UnavailableError(GristmillError):
    """Something this depends on cannot be reached now; the same request may succeed later."""

    code = "unavailable"
    retryable = True


class LogFullError(UnavailableError):
    """The session's log has no room for a new operation. Old work is kept."""

    code = "log_full"


class VolumeFailedError(UnavailableError):
    """The log's volume no longer accepts durable writes."""

    code = "volume_failed"


class FencedError(ConflictError):
    """A newer attempt owns this session."""

    code = "fenced"


class ServedError(ConflictError):
    """A meter serves this session: its operations go there, not into the inbox."""

    code = "served"


class OperationFailedError(GristmillError):
    """The operation ran and failed; nothing of it stays. The session goes on."""

    code = "operation_failed"


class OutOfMemoryError(OperationFailedError):
    """The device ran out of memory during the operation."""

    code = "out_of_memory"


class ReplayDivergedError(GristmillError):
    """A replay on the same execution fingerprint gave other numbers."""

    code = "replay_diverged"


class LogLostError(GristmillError):
    """The session's log is older than what the ledger knows of it: operations are missing."""

    code = "log_lost"


class BudgetExhaustedError(GristmillError):
    """A hard budget has not enough left. What waits goes on once it is raised or begins anew."""

    code = "budget_exhausted"
    retryable = True


class InvariantError(GristmillError):
    """Our own bug, in a path where money depends on it. Raised, since -O strips asserts."""

    code = "invariant"


def _tree(root: type[GristmillError]) -> list[type[GristmillError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


def error_from(code: str, message: str) -> GristmillError:
    """Rebuild an error that another process reported; an unknown code becomes the base class."""
    # Only our own: a package's subclass may share a code and take other arguments.
    by_code = {error.code: error for error in _tree(GristmillError) if error.__module__ == __name__}
    return by_code.get(code, GristmillError)(message)
