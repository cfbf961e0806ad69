"""What to do with a submit, a refusal and what waits. Pure: state, request and time in, decision out.

Order is precedence: identity (the same operation again) comes before every bound, so that a retry is
answered even where new work is refused.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.admission import (
    check_stream,
    checked_number,
    same_operation,
    same_refusal,
    taken,
)
from gristmill_contracts.errors import (
    ConflictError,
    LogFullError,
    OverloadedError,
)
from gristmill_contracts.http import Refuse, Submit
from gristmill_contracts.operations import (
    ComputeLogprobs,
    Forward,
    ForwardBackward,
    Operation,
    Sample,
)
from gristmill_meter.records import STATELESS_KINDS, Key, Record, SessionState

TOKEN_RESULT_BYTES_MAX: Final = 32
"""A sampled token in a result: 8 bytes of id, 4 of logprob, and its text."""
TOPK_ENTRY_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Log an INTENT with this number."""

    number: int
    room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """The operation is known: answer with its record."""

    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that the volume has left, and that it must keep."""

    free_bytes: int
    free_bytes_min: int
    context_length: int
    payload_bytes: int = 0
    """Of the operation that asks: it is written before its result."""
    promised_bytes: int = 0
    """What this log has still to write, and what the other logs on the volume have and may."""
    now_us: int = 0
    """0 = the ledger has not told yet what it has."""


def on_submit(
    state: SessionState, submit: Submit, started: Collection[Key], room: Room
) -> Accept | Duplicate:
    """Accept, or find the same operation. Raises the error to answer with; nothing is changed then.

    InvalidRequestError: wrong stream or number, a clientToken with another request. ConflictError: the
    number is another request's, or the session failed. OverloadedError, LogFullError: bounds.
    """
    book = LogBook(state=state, started=started)
    check_stream(submit)
    known = same_operation(book, submit)
    if known is not None:
        return Duplicate(record=known)
    _check_open(state)
    number = state.log_number + 1
    if submit.stream == "train":
        number = _new_number(book, submit.number)
    _check_bounds(state, submit, room.now_us)
    return Accept(number=number, room_bytes=_checked_room(state, submit, room))


def _checked_room(state: SessionState, submit: Submit, room: Room) -> int:
    """Bytes to reserve for the operation's result. Raises LogFullError."""
    room_bytes = result_room_bytes(submit.operation, room.context_length)
    reserved = state.room_bytes + room.promised_bytes
    left = room.free_bytes - reserved - room.payload_bytes - room_bytes
    if left < room.free_bytes_min:
        raise LogFullError(
            f"the log's volume has {room.free_bytes} bytes left, of which {reserved} are reserved and "
            f"{room.free_bytes_min} must stay free; the operation and its result may take "
            f"{room.payload_bytes + room_bytes}; enlarge the volume or wait"
        )
    return room_bytes


def on_taken(
    state: SessionState, submit: Submit, number: int, started: Collection[Key], room: Room
) -> Accept | None:
    """What becomes of a submit from the inbox; None = the log has it. `number`: what it was accepted as.

    Its client was told that it is accepted: no bound refuses it, a full volume only makes it wait.
    Raises LogFullError, and ConflictError or InvalidRequestError where it can never be taken.
    """
    book = LogBook(state=state, started=started)
    check_stream(submit)
    if submit.stream == "log" and number <= state.inbox_number:
        return None  # They come in order, and each number is given once.
    if submit.stream == "train" and same_operation(book, submit) is not None:
        return None
    if submit.stream == "train" and number < book.next_number and book.by_number(number) is None:
        return None  # It ended so long ago that its record is gone.
    _check_open(state)
    if submit.stream == "train":
        checked_number(book, number)
    return Accept(number=number, room_bytes=_checked_room(state, submit, room))


def on_taken_refusal(state: SessionState, refuse: Refuse) -> Accept | None:
    """What becomes of a refusal from the inbox; None = the log has it, or an operation in its place."""
    if refuse.number < state.next_number:
        return None
    decision = on_refuse(state, refuse)
    return decision if isinstance(decision, Accept) else None


