"""The meter's two neighbours, as ports: the worker below it and the ledger it posts to."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import msgspec

from gristmill_contracts.budgets import LeaseAnswer, OpenLease, ReturnLease, TakeLease
from gristmill_contracts.cluster_http import ArtifactInfo, HeartbeatAnswer
from gristmill_contracts.errors import UnavailableError
from gristmill_contracts.http import (
    Checkpoint,
    Executed,
    Heartbeat,
    OpenedSession,
    OpenSession,
    ProducerCursor,
    RegisterCheckpoint,
    RegisterProducer,
    Snapshotted,
    StreamChunk,
    UsageBatch,
    WorkerStatus,
)
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.inbox import AckInbox, ArchiveOperations, ClaimInbox, InboxPage


class WorkerLostError(UnavailableError):
    """The worker cannot be reached, or died before it answered. What it held may be gone."""


class LedgerAwayError(UnavailableError):
    """The ledger cannot be reached, or asks to be called again later."""


class SequenceGapError(UnavailableError):
    """The ledger expects another producer sequence number."""

    def __init__(self, message: str, expected_seq: int) -> None:
        super().__init__(message)
        self.expected_seq = expected_seq


class ExecuteCall(msgspec.Struct, kw_only=True):
    """`http.Execute` with the operation still encoded, as it lies in the log."""

    index: int
    op_id: str
    operation: msgspec.Raw
    replay: bool = False
    skip: bool = False
    expected_checksum: int | None = None
    expected_fingerprint: str | None = None
    opening: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose files are meant, and who asks for them."""

    tenant: TenantName
    session: SessionUid
    attempt: int


class Worker(Protocol):
    """Every call may raise WorkerLostError, or the error that the worker reported."""

    async def status(self) -> WorkerStatus: ...

    async def open_session(self, uid: SessionUid, request: OpenSession) -> OpenedSession: ...

    async def execute(self, uid: SessionUid, call: ExecuteCall) -> Executed: ...

    def stream(self, uid: SessionUid, call: ExecuteCall) -> AsyncGenerator[StreamChunk, None]:
        """Chunks of a sample; closing the generator stops the worker's work on it."""
        ...

    async def snapshot(self, uid: SessionUid) -> Snapshotted: ...

    async def close_session(self, uid: SessionUid) -> None: ...


class Ledger(Protocol):
    """Every call may raise LedgerAwayError, or the error that the ledger reported."""

    async def register_producer(self, request: RegisterProducer) -> ProducerCursor: ...

    async def post_batch(self, batch: UsageBatch, attempt: int) -> ProducerCursor:
        """Raises SequenceGapError where the ledger expects another number."""
        ...

    async def register_checkpoint(
        self, request: RegisterCheckpoint, attempt: int
    ) -> Checkpoint: ...

    async def post_heartbeats(self, heartbeats: list[Heartbeat]) -> HeartbeatAnswer: ...

    async def claim_inbox(self, uid: SessionUid, request: ClaimInbox) -> InboxPage: ...

    async def ack_inbox(self, uid: SessionUid, request: AckInbox) -> None: ...

    async def archive(self, uid: SessionUid, request: ArchiveOperations) -> None: ...

    async def take_lease(self, request: TakeLease) -> LeaseAnswer: ...

    async def return_lease(self, lease: str, request: ReturnLease) -> None:
        """Raises NotFoundError for one that the ledger does not know."""
        ...

    async def open_leases(self, uid: SessionUid, attempt: int) -> list[OpenLease]: ...

    async def artifact_sha256(self, owner: Owner, key: str) -> str | None:
        """Of a file below the tenant's folder; None = there is none."""
        ...

    async def put_artifact(self, owner: Owner, key: str, file: BinaryIO, sha256: str) -> None: ...

    async def list_artifacts(self, owner: Owner, prefix: str) -> list[ArtifactInfo]: ...

    def read_artifact(self, owner: Owner, key: str) -> AsyncIterator[bytes]: ...
