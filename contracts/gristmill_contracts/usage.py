"""Token counts and usage events: what a meter posts and a ledger keeps."""

from typing import Literal

import msgspec

from gristmill_contracts.ids import EventId, SessionUid, Stream, TenantName, UsageKind

TOKEN_TYPES = ("prefill", "cached_prefill", "sample", "train")
"""The four disjoint token types. Totals are always derived, never stored."""

TokenType = Literal["prefill", "cached_prefill", "sample", "train"]

OPERATION_KINDS = (
    "forward", "forward_backward", "optim_step", "save_weights", "save_state", "load_state",
    "sample", "compute_logprobs", "load_weights_for_sampling",
)  # fmt: skip

Outcome = Literal["completed", "aborted", "failed", "unknown"]


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens really run for the client, in four disjoint types. Never padding, never replays."""

    prefill: int = 0
    cached_prefill: int = 0
    sample: int = 0
    train: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            prefill=self.prefill + other.prefill,
            cached_prefill=self.cached_prefill + other.cached_prefill,
            sample=self.sample + other.sample,
            train=self.train + other.train,
        )

    @property
    def total(self) -> int:
        return self.prefill + self.cached_prefill + self.sample + self.train


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the ledger, as a pure function of the logical operation.

    `counts` is None only where completeness is unknown; those of adjustments are signed. Times are UTC
    microseconds.
    """

    event_id: EventId
    producer_seq: int
    kind: UsageKind
    n: int
    tenant: TenantName
    session: SessionUid
    stream: Stream
    number: int
    operation: str
    model: str
    project: str
    attempt: int
    outcome: Outcome
    counts: Counts | None
    op_start_us: int
    op_end_us: int
    key: str = ""
    """Id of the access key that submitted the operation; never its secret. "" = not told."""
    lease: str = ""
    """Id of the lease or reservation that it was reserved under; "" = none. Not a fact of the operation."""
    corrects: str = ""
    """Id of the event that an adjustment or a void corrects; "" for the other kinds."""
    reason: str = ""
    """Code of why it was corrected."""
