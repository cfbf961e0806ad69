"""A session's state as bytes, and back: what a CHECKPOINT frame holds. Pure.

Only what cannot be told from the rest is written: who waits, who is unclaimed, which results are kept is
told by the records. Inline results are left out; they lie in their RESULT frames.
"""

from collections import deque
from typing import Final

import msgspec

from gristmill_contracts.errors import InvariantError
from gristmill_contracts.http import Problem
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.operations import CheckpointRef
from gristmill_contracts.reconciliation import Tally
from gristmill_contracts.usage import Counts, UsageEvent
from gristmill_meter.records import Record, SessionState
from gristmill_meter.retention import without_inline

SCALARS: Final = (
    "uid", "tenant", "project", "model", "attempt", "frames", "next_number",
    "last_received_number", "missing_since_us", "log_number", "inbox_number", "executed", "executed_before",
    "snapshots", "snapshot_wall_us", "snapshot_bytes", "snapshot_forced", "default_adapter",
    "counts", "head_seq", "told", "told_after", "failure", "failure_frame", "closed", "last_activity_us",
)  # fmt: skip


class StoredState(msgspec.Struct, kw_only=True):
    """`records` and `events` in the order in which the state holds them."""

    uid: SessionUid
    tenant: TenantName
    project: str
    model: str
    attempt: int
    frames: int
    next_number: int
    last_received_number: int
    missing_since_us: int | None
    log_number: int
    executed: list[int]
    executed_before: int
    snapshots: tuple[int, int]
    snapshot_wall_us: int
    snapshot_bytes: int
    snapshot_forced: bool
    default_adapter: CheckpointRef | None
    counts: Counts
    head_seq: int
    failure: Problem | None
    failure_frame: int
    closed: bool
    last_activity_us: int
    inbox_number: int = 0
    told: dict[str, Tally] | None = None
    """None = of a meter that added up none."""
    told_after: int = 0
    records: list[Record]
    events: list[tuple[int, UsageEvent]]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(StoredState)


def encode_state(state: SessionState) -> bytes:
    """All that the frames so far say."""
    records = [_stored(record) for record in state.records.values()]
    fields = {name: getattr(state, name) for name in SCALARS}
    return _encoder.encode(StoredState(records=records, events=list(state.events), **fields))


def restore_state(state: SessionState, content: bytes) -> None:
    """Make an empty state what `encode_state` was given, but for inline results."""
    stored = _decoder.decode(content)
    if stored.uid != state.uid or state.frames:
        raise InvariantError(f"the checkpoint of session {stored.uid} was read as {state.uid}")
    for name in SCALARS:
        setattr(state, name, getattr(stored, name))
    if stored.told is None:
        state.told, state.told_after = {}, stored.head_seq
    state.records = {record.key: record for record in stored.records}
    state.events = deque(stored.events)
    _retell(state)


def _retell(state: SessionState) -> None:
    """What the records say together."""
    records = list(state.records.values())
    waiting = sorted((r for r in records if not r.terminal), key=lambda r: r.accepted_frame)
    ended = sorted((r for r in records if r.terminal), key=lambda r: r.settled_frame)
    unclaimed = [record for record in ended if record.claim == "waiting"]
    state.open_keys = {record.key: None for record in waiting}
    state.open_bytes = sum(record.payload.size for record in waiting if record.payload)
    state.room_bytes = sum(record.room_bytes for record in waiting)
    state.unclaimed = {record.number: None for record in unclaimed}
    state.unclaimed_tokens = sum(record.counts.total for record in unclaimed)
    state.ended = deque(record.key for record in ended)
    state.results = deque(record.key for record in ended if record.result is not None)
    tokens = sorted(records, key=lambda record: record.accepted_frame)
    state.tokens = {r.client_token: r.key for r in tokens if r.client_token is not None}


def _stored(record: Record) -> Record:
    if record.result is None or record.result.inline is None:
        return record
    return msgspec.structs.replace(record, result=without_inline(record.result))
