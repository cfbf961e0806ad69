"""The HTTP messages between our own processes, and their routes. All bodies are msgpack.

Errors everywhere: a `Problem` body with a 4xx or 5xx status.

gateway -> meter (HTTP; headers `Authorization: Bearer <attempt secret>`, `X-Gristmill-Attempt: <n>`;
another attempt is answered 421 `fenced`):
    POST /v1/sessions/{uid}/operations             Submit -> Submitted, once INTENT is durable
    POST /v1/sessions/{uid}/refusals               Refuse -> Submitted: closes a number, runs nothing
    GET  /v1/sessions/{uid}/operations/{stream}/{number}?wait_s=  -> OperationView (held until terminal)
    POST /v1/sessions/{uid}/streams                Submit of a Sample with num_samples=1
                                                   -> length-prefixed msgpack `StreamChunk`s
    GET  /v1/sessions/{uid}                        -> SessionView
meter -> worker (HTTP on a unix socket):
    GET  /v1/status                                -> WorkerStatus
    PUT  /v1/sessions/{uid}                        OpenSession -> OpenedSession (idempotent)
    POST /v1/sessions/{uid}/execute                Execute -> Executed
    POST /v1/sessions/{uid}/stream                 Execute of a Sample -> length-prefixed msgpack:
                                                   `StreamChunk`s, the last with `final`
    POST /v1/sessions/{uid}/snapshot               -> Snapshotted, once it is durable; operations that are sent
                                                   meanwhile run, and are not in it
    DELETE /v1/sessions/{uid}                      -> Empty
meter -> ledger (HTTP):
    POST /v1/producers                             RegisterProducer -> ProducerCursor
    POST /v1/usage/batches                         UsageBatch -> ProducerCursor; gap: 409 with Problem.expected_seq.
                                                   X-Gristmill-CRC32 of the body (contracts.body_crc): "torn"
    POST /v1/cloudevents                           the same in JSON, see docs/reference/cloudevents.md
    POST /v1/checkpoints                           RegisterCheckpoint -> Checkpoint (idempotent by id)
    POST /v1/heartbeats                            list[Heartbeat] -> HeartbeatAnswer (contracts.cluster_http)
    PUT  /v1/artifacts/{tenant}/{path}             raw bytes; X-Gristmill-SHA256 of them -> Empty;
                                                   a path that ends with / makes a folder
    GET, HEAD, DELETE same (GET takes Range: bytes=)
    GET  /v1/artifacts/{tenant}?prefix=&after=&limit=&delimiter=  -> ArtifactPage
In a cluster every call to the ledger carries `Authorization: Bearer <secret>`: a meter the producer secret
of its attempt with `X-Gristmill-Session` and `X-Gristmill-Attempt`, a service its own secret with
`X-Gristmill-Service` (contracts.secrets).
    leases and budgets: see contracts.budgets
gateway, cli, operator -> ledger:
    PUT  /v1/sessions/{uid}/directive              Directive -> Empty: told to the meter by HeartbeatAnswer
    POST /v1/sessions/{uid}/gaps                   UsageGap -> Empty: usage given up, on record
    GET  /v1/sessions/{uid}/gaps                   -> list[UsageGap]
    GET  /v1/heartbeats?after=&wait_s=             -> HeartbeatPage
    POST /v1/sessions                              RegisterSession -> Empty (idempotent)
    PUT  /v1/tenants/{name}                        -> TenantAccount (allocates the 12-digit account id)
    POST /v1/checkpoint-groups                     CreateGroup -> CheckpointGroup; existing: 409 conflict
    GET  /v1/checkpoint-groups/{tenant}/{name}     -> CheckpointGroup
    GET  /v1/checkpoints?tenant=&group=&after=&limit=&order=  -> CheckpointPage
    GET  /v1/checkpoints/{tenant}/{group}/{version}           -> Checkpoint
    DELETE same                                    -> Empty (tombstone: facts stay)
    GET  /v1/usage, /v1/explain, /v1/estimate; POST /v1/rerate: JSON, see docs/reference/usage-api.md
    GET  /v1/events?session=&after=&limit=         -> {"events": [stored row], "next_after": seq | None}
    PUT  /v1/price-books/{name}                    PriceBook -> Empty
"""

from typing import Literal

import msgspec

from gristmill_contracts.checkpoint_http import (
    Checkpoint,
    CheckpointGroup,
    CheckpointPage,
    CreateGroup,
    RegisterCheckpoint,
)
from gristmill_contracts.ids import SessionUid, Stream, TenantName
from gristmill_contracts.operations import Operation, Result
from gristmill_contracts.reconciliation import DeviceTime, ReconPoint, SessionTallies
from gristmill_contracts.usage import Counts, UsageEvent

