"""Which submit is which operation: one rule for the meter's log and for the ledger's inbox. Pure.

Identity comes before every bound, so that a retry is answered even where new work is refused.
"""

from typing import Protocol, TypeVar

from gristmill_contracts import limits
from gristmill_contracts.errors import ConflictError, InvalidRequestError
from gristmill_contracts.http import OperationState, Refuse, Submit
from gristmill_contracts.operations import TrainOperation, kind_of


class SequenceConflictError(ConflictError):
    """The number is taken by another request. `last_number` is the highest that was received."""

    def __init__(self, message: str, last_number: int) -> None:
        super().__init__(message)
        self.last_number = last_number


class Known(Protocol):
    """An operation on record."""

    @property
    def number(self) -> int: ...
    @property
    def state(self) -> OperationState: ...
    @property
    def body_hash(self) -> bytes: ...


R_co = TypeVar("R_co", bound=Known, covariant=True)
R = TypeVar("R", bound=Known)


class Book(Protocol[R_co]):
    """What is on record of one session."""

    @property
    def next_number(self) -> int:
        """Lowest train number not received yet."""
        ...

    @property
    def last_received_number(self) -> int: ...

    def by_token(self, client_token: str) -> R_co | None: ...

    def by_number(self, number: int) -> R_co | None:
        """Of the stream `train`; the newest, where a refused number was taken again."""
        ...

    def started_behind(self, number: int) -> bool:
        """Whether a train operation with a higher number may have begun to run."""
        ...


def check_stream(submit: Submit) -> None:
    """Raise InvalidRequestError for an operation in the wrong stream."""
    expected = "train" if isinstance(submit.operation, TrainOperation) else "log"
    if submit.stream != expected:
        raise InvalidRequestError(
            f"{kind_of(submit.operation)} belongs to stream {expected!r}, not {submit.stream!r}"
        )
    if (submit.number is None) != (submit.stream == "log"):
        raise InvalidRequestError(
            f"number is {submit.number}; stream 'train' needs one and stream 'log' numbers itself"
        )


def same_operation(book: Book[R], submit: Submit) -> R | None:
    """The record that this submit names again, by its clientToken or by its number.

    Raises InvalidRequestError for a token, SequenceConflictError for a number of another request.
    """
    if submit.client_token is not None:
        known = book.by_token(submit.client_token)
        if known is not None and known.state != "Refused":
            same_number = submit.number is None or submit.number == known.number
            if known.body_hash == submit.body_hash and same_number:
                return known
            raise InvalidRequestError(
                f"clientToken {submit.client_token!r} was used for operation {known.number} with other "
                "parameters; use a new token for a new request"
            )
    if submit.number is None:
        return None
    by_number = book.by_number(submit.number)
    if by_number is None:
        return None
    if by_number.state != "Refused":
        if by_number.body_hash == submit.body_hash:
            return by_number
        raise taken(book, submit.number)
    if book.started_behind(submit.number):
        raise taken(book, submit.number)
    return None


def same_refusal(book: Book[R], refuse: Refuse) -> R | None:
    """The record of this refusal. Raises SequenceConflictError where the number is an operation's."""
    known = book.by_number(refuse.number)
    if known is not None and known.state != "Refused":
        raise taken(book, refuse.number)
    return known


def checked_number(book: Book[R], number: int | None) -> int:
    """A number that may be taken next. Raises InvalidRequestError, SequenceConflictError."""
    if number is None or not 1 <= number <= limits.SEQUENCE_NUMBER_MAX:
        raise InvalidRequestError(
            f"sequence number {number} is outside 1..{limits.SEQUENCE_NUMBER_MAX}; numbers start at 1"
        )
    if number > book.next_number + limits.SEQUENCE_AHEAD_MAX:
        raise SequenceConflictError(
            f"sequence number {number} is more than {limits.SEQUENCE_AHEAD_MAX} above {book.next_number}, "
            f"the next expected one; the last received number is {book.last_received_number}",
            book.last_received_number,
        )
    return number


def taken(book: Book[R], number: int) -> SequenceConflictError:
    last = book.last_received_number
    return SequenceConflictError(
        f"sequence number {number} was already used for another request; the last received number is "
        f"{last}, continue with {book.next_number}",
        last,
    )