def on_refuse(state: SessionState, refuse: Refuse) -> Accept | Duplicate:
    """Close a number, or find it closed. Raises ConflictError where it is an operation's."""
    book = LogBook(state=state, started=())
    record = same_refusal(book, refuse)
    if record is not None:
        return Duplicate(record=record)
    _check_open(state)
    return Accept(number=_new_number(book, refuse.number), room_bytes=0)


def _new_number(book: "LogBook", number: int | None) -> int:
    """Raises SequenceConflictError also for a number whose record is gone: it must not run again."""
    checked = checked_number(book, number)
    if checked < book.next_number and book.by_number(checked) is None:
        raise taken(book, checked)
    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBook:
    """Implements `admission.Book` over a session's log. started: dispatched to the worker, not ended."""

    state: SessionState
    started: Collection[Key]

    @property
    def next_number(self) -> int:
        return self.state.next_number

    @property
    def last_received_number(self) -> int:
        return self.state.last_received_number

    def by_token(self, client_token: str) -> Record | None:
        key = self.state.tokens.get(client_token)
        return None if key is None else self.state.records[key]

    def by_number(self, number: int) -> Record | None:
        return self.state.records.get(("train", number))

    def started_behind(self, number: int) -> bool:
        behind = _train_behind(self.state, number)
        return any(_has_started(record, self.started) for record in behind)


def _train_behind(state: SessionState, number: int) -> list[Record]:
    records = state.records
    above = range(number + 1, state.last_received_number + 1)
    return [records["train", n] for n in above if ("train", n) in records]


def _has_started(record: Record, started: Collection[Key]) -> bool:
    return record.index > 0 or record.started_us > 0 or record.key in started


def _check_open(state: SessionState) -> None:
    if state.closed:
        raise ConflictError(f"session {state.uid} is closed; create a new one")
    if state.failure is not None:
        raise ConflictError(f"session {state.uid} has failed: {state.failure.message}")


def _check_unacked(state: SessionState, now_us: int) -> None:
    """What the ledger does not have yet would be lost with the volume: it is bounded."""
    if not state.events or not now_us:
        return
    age_s = (now_us - state.events[0][1].op_end_us) / 1e6
    if len(state.events) >= limits.UNACKED_OPERATIONS_MAX or age_s >= limits.UNACKED_AGE_S_MAX:
        raise OverloadedError(
            f"the ledger has not acknowledged {len(state.events)} operations of session {state.uid}, the "
            f"oldest for {age_s:.0f} s; retry when it answers"
        )


def _check_bounds(state: SessionState, submit: Submit, now_us: int) -> None:
    if len(state.open_keys) >= limits.QUEUED_OPERATIONS_MAX:
        raise OverloadedError(
            f"{len(state.open_keys)} operations of session {state.uid} wait; at most "
            f"{limits.QUEUED_OPERATIONS_MAX} may; retry when some have ended"
        )
    if state.open_bytes >= limits.QUEUED_BYTES_MAX:
        raise OverloadedError(
            f"{state.open_bytes} bytes of operations of session {state.uid} wait; at most "
            f"{limits.QUEUED_BYTES_MAX} may; retry when some have ended"
        )
    _check_unacked(state, now_us)
    if submit.stream == "log" and state.unclaimed_tokens >= limits.UNCLAIMED_TOKENS_MAX:
        raise OverloadedError(
            f"results of {state.unclaimed_tokens} tokens wait to be fetched; at most "
            f"{limits.UNCLAIMED_TOKENS_MAX} may; fetch the results of earlier samples first"
        )


def result_room_bytes(operation: Operation, context_length: int) -> int:
    """Largest size of the operation's result. `context_length` 0 = not known."""
    size = 0
    if isinstance(operation, Forward | ForwardBackward):
        size = sum(datum.tokens.size for datum in operation.datums) * 4
    elif isinstance(operation, Sample):
        tokens = operation.params.max_tokens
        if context_length:
            tokens = min(tokens, context_length)
        prompt = operation.prompt.size if operation.prompt is not None else context_length
        size = operation.num_samples * tokens * TOKEN_RESULT_BYTES_MAX
        size += prompt * (4 + operation.topk_prompt_logprobs * TOPK_ENTRY_BYTES)
    elif isinstance(operation, ComputeLogprobs):
        size = operation.prompt.size * (4 + operation.topk * TOPK_ENTRY_BYTES)
    return size + limits.RESULT_ROOM_BYTES_MIN


