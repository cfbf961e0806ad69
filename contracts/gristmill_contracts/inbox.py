"""Where a session's operations and results lie while no meter serves it: messages of the ledger's inbox
and archive.

gateway -> ledger:
    POST /v1/sessions/{uid}/inbox                  PostInbox -> Submitted; 409 `served` once a meter serves;
                                                   503 where only the meter's log can say; 429 when full
    GET  /v1/sessions/{uid}/inbox                  -> InboxView
    POST /v1/sessions/{uid}/inbox/close            CloseInbox -> Empty: what waits is Skipped
    GET  /v1/sessions/{uid}/archive/{stream}/{number}  -> OperationView: of the archive, else of the inbox
meter -> ledger:
    POST /v1/sessions/{uid}/inbox/claim            ClaimInbox -> InboxPage
    POST /v1/sessions/{uid}/inbox/ack              AckInbox -> Empty
    POST /v1/sessions/{uid}/archive                ArchiveOperations -> Empty (idempotent)

An operation that waits in the inbox is accepted: the meter of the next attempt takes it, in order,
into its log before it takes a call. Taking it twice is taking it once: its identity is the log's.
"""

from typing import Literal

import msgspec

from gristmill_contracts.http import OperationState, Problem, Refuse, Submit
from gristmill_contracts.ids import Stream, TenantName
from gristmill_contracts.usage import Counts


class PostInbox(msgspec.Struct, kw_only=True):
    """Exactly one of `submit` and `refuse`."""

    tenant: TenantName
    submit: Submit | None = None
    refuse: Refuse | None = None


class InboxView(msgspec.Struct, kw_only=True):
    waiting: int
    """Operations that no meter has taken yet."""
    waiting_bytes: int
    last_received_number: int
    """Highest train number that the inbox ever took, or that a heartbeat told; 0 = none."""
    served_by: int | None
    """The attempt whose meter serves now."""
    closed: bool


class CloseInbox(msgspec.Struct, kw_only=True):
    tenant: TenantName
    reason: str


class ClaimInbox(msgspec.Struct, kw_only=True):
    """By the meter of a registered attempt. With nothing left to take the session is served from then on."""

    attempt: int
    after: int = 0
    """Position behind which entries are given; 0 = from the first that waits."""


class InboxEntry(msgspec.Struct, kw_only=True):
    position: int
    stream: Stream
    number: int
    """The train number; of stream `log` one above limits.INBOX_LOG_NUMBER_MIN, which the ledger gave."""
    kind: Literal["submit", "refuse"]
    body: bytes
    """The Submit or Refuse in msgpack."""
    accepted_us: int


class InboxPage(msgspec.Struct, kw_only=True):
    entries: list[InboxEntry]
    served: bool
    """Nothing waits, and until the attempt falls silent nothing will: take calls."""


class InboxSkip(msgspec.Struct, kw_only=True):
    """An entry that the log cannot take, and why."""

    position: int
    reason: str


class AckInbox(msgspec.Struct, kw_only=True):
    """`taken`: positions that are durable in the meter's log."""

    attempt: int
    taken: list[int]
    skipped: list[InboxSkip] = []
    closes: str = ""
    """Not empty: the session is over, for this reason. What waits is Skipped, and nothing more is taken."""


class ArchivedOperation(msgspec.Struct, kw_only=True):
    """A terminal operation as the meter would tell it. `result`: http.Result in msgpack."""

    stream: Stream
    number: int
    kind: str
    state: OperationState
    ended_us: int
    result: bytes | None = None
    counts: Counts | None = None
    error: Problem | None = None


class ArchiveOperations(msgspec.Struct, kw_only=True):
    attempt: int
    retention_s: float
    """How long after its end an operation's result is kept."""
    operations: list[ArchivedOperation]
