"""What the inbox does with a submit. Pure: what is on record comes in, the decision goes out."""

from dataclasses import dataclass
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.admission import (
    Book,
    check_stream,
    checked_number,
    same_operation,
    same_refusal,
)
from gristmill_contracts.errors import (
    ConflictError,
    InvalidRequestError,
    OverloadedError,
    ServedError,
    UnavailableError,
)
from gristmill_contracts.http import OperationState, SessionView
from gristmill_contracts.ids import Stream
from gristmill_contracts.inbox import PostInbox

SERVING: Final = frozenset({"Serving", "Blocked", "Recovering"})
"""States of a meter that takes calls, or will as soon as its worker is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An operation on record. Implements `admission.Known`."""

    position: int
    stream: Stream
    number: int
    state: OperationState
    body_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a session's inbox stands."""

    log_number: int = 0
    """The last number that was given to a keyless operation."""
    waiting: int = 0
    waiting_bytes: int = 0
    served: bool = False
    closed: bool = False
    old_meter: bool = False
    """Its meter has registered and never asked for the inbox: one of the release before, which takes nothing."""
    next_number_told: int = 1
    """Lowest train number that the meter had not received, as its last heartbeat said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Keep it behind all others, with this number."""

    stream: Stream
    number: int


def decide(
    post: PostInbox, size: int, book: Book[Entry], standing: Standing, now_us: int
) -> Append | Entry:
    """Take a submit or refusal of `size` bytes, or find it on record. Nothing is changed by a refusal.

    Raises InvalidRequestError; ConflictError for a number of another request, or a session that is over;
    ServedError; UnavailableError where only the meter's log can say; OverloadedError past a bound.
    """
    if (post.submit is None) == (post.refuse is None):
        raise InvalidRequestError("send exactly one of submit and refuse")
    stream: Stream = "train"
    if post.submit is not None:
        check_stream(post.submit)
        stream = post.submit.stream
        known = same_operation(book, post.submit)
        number = post.submit.number
    elif post.refuse is not None:
        known = same_refusal(book, post.refuse)
        number = post.refuse.number
    if known is not None:
        return known
    _check_open(standing)
    if stream == "train":
        number = checked_number(book, number)
        if number < standing.next_number_told:
            raise UnavailableError(
                f"operation {number} is in the log of the session's meter, which does not answer just now; "
                "send it again"
            )
    else:
        number = max(now_us, standing.log_number + 1, limits.INBOX_LOG_NUMBER_MIN)
    _check_bounds(standing, size)
    return Append(stream=stream, number=number)


def _check_open(standing: Standing) -> None:
    if standing.closed:
        raise ConflictError("the session is over; create a new one")
    if standing.old_meter:
        raise UnavailableError(
            "the session's meter is of a release that takes nothing from an inbox; send the operation "
            "again when it serves"
        )
    if standing.served:
        raise ServedError("the session's meter serves; send the operation there")


def _check_bounds(standing: Standing, size: int) -> None:
    if standing.waiting >= limits.INBOX_OPERATIONS_MAX:
        raise OverloadedError(
            f"{standing.waiting} operations wait for the session's pod; at most "
            f"{limits.INBOX_OPERATIONS_MAX} may; send it again when the session serves"
        )
    if standing.waiting and standing.waiting_bytes + size > limits.INBOX_BYTES_MAX:
        raise OverloadedError(
            f"{standing.waiting_bytes} bytes of operations wait for the session's pod; at most "
            f"{limits.INBOX_BYTES_MAX} may; send it again when the session serves"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What says whether a meter serves. Times are of the ledger's clock."""

    served_by: int | None = None
    served_us: int = 0
    """When that attempt found the inbox empty."""
    owner: int | None = None
    """The newest attempt that registered."""
    granted_attempt: int | None = None
    granted_until_us: int = 0
    view: SessionView | None = None
    """Of the newest heartbeat."""


def is_served(holder: Holder, now_us: int) -> bool:
    """Whether the attempt that emptied the inbox still serves: it was heard a moment ago.

    A wrong yes only makes a client wait; after a wrong no the meter is told that something waits.
    """
    attempt = holder.served_by
    if attempt is None or holder.owner != attempt:
        return False
    view = holder.view
    if view is not None and view.attempt == attempt and view.state not in SERVING:
        return False
    served_us = int(limits.INBOX_SERVED_S * 1e6)
    granted_us = holder.granted_until_us - int(limits.RELEASE_GRANT_S * 1e6)
    heard_us = holder.served_us
    if holder.granted_attempt == attempt:
        heard_us = max(heard_us, granted_us)
    return now_us - heard_us < served_us


def next_and_last(numbers: list[int], view: SessionView | None) -> tuple[int, int]:
    """Lowest train number not received, highest received: of the inbox and of the meter's last word.

    numbers: of the inbox, ascending, from the one on that the meter had not received.
    """
    following = 1 if view is None else view.next_number
    last = 0 if view is None else view.last_received_number
    for number in numbers:
        if number == following:
            following += 1
    return following, max([last, *numbers[-1:]])
