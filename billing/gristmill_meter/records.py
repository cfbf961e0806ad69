"""What a session's log says: one record for each operation, and the session around them."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from gristmill_contracts.http import TERMINAL_STATES, OperationState, Problem
from gristmill_contracts.ids import OpId, SessionUid, Stream, TenantName
from gristmill_contracts.operations import CheckpointRef
from gristmill_contracts.reconciliation import Tally
from gristmill_contracts.usage import Counts, UsageEvent
from gristmill_meter.frames import Body

Key = tuple[Stream, int]

STATELESS_KINDS: Final = frozenset({"forward", "save_weights", "save_state"})
"""Train operations that change nothing in the worker: replay need not run them."""
NOTHING: Final = Counts()
NOBODY: Final = TenantName("")


class Record(msgspec.Struct, kw_only=True, array_like=True):
    """One operation, from its INTENT (or refusal) on. Frame numbers say what its answers wait for.

    A checkpoint holds records as arrays: fields are added at the end, with a default.
    """

    stream: Stream
    number: int
    kind: str
    state: OperationState
    body_hash: bytes
    client_token: str | None
    accepted_us: int
    accepted_frame: int
    payload: Body | None = None
    counts: Counts = NOTHING
    room_bytes: int = 0
    streaming: bool = False
    key_id: str = ""
    """Id of the access key that submitted it."""
    worst: Counts = NOTHING
    may_wait: bool = True
    lease: str = ""
    """The budget lease under which it is billed."""
    breaks_accumulation: bool = False
    result: Body | None = None
    error: Problem | None = None
    index: int = 0
    checksum: int | None = None
    fingerprint: str = ""
    wall_us: int = 0
    started_us: int = 0
    ended_us: int = 0
    settled_frame: int = 0
    claim: Literal["", "waiting", "claimed", "expired"] = ""
    claim_frame: int = 0
    progress_prompt: int = 0
    progress_tokens: int = 0
    progress_cached: int = 0

    @property
    def key(self) -> Key:
        return (self.stream, self.number)

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def failed_in_worker(self) -> bool:
        """The worker consumed an index for it, and nothing of it stayed."""
        return self.state == "Failed" and self.index > 0


@dataclass(slots=True, kw_only=True)
class SessionState:
    """Everything the log says. Changed by `state.apply` alone."""

    uid: SessionUid
    tenant: TenantName = NOBODY
    project: str = ""
    model: str = ""
    attempt: int = 0
    frames: int = 0
    records: dict[Key, Record] = field(default_factory=dict)
    tokens: dict[str, Key] = field(default_factory=dict)
    """Client token -> its operation."""
    open_keys: dict[Key, None] = field(default_factory=dict)
    """Accepted operations that have not ended, in order of acceptance."""
    open_bytes: int = 0
    room_bytes: int = 0
    """Room reserved for results of accepted operations."""
    unclaimed: dict[int, None] = field(default_factory=dict)
    """Keyless operations whose result nobody fetched yet, in order of completion."""
    unclaimed_tokens: int = 0
    next_number: int = 1
    last_received_number: int = 0
    missing_since_us: int | None = None
    log_number: int = 0
    inbox_number: int = 0
    """Number of the last keyless operation that came through the ledger's inbox."""
    executed: list[int] = field(default_factory=list)
    """executed[i]: train number of the operation with index executed_before + i + 1."""
    executed_before: int = 0
    """Executed operations, the first ones, that are forgotten: both snapshots hold them."""
    snapshots: tuple[int, int] = (0, 0)
    """Applied counts of the older and the newer snapshot."""
    snapshot_wall_us: int = 0
    """Execution time since the newer snapshot."""
    snapshot_bytes: int = 0
    """Payload bytes since the newer snapshot."""
    snapshot_forced: bool = False
    default_adapter: CheckpointRef | None = None
    counts: Counts = NOTHING
    """Settled and billed."""
    results: deque[Key] = field(default_factory=deque)
    """Completed operations whose result is kept, in order of completion."""
    inline_results: deque[Key] = field(default_factory=deque)
    """Those whose result is in memory, oldest first."""
    inline_bytes: int = 0
    ended: deque[Key] = field(default_factory=deque)
    """Operations that have ended and whose records are kept, in that order."""
    lingering: dict[Key, None] = field(default_factory=dict)
    """Those of them that are past retention, and needed all the same."""
    events: deque[tuple[int, UsageEvent]] = field(default_factory=deque)
    """(frame number, event) of what the ledger may not have yet, in producer order."""
    head_seq: int = 0
    told: dict[str, Tally] = field(default_factory=dict)
    """Sums of all usage events, by `reconciliation.tally_name`."""
    told_after: int = 0
    """Events up to this one are in none of these sums: the log's checkpoint was older than they are."""
    failure: Problem | None = None
    failure_frame: int = 0
    closed: bool = False
    last_activity_us: int = 0

    @property
    def missing_number(self) -> int | None:
        return self.next_number if self.next_number <= self.last_received_number else None

    def op_id(self, record: Record) -> OpId:
        return OpId(self.uid, record.stream, record.number)

    @property
    def executed_count(self) -> int:
        """Index of the train operation that was executed last."""
        return self.executed_before + len(self.executed)

    def record_of_index(self, index: int) -> Record:
        return self.records["train", self.executed[index - self.executed_before - 1]]

    def executed_between(self, after: int, until: int | None = None) -> list[Record]:
        """Records of the indices above `after`, up to `until` (None = the last)."""
        stop = None if until is None else until - self.executed_before
        numbers = self.executed[max(0, after - self.executed_before) : stop]
        return [self.records["train", number] for number in numbers]