__all__ = ("Checkpoint", "CheckpointGroup", "CheckpointPage", "CreateGroup", "RegisterCheckpoint")
"""Messages that lie apart, and are named here too. What is defined below needs no list."""

PROTOCOL_VERSION = 1
CONTENT_TYPE = "application/msgpack"
ATTEMPT_HEADER = "X-Gristmill-Attempt"
SESSION_HEADER = "X-Gristmill-Session"
SERVICE_HEADER = "X-Gristmill-Service"
SHA256_HEADER = "X-Gristmill-SHA256"
PROTOCOL_HEADER = "X-Gristmill-Protocol"
"""Of a request and of its answer: the version that the sender speaks. Its own and the one before are served."""

OperationState = Literal["Pending", "InProgress", "Completed", "Failed", "Skipped", "Refused"]
TERMINAL_STATES: frozenset[OperationState] = frozenset(
    {"Completed", "Failed", "Skipped", "Refused"}
)


class Problem(msgspec.Struct, kw_only=True):
    """An error on its way between our processes."""

    code: str
    message: str
    retryable: bool = False
    expected_seq: int | None = None
    last_number: int | None = None


class Empty(msgspec.Struct):
    pass


# --- gateway and meter ---------------------------------------------------------------------------


class Submit(msgspec.Struct, kw_only=True):
    """An operation to accept. Stream `train` needs the client's number; `log` numbers itself.

    body_hash: SHA-256 of the translated request without server-made parts. The same number with the
    same hash is the same operation; with another it is a conflict that names the last number.
    """

    stream: Stream
    number: int | None
    client_token: str | None
    body_hash: bytes
    operation: Operation
    key: str = ""
    """Id of the access key that the request was signed with; it is no secret."""
    may_wait: bool = True
    """False: its client waits for the answer itself; it fails at once where a budget does not afford it."""


class Refuse(msgspec.Struct, kw_only=True):
    """A request that failed validation, whose number must not leave a gap."""

    number: int
    client_token: str | None
    message: str
    breaks_accumulation: bool
    """True for a refused forward_backward: the optim_step directly behind it is Skipped."""


class Submitted(msgspec.Struct, kw_only=True):
    stream: Stream
    number: int
    state: OperationState
    duplicate: bool = False


class OperationView(msgspec.Struct, kw_only=True):
    """What a poll may return. `result` and `counts` only when Completed and released."""

    stream: Stream
    number: int
    kind: str
    state: OperationState
    result: Result | None = None
    counts: Counts | None = None
    error: Problem | None = None


class SessionView(msgspec.Struct, kw_only=True):
    uid: SessionUid
    attempt: int
    last_received_number: int
    """Highest train number received; 0 = none."""
    next_number: int
    """Lowest train number not received yet."""
    missing_number: int | None
    missing_since_us: int | None
    state: Literal["Serving", "Recovering", "Blocked", "Failed", "Draining", "Closed"]
    error: Problem | None
    counts: Counts
    """Settled usage of the session so far, as posted or about to be."""
    last_activity_us: int
    open_operations: int | None = None
    """Accepted operations without an end; None = not told."""


class StreamChunk(msgspec.Struct, kw_only=True):
    """A flush of a token stream: durable in the log before it leaves the meter."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    prompt_tokens: int
    final: Literal["stop", "length"] | None = None
    error: Problem | None = None
    number: int = 0
    """The operation's number in stream `log`; set by the meter."""
    budget: Problem | None = None
    """With `final`: the stream was cut because a budget affords no more."""
    cached_tokens: int = 0
    """Of the prompt: read from the worker's prefix cache."""


# --- meter and worker ----------------------------------------------------------------------------


class OpenSession(msgspec.Struct, kw_only=True):
    """Create the adapter, or restore it from the newest snapshot of `state_dir`."""

    tenant: TenantName
    rank: int
    alpha: int
    seed: int
    state_dir: str
    """Folder for this session's snapshots; the worker alone writes there."""
    applied_max: int | None = None
    """The caller's log holds this many. A live state ahead of it (an answer was lost) is dropped, and
    the newest snapshot with `applied <= applied_max`, or a fresh adapter, takes its place."""


class OpenedSession(msgspec.Struct, kw_only=True):
    """`applied`: how many mutating operations the restored state holds (its Execute.index)."""

    applied: int
    rank: int
    alpha: int
    fingerprint: str
    boot_id: str
    checksum: int
    opening: int = 0
    """Names this opening in `Execute` and in what the worker tells of its runs; 0 = it tells nothing."""