def resolve_adapter(state: SessionState, operation: Operation) -> Operation:
    """Bind a sample that names no checkpoint to the session's default (None = the base model)."""
    unbound = isinstance(operation, Sample | ComputeLogprobs) and operation.adapter is None
    if not unbound or state.default_adapter is None:
        return operation
    return msgspec.structs.replace(operation, adapter=state.default_adapter)


# --- what runs next ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTrain:
    """`run` it at the worker, or `skip` it for a reason."""

    verb: Literal["run", "skip"]
    record: Record
    reason: str = ""


def next_train(state: SessionState, durable_frame: int) -> NextTrain | None:
    """The train operation with the lowest number, once everything below it was received.

    An optim_step behind a refused chunk of its accumulation would step on half a gradient: it is skipped.
    """
    waiting = [number for stream, number in state.open_keys if stream == "train"]
    number = min(waiting, default=state.next_number)
    if number >= state.next_number:
        return None
    record = state.records["train", number]
    if record.accepted_frame > durable_frame:
        return None
    refused = _refused_chunk_before(state, number) if record.kind == "optim_step" else 0
    if refused:
        reason = f"forward_backward {refused} of the same accumulation was refused"
        return NextTrain(verb="skip", record=record, reason=reason)
    return NextTrain(verb="run", record=record)


def _refused_chunk_before(state: SessionState, number: int) -> int:
    """Number of a refused forward_backward since the step or load before; 0 = none.

    A step that was skipped ends an accumulation too: else one refusal would hold back all that follow.
    """
    while (record := state.records.get(("train", number := number - 1))) is not None:
        if record.kind in ("optim_step", "load_state"):
            return 0
        if record.breaks_accumulation:
            return number
    return 0


def next_samples(
    state: SessionState,
    started: Collection[Key],
    durable_frame: int,
    slots: int,
    covered: Callable[[Record], bool] = lambda record: True,
) -> list[Record]:
    """Keyless operations to start now, in order of acceptance. Streams are run by their own request.

    covered: whether budgets afford one; it is asked in this order, and for those alone that could start.
    """
    ready: list[Record] = []
    for key in state.open_keys:
        if len(ready) >= slots:
            break
        record = state.records[key]
        if key[0] == "log" and key not in started and not record.streaming:
            if record.accepted_frame > durable_frame:
                break
            if covered(record):
                ready.append(record)
    return ready


def gap_overdue(state: SessionState, now_us: int, since_us: int, timeout_s: float) -> int | None:
    """The missing number, once it is missing too long. `since_us`: never count from before this."""
    missing, missing_since = state.missing_number, state.missing_since_us
    if missing is None or missing_since is None or state.failure is not None or state.closed:
        return None
    return missing if now_us - max(missing_since, since_us) >= timeout_s * 1e6 else None


def unclaimed_overdue(
    state: SessionState, now_us: int, timeout_s: float, at_most: int
) -> list[int]:
    """Keyless operations whose result was not fetched in time, oldest first."""
    overdue: list[int] = []
    for number in state.unclaimed:
        if len(overdue) >= at_most:
            break
        if now_us - state.records["log", number].ended_us < timeout_s * 1e6:
            break
        overdue.append(number)
    return overdue


def snapshot_due(state: SessionState, replay_s_max: float, payload_bytes_max: int) -> bool:
    """Whether the worker should take a snapshot before the next train operation."""
    if state.executed_count == state.snapshots[1]:
        return False
    return (
        state.snapshot_forced
        or state.snapshot_wall_us >= replay_s_max * 1e6
        or state.snapshot_bytes >= payload_bytes_max
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStep:
    """Feed index again. `skip`: consume it only; it failed at first, or it changes no state."""

    record: Record
    skip: bool


def replay_step(state: SessionState, index: int) -> ReplayStep:
    record = state.record_of_index(index)
    return ReplayStep(
        record=record, skip=record.state == "Failed" or record.kind in STATELESS_KINDS
    )
