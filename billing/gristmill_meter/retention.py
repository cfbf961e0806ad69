"""What may be forgotten: results, operations, segments and blobs that nobody can need any more. Pure.

Nothing goes that the ledger has not acknowledged, that replay may need, or whose result may be fetched.
None of it is in the log: a later start forgets it again.
"""

from gristmill_meter.frames import Body
from gristmill_meter.records import Key, Record, SessionState


def forget(state: SessionState, ended_before_us: int, durable_frame: int) -> None:
    """Let go of results whose retention is over, then of operations that have none and matter no more."""
    acknowledged = min(_first_unacked_frame(state) - 1, durable_frame)
    _forget_results(state, ended_before_us, acknowledged)
    _forget_records(state, ended_before_us, acknowledged)


def _first_unacked_frame(state: SessionState) -> int:
    return state.events[0][0] if state.events else state.frames + 1


def _forget_results(state: SessionState, ended_before_us: int, acknowledged: int) -> None:
    while state.results:
        record = state.records[state.results[0]]
        unposted = max(record.settled_frame, record.claim_frame) > acknowledged
        if record.ended_us >= ended_before_us or unposted:
            return
        if record.result is not None and record.result.inline is not None:
            state.inline_bytes -= record.result.size
        record.result = None
        state.results.popleft()


def _forget_records(state: SessionState, ended_before_us: int, acknowledged: int) -> None:
    while state.ended and state.records[state.ended[0]].ended_us < ended_before_us:
        state.lingering[state.ended.popleft()] = None
    for key in [key for key in state.lingering if _is_over(state, key, acknowledged)]:
        record = state.records.pop(key)
        del state.lingering[key]
        if record.client_token is not None and state.tokens.get(record.client_token) == key:
            del state.tokens[record.client_token]
    _drop_executed(state)
    while state.inline_results and state.inline_results[0] not in state.records:
        state.inline_results.popleft()


def _is_over(state: SessionState, key: Key, acknowledged: int) -> bool:
    record = state.records[key]
    replayable = record.index > state.snapshots[0]
    expected = key[0] == "train" and key[1] >= state.next_number
    open_end = not record.terminal or record.result is not None or record.claim == "waiting"
    unposted = max(record.settled_frame, record.claim_frame) > acknowledged
    return not (replayable or expected or open_end or unposted)


def _drop_executed(state: SessionState) -> None:
    """Forget which operations had the lowest indices, once their records are gone."""
    gone = 0
    for number in state.executed:
        if ("train", number) in state.records:
            break
        gone += 1
    del state.executed[:gone]
    state.executed_before += gone


def trim_results(state: SessionState, bytes_max: int) -> None:
    """Let go of the oldest inline results in memory; the log keeps them, each in its RESULT frame."""
    while state.inline_results and state.inline_bytes > bytes_max:
        record = state.records.get(state.inline_results.popleft())
        if record is not None and record.result is not None and record.result.inline is not None:
            state.inline_bytes -= record.result.size
            record.result = without_inline(record.result)


def without_inline(body: Body) -> Body:
    """A body whose bytes are to be read from its frame again."""
    return Body(size=body.size, crc=body.crc, blob=body.blob)


def needed_from(state: SessionState) -> int:
    """The first frame that somebody may still need, beside what a CHECKPOINT at or below it says.

    A CHECKPOINT holds what waits and what replay needs; not inline results, which are read from their
    frames. Usage is kept at hand until the ledger has it.
    """
    frames = [_first_unacked_frame(state)]
    if state.results:
        frames.append(state.records[state.results[0]].settled_frame)
    return min(frames)


def blob_is_needed(state: SessionState, name: str, first_frame: int) -> bool:
    """Whether a blob file holds a payload, a result or a checkpoint that may still be asked for."""
    operation, _, part = name.rpartition(".")
    stream, _, number = operation.partition("-")
    if not number.isdecimal():
        return False
    if stream == "checkpoint":
        return int(number) >= first_frame
    if stream not in ("train", "log"):
        return False
    record = state.records.get(("train" if stream == "train" else "log", int(number)))
    body = None if record is None else _body(record, part)
    return body is not None and body.blob == name


def _body(record: Record, part: str) -> Body | None:
    return record.payload if part == "op" else record.result
