"""`apply`: the session's state as a function of its log. No I/O, no clock: times come with frames."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from gristmill_contracts import limits
from gristmill_contracts.errors import InvariantError
from gristmill_contracts.http import OperationState, Problem
from gristmill_contracts.ids import Stream, UsageKind, event_id
from gristmill_contracts.reconciliation import NOTHING, tally_name, tally_of
from gristmill_contracts.usage import Counts, Outcome, UsageEvent
from gristmill_meter import frames
from gristmill_meter.frames import Frame
from gristmill_meter.records import STATELESS_KINDS, Record, SessionState


def apply(state: SessionState, frame: Frame) -> list[Record]:
    """Take the next frame in. Returns the records that ended by it."""
    state.frames += 1
    handler: Callable[..., list[Record]] = _HANDLERS[type(frame)]
    ended = handler(state, frame)
    if not isinstance(frame, frames.Snapshot | frames.Closed | frames.Checkpoint):
        state.last_activity_us = max(state.last_activity_us, frame.at_us)
    return ended


def _opened(state: SessionState, frame: frames.Opened) -> list[Record]:
    if frame.uid != state.uid:
        raise InvariantError(f"the log of session {frame.uid} was opened as {state.uid}")
    state.tenant, state.project = frame.tenant, frame.project
    state.model, state.attempt = frame.model, frame.attempt
    return []


def _intent(state: SessionState, frame: frames.Intent) -> list[Record]:
    record = Record(
        stream=frame.stream,
        number=frame.number,
        kind=frame.kind,
        state="Pending",
        body_hash=frame.body_hash,
        client_token=frame.client_token,
        accepted_us=frame.at_us,
        accepted_frame=state.frames,
        payload=frame.payload,
        counts=frame.counts,
        room_bytes=frame.room_bytes,
        streaming=frame.streaming,
        key_id=frame.key,
        worst=frame.worst,
        may_wait=frame.may_wait,
    )
    _receive(state, record, frame.at_us)
    state.open_keys[record.key] = None
    state.open_bytes += frame.payload.size
    state.room_bytes += frame.room_bytes
    return []


def _refused(state: SessionState, frame: frames.Refused) -> list[Record]:
    record = Record(
        stream="train",
        number=frame.number,
        kind="",
        state="Refused",
        body_hash=b"",
        client_token=frame.client_token,
        accepted_us=frame.at_us,
        accepted_frame=state.frames,
        breaks_accumulation=frame.breaks_accumulation,
        error=Problem(code="invalid_request", message=frame.message),
        ended_us=frame.at_us,
        settled_frame=state.frames,
    )
    _receive(state, record, frame.at_us)
    state.ended.append(record.key)
    return [record]


def _receive(state: SessionState, record: Record, at_us: int) -> None:
    state.records[record.key] = record
    if record.client_token is not None:
        state.tokens[record.client_token] = record.key
    if record.stream == "log" and record.number >= limits.INBOX_LOG_NUMBER_MIN:
        state.inbox_number = record.number
        return
    if record.stream == "log":
        state.log_number = record.number
        return
    missing = state.missing_number
    state.last_received_number = max(state.last_received_number, record.number)
    while ("train", state.next_number) in state.records:
        state.next_number += 1
    if state.missing_number is None:
        state.missing_since_us = None
    elif state.missing_number != missing:
        state.missing_since_us = at_us


def _result(state: SessionState, frame: frames.Result) -> list[Record]:
    record = _end(state, state.records[frame.stream, frame.number], "Completed", frame.at_us)
    record.result, record.counts = frame.result, frame.counts
    record.checksum, record.fingerprint = frame.checksum, frame.fingerprint
    record.started_us, record.lease = frame.started_us, frame.lease
    if frame.default_adapter is not None:
        state.default_adapter = frame.default_adapter
    _executed(state, record, frame.index, frame.wall_us)
    state.results.append(record.key)
    if frame.result.inline is not None:
        state.inline_results.append(record.key)
        state.inline_bytes += frame.result.size
    if record.stream == "log" or record.kind in STATELESS_KINDS:
        record.payload = None
    state.snapshot_forced |= record.kind == "load_state"
    if record.stream == "train" or record.streaming:
        _bill(state, record, "usage", "completed")
    else:
        record.claim = "waiting"
        state.unclaimed[record.number] = None
        state.unclaimed_tokens += record.counts.total
    return [record]


def _failed(state: SessionState, frame: frames.Failed) -> list[Record]:
    record = _end(state, state.records[frame.stream, frame.number], "Failed", frame.at_us)
    record.error, record.started_us = frame.error, frame.started_us
    _executed(state, record, frame.index, frame.wall_us)
    record.counts, record.lease = frame.counts or Counts(), frame.lease
    record.payload = None
    if frame.counts is not None:
        _bill(state, record, "usage", "aborted")
    if frame.stream != "train":
        return [record]
    behind = (key for key in list(state.open_keys) if key[0] == "train" and key[1] > frame.number)
    reason = f"operation {frame.number}, which came before, failed: {frame.error.message}"
    return [record, *_skip(state, behind, reason, frame.at_us)]


def _executed(state: SessionState, record: Record, index: int, wall_us: int) -> None:
    """Note that the worker consumed an index."""
    record.index, record.wall_us = index, wall_us
    if index == 0:
        return
    if index != state.executed_count + 1:
        raise InvariantError(
            f"{state.op_id(record)} has index {index} behind {state.executed_count} executed ones"
        )
    state.executed.append(record.number)
    state.snapshot_wall_us += wall_us
    state.snapshot_bytes += record.payload.size if record.payload else 0


def _skipped(state: SessionState, frame: frames.Skipped) -> list[Record]:
    return _skip(state, frame.operations, frame.reason, frame.at_us)


def _skip(
    state: SessionState, keys: Iterable[tuple[Stream, int]], reason: str, at_us: int
) -> list[Record]:
    ended = []
    for key in keys:
        record = _end(state, state.records[key], "Skipped", at_us)
        record.error = Problem(code="operation_failed", message=f"skipped: {reason}")
        record.counts = Counts()
        record.payload = None
        ended.append(record)
    return ended


def _end(state: SessionState, record: Record, how: OperationState, at_us: int) -> Record:
    if record.key not in state.open_keys:
        raise InvariantError(f"{state.op_id(record)} is {record.state} and cannot become {how}")
    del state.open_keys[record.key]
    state.open_bytes -= record.payload.size if record.payload else 0
    state.room_bytes -= record.room_bytes
    record.state, record.ended_us, record.settled_frame = how, at_us, state.frames
    state.ended.append(record.key)
    return record


def _progress(state: SessionState, frame: frames.Progress) -> list[Record]:
    record = state.records["log", frame.number]
    record.progress_prompt, record.progress_tokens = frame.prompt_tokens, frame.tokens
    record.progress_cached = frame.cached_tokens
    record.started_us, record.lease = frame.started_us, frame.lease
    return []


def _claim(state: SessionState, frame: frames.Claim) -> list[Record]:
    record = _leave_unclaimed(state, frame.number)
    record.claim = "claimed"
    _bill(state, record, "usage", "completed")
    return []


def _expired(state: SessionState, frame: frames.Expired) -> list[Record]:
    for number in frame.numbers:
        record = _leave_unclaimed(state, number)
        record.claim = "expired"
        _bill(state, record, "attempt", "completed")
    return []


def _leave_unclaimed(state: SessionState, number: int) -> Record:
    record = state.records["log", number]
    if record.claim != "waiting":
        raise InvariantError(f"{state.op_id(record)} is not waiting for a claim: {record.claim!r}")
    del state.unclaimed[number]
    state.unclaimed_tokens -= record.counts.total
    record.claim_frame = state.frames
    return record


def _bill(state: SessionState, record: Record, kind: UsageKind, outcome: Outcome) -> None:
    """The next usage event: a pure function of the operation and its place in the log."""
    n = 0 if kind == "usage" else 1
    state.head_seq += 1
    event = UsageEvent(
        event_id=event_id(state.op_id(record), kind, n),
        producer_seq=state.head_seq,
        kind=kind,
        n=n,
        tenant=state.tenant,
        session=state.uid,
        stream=record.stream,
        number=record.number,
        operation=record.kind,
        model=state.model,
        project=state.project,
        attempt=state.attempt,
        outcome=outcome,
        counts=record.counts,
        op_start_us=record.started_us,
        op_end_us=record.ended_us,
        key=record.key_id,
        lease=record.lease,
    )
    state.events.append((state.frames, event))
    name = tally_name(kind, record.kind)
    state.told[name] = state.told.get(name, NOTHING) + tally_of(record.counts)
    if kind == "usage":
        state.counts += record.counts


def _snapshot(state: SessionState, frame: frames.Snapshot) -> list[Record]:
    older, newer = state.snapshots
    if frame.applied != newer:
        state.snapshots = (newer, frame.applied)
        for record in state.executed_between(older, newer):
            record.payload = None
    records = state.executed_between(frame.applied)
    state.snapshot_wall_us = sum(record.wall_us for record in records)
    state.snapshot_bytes = sum(record.payload.size for record in records if record.payload)
    state.snapshot_forced = False
    return []


def _session_failed(state: SessionState, frame: frames.SessionFailed) -> list[Record]:
    state.failure, state.failure_frame = frame.error, state.frames
    return _skip(state, frame.skipped, frame.error.message, frame.at_us)


def _closed(state: SessionState, frame: frames.Closed) -> list[Record]:
    state.closed = True
    return []


def _checkpoint(state: SessionState, frame: frames.Checkpoint) -> list[Record]:
    """It says what the state is already: read from it, or by the frames before."""
    return []


_HANDLERS: Final[dict[type[Any], Callable[..., list[Record]]]] = {  # Any: one type per frame
    frames.Opened: _opened,
    frames.Intent: _intent,
    frames.Refused: _refused,
    frames.Result: _result,
    frames.Failed: _failed,
    frames.Skipped: _skipped,
    frames.Progress: _progress,
    frames.Claim: _claim,
    frames.Expired: _expired,
    frames.Snapshot: _snapshot,
    frames.SessionFailed: _session_failed,
    frames.Closed: _closed,
    frames.Checkpoint: _checkpoint,
}