class Execute(msgspec.Struct, kw_only=True):
    """Run one operation. `index` counts the session's executed train operations from 1; samples have 0.

    A train operation must carry `applied + 1`. With `replay` the answer is discarded by the caller and
    saves write nothing; `expected_checksum` is compared after an optim_step or load_state.
    """

    index: int
    op_id: str
    operation: Operation
    replay: bool = False
    skip: bool = False
    """Consume `index` and run nothing: in replay, for what failed or changed no state at first."""
    expected_checksum: int | None = None
    expected_fingerprint: str | None = None
    opening: int = 0
    """The opening that it was sent under: what ran of another one is not counted in it."""


class Executed(msgspec.Struct, kw_only=True):
    """`error` set: the operation failed, nothing of it stays, and index is consumed all the same."""

    result: Result | None
    error: Problem | None
    checksum: int | None
    """After optim_step and load_state: an integer checksum of weights and moments."""
    fingerprint: str
    wall_us: int


class Snapshotted(msgspec.Struct, kw_only=True):
    applied: int
    size_bytes: int


class WorkerStatus(msgspec.Struct, kw_only=True):
    boot_id: str
    model: str
    ready: bool
    fingerprint: str
    vocabulary_size: int
    context_length: int
    sessions: dict[str, int]
    """Session uid -> applied."""
    tallies: dict[str, SessionTallies] = {}
    """Session uid -> what ran of it since it was opened last."""
    devices: int = 0
    """Accelerators that this worker holds; 0 = it runs on the CPU."""


# --- meter and ledger ----------------------------------------------------------------------------


class RegisterProducer(msgspec.Struct, kw_only=True):
    """One producer per session log. `head_seq`: the highest usage sequence the log holds."""

    producer: str
    tenant: TenantName
    session: SessionUid
    epoch: int
    """Grows when a new log is begun for the session. A lower one than known is fenced."""
    attempt: int
    head_seq: int
    first_seq: int = 1
    """The lowest usage sequence that the log still holds. Where the ledger has less than what lies before
    it (it was restored from an old backup), that is a gap: recorded, and passed over."""


class ProducerCursor(msgspec.Struct, kw_only=True):
    producer: str
    acked_seq: int
    fenced: bool = False
    """The events are kept, but a newer attempt owns the session: release nothing more."""


class UsageBatch(msgspec.Struct, kw_only=True):
    producer: str
    epoch: int
    first_seq: int
    events: list[UsageEvent]


class Heartbeat(msgspec.Struct, kw_only=True):
    """The observed state of one session at its meter. The ledger keeps the newest one of each session."""

    view: SessionView
    tenant: TenantName
    acked_seq: int
    head_seq: int
    snapshot_applied: int
    worker_ready: bool
    at_us: int
    released: bool = False
    """This attempt releases no result any more: its release grant is free for the next one."""
    leases: list[str] = []
    """Budget leases that the meter holds, to be renewed (contracts.budgets)."""
    recon: ReconPoint | None = None
    """What is compared with the worker and with the ledger; None = not told."""
    device: DeviceTime | None = None
    """How long devices were held for the session, and how long it used them; None = not told."""
    cost: str | None = None
    """What the session's usage costs so far, with its currency ("0.001234 USD"); filled by the ledger
    for its readers. None = not priced."""


class HeartbeatPage(msgspec.Struct, kw_only=True):
    heartbeats: list[Heartbeat]
    cursor: int


class RegisterSession(msgspec.Struct, kw_only=True):
    uid: SessionUid
    tenant: TenantName
    project: str
    name: str
    model: str
    rank: int
    created_us: int
    price_book: str | None = None
    """What its usage is priced by; the first that is named stays. None = the ledger's default."""


class TenantAccount(msgspec.Struct, kw_only=True):
    tenant: TenantName
    account_id: str


# --- supervisor or operator, and meter -----------------------------------------------------------


class Assignment(msgspec.Struct, kw_only=True):
    """One session that a meter serves: a JSON file `<uid>.json` in the meter's assignments folder.

    Written (temp, fsync, rename) by whoever runs the pod: the supervisor embedded, the operator through
    the pod in the cluster. The meter scans the folder; it never talks to the writer.
    """

    uid: SessionUid
    tenant: TenantName
    project: str
    name: str
    model: str
    attempt: int
    secret: str
    rank: int
    alpha: int
    seed: int
    checkpoint_group: str
    desired: Literal["serve", "stop"]
    """stop: finish what runs, Skip what is queued, ship the log, then report Closed."""
