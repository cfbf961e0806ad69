"""A ledger in memory with the semantics that a meter relies on, and switches to make it fail."""

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import BinaryIO

from gristmill_contracts import limits
from gristmill_contracts.budgets import LeaseAnswer, OpenLease, ReturnLease, TakeLease
from gristmill_contracts.cluster_http import ArtifactInfo, Directive, HeartbeatAnswer
from gristmill_contracts.errors import (
    ConflictError,
    FencedError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
)
from gristmill_contracts.http import (
    Checkpoint,
    Heartbeat,
    ProducerCursor,
    RegisterCheckpoint,
    RegisterProducer,
    UsageBatch,
)
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.inbox import (
    AckInbox,
    ArchivedOperation,
    ArchiveOperations,
    ClaimInbox,
    InboxEntry,
    InboxPage,
    InboxSkip,
)
from gristmill_contracts.usage import Counts, UsageEvent
from gristmill_meter.clocks import boottime_us
from gristmill_meter.ports import LedgerAwayError, Owner, SequenceGapError
from gristmill_testing.fake_budgets import FakeBudgets


@dataclass(slots=True)
class FakeLedger:
    """Implements `gristmill_meter.ports.Ledger`.

    `away`: every call fails. `lose_answers`: so many batches are stored and their answers lost.
    """

    away: bool = False
    tells_acked: bool = True
    """False: as a ledger of the release before."""
    lose_answers: int = 0
    events: list[UsageEvent] = field(default_factory=list)
    cursors: dict[str, int] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    heartbeats: dict[str, Heartbeat] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    directives: dict[SessionUid, Directive] = field(default_factory=dict)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    """Tenant and path -> content."""
    sent: list[str] = field(default_factory=list)
    """Paths of artifacts, in the order in which they came."""
    garble: int = 0
    """So many artifacts arrive cut short."""
    on_artifact: Callable[[str], None] = lambda key: None
    handed_in: list[UsageEvent] = field(default_factory=list)
    """Events of fenced attempts."""
    on_checkpoint: Callable[[], None] = lambda: None
    checkpoint_error: GristmillError | None = None
    calls: Counter[str] = field(default_factory=Counter)
    clock_us: Callable[[], int] = boottime_us
    budgets: FakeBudgets = field(default_factory=FakeBudgets)
    lose_leases: int = 0
    """So many leases are granted and their answers lost."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """(acked_seq, head_seq) of usage that no log holds any more."""
    grants: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Session -> the attempt that may release, and until when."""

    inboxes: dict[str, list[InboxEntry]] = field(default_factory=dict)
    skipped: list[InboxSkip] = field(default_factory=list)
    archived: dict[tuple[str, str, int], ArchivedOperation] = field(default_factory=dict)

    async def register_producer(self, request: RegisterProducer) -> ProducerCursor:
        self._answer("register_producer")
        if request.epoch < self.epochs.get(request.producer, 0):
            raise FencedError(f"epoch {request.epoch} of {request.producer} is older than known")
        if request.attempt < self.attempts.get(request.producer, 0):
            raise FencedError(
                f"attempt {request.attempt} of {request.producer} is older than known"
            )
        self.epochs[request.producer] = request.epoch
        self.attempts[request.producer] = request.attempt
        acked = self.cursors.get(request.producer, 0)
        if acked < request.first_seq - 1:
            self.gaps.append((acked, request.first_seq - 1))
            self.cursors[request.producer] = request.first_seq - 1
        return self._cursor(request.producer)

    async def post_batch(self, batch: UsageBatch, attempt: int) -> ProducerCursor:
        self._answer("post_batch")
        if attempt < self.attempts.get(batch.producer, 0):
            self.handed_in += batch.events
            last = batch.first_seq + len(batch.events) - 1
            return ProducerCursor(producer=batch.producer, acked_seq=last, fenced=True)
        acked = self.cursors.get(batch.producer, 0)
        if batch.producer not in self.epochs:
            raise NotFoundError(f"producer {batch.producer} is not registered")
        if batch.first_seq > acked + 1:
            raise SequenceGapError("a gap", acked + 1)
        known = {event.event_id: event for event in self.events}
        for event in batch.events:
            if event.event_id in known:
                if known[event.event_id] != event:
                    raise ConflictError(f"event {event.event_id} was posted with another payload")
                continue
            if event.producer_seq != acked + 1:
                raise SequenceGapError("a gap", acked + 1)
            self.events.append(event)
            self.budgets.post(event)
            acked += 1
        self.cursors[batch.producer] = acked
        if self.lose_answers > 0:
            self.lose_answers -= 1
            raise LedgerAwayError("the answer was lost")
        return self._cursor(batch.producer)

    async def register_checkpoint(self, request: RegisterCheckpoint, attempt: int) -> Checkpoint:
        self._answer("register_checkpoint")
        if attempt < self.attempts.get(request.session, 0):
            raise FencedError(f"attempt {attempt} of {request.session} is older than known")
        self.on_checkpoint()
        if self.checkpoint_error is not None:
            raise self.checkpoint_error
        if request.id not in self.checkpoints:
            group = [c for c in self.checkpoints.values() if c.group == request.group]
            fields = {name: getattr(request, name) for name in request.__struct_fields__}
            self.checkpoints[request.id] = Checkpoint(version=len(group) + 1, **fields)
        return self.checkpoints[request.id]

    async def post_heartbeats(self, heartbeats: list[Heartbeat]) -> HeartbeatAnswer:
        self._answer("post_heartbeats")
        for beat in heartbeats:
            self.heartbeats[beat.view.uid] = beat
            if not self.states or self.states[-1] != beat.view.state:
                self.states.append(beat.view.state)
        known = {beat.view.uid: beat.view.attempt for beat in heartbeats}
        return HeartbeatAnswer(
            acked=self.tell_acked(known),
            release_until_s=self._grants(heartbeats),
            leases=self.budgets.renew([lease for beat in heartbeats for lease in beat.leases]),
            budgets={beat.view.uid: self.budgets.version for beat in heartbeats},
            directives={
                uid: told.desired
                for uid, told in self.directives.items()
                if known.get(uid) == told.attempt
            },
            inbox=[uid for uid in known if self.inboxes.get(uid)],
            fenced=[uid for uid, attempt in known.items() if attempt < self.attempts.get(uid, 0)],
        )

    def _grants(self, heartbeats: list[Heartbeat]) -> dict[str, float]:
        granted = {}
        for beat in heartbeats:
            uid, attempt = beat.view.uid, beat.view.attempt
            holder, until_us = self.grants.get(uid, (attempt, 0))
            if beat.released:
                self.grants[uid] = (holder, 0 if holder == attempt else until_us)
            elif self.attempts.get(uid) == attempt and (
                holder == attempt or (holder < attempt and until_us <= self.clock_us())
            ):
                self.grants[uid] = (attempt, self.clock_us() + int(limits.RELEASE_GRANT_S * 1e6))
                granted[uid] = limits.RELEASE_GRANT_S
        return granted

    def let_grants_run_out(self) -> None:
        """As if nobody had beaten for half a minute."""
        self.grants = {uid: (attempt, 0) for uid, (attempt, _) in self.grants.items()}

    async def claim_inbox(self, uid: SessionUid, request: ClaimInbox) -> InboxPage:
        self._answer("claim_inbox")
        if request.attempt < self.attempts.get(uid, 0):
            raise FencedError(f"attempt {request.attempt} of {uid} is older than known")
        waiting = self.inboxes.get(uid, [])
        return InboxPage(entries=waiting[:2], served=not waiting)

    async def ack_inbox(self, uid: SessionUid, request: AckInbox) -> None:
        self._answer("ack_inbox")
        if request.attempt < self.attempts.get(uid, 0):
            raise FencedError(f"attempt {request.attempt} of {uid} is older than known")
        gone = {*request.taken, *(skip.position for skip in request.skipped)}
        self.skipped += request.skipped
        waiting = [each for each in self.inboxes.get(uid, []) if each.position not in gone]
        self.inboxes[uid] = [] if request.closes else waiting

    async def archive(self, uid: SessionUid, request: ArchiveOperations) -> None:
        self._answer("archive")
        for each in request.operations:
            self.archived.setdefault((uid, each.stream, each.number), each)

    async def take_lease(self, request: TakeLease) -> LeaseAnswer:
        self._answer("take_lease")
        if request.attempt < self.attempts.get(request.session, 0):
            raise FencedError(f"attempt {request.attempt} of {request.session} is older than known")
        answer = self.budgets.take(request)
        if self.lose_leases > 0:
            self.lose_leases -= 1
            raise LedgerAwayError("the answer was lost")
        return answer

    async def return_lease(self, lease: str, request: ReturnLease) -> None:
        self._answer("return_lease")
        self.budgets.give_back(lease, request)

    async def open_leases(self, uid: SessionUid, attempt: int) -> list[OpenLease]:
        self._answer("open_leases")
        return self.budgets.open_leases(uid)

    def tell_acked(self, uids: Iterable[str]) -> dict[str, int] | None:
        if not self.tells_acked:
            return None
        return {uid: self.cursors.get(uid, 0) for uid in uids if uid in self.epochs}

    def restore(self) -> None:
        """Come back from a backup that was made before anything happened."""
        self.events.clear()
        self.cursors.clear()
        self.epochs.clear()
        self.attempts.clear()

    async def artifact_sha256(self, owner: Owner, key: str) -> str | None:
        self._answer("artifact_sha256")
        content = self.artifacts.get(f"{owner.tenant}/{key}")
        return None if content is None else hashlib.sha256(content).hexdigest()

    async def put_artifact(self, owner: Owner, key: str, file: BinaryIO, sha256: str) -> None:
        self._answer("put_artifact")
        self.on_artifact(key)
        if owner.attempt < self.attempts.get(owner.session, 0):
            raise FencedError(f"attempt {owner.attempt} of {owner.session} is older than known")
        content = file.read()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise InvalidRequestError(f"artifact {key} is not what was told")
        self.artifacts[f"{owner.tenant}/{key}"] = content
        self.sent.append(key)

    async def list_artifacts(self, owner: Owner, prefix: str) -> list[ArtifactInfo]:
        self._answer("list_artifacts")
        whole = f"{owner.tenant}/{prefix}"
        return [
            ArtifactInfo(
                path=path.removeprefix(f"{owner.tenant}/"),
                size_bytes=len(content),
                sha256=hashlib.sha256(content).hexdigest(),
                modified_us=0,
            )
            for path, content in sorted(self.artifacts.items())
            if path.startswith(whole)
        ]

    async def read_artifact(self, owner: Owner, key: str) -> AsyncIterator[bytes]:
        self._answer("read_artifact")
        content = self.artifacts[f"{owner.tenant}/{key}"]
        if self.garble > 0:
            self.garble -= 1
            content = content[:-1]
        for at in range(0, len(content), 3):
            yield content[at : at + 3]

    def billed(self, session: str | None = None) -> Counts:
        """Sum of the usage events, attempts left out."""
        total = Counts()
        for event in self.events:
            if event.kind == "usage" and event.counts and session in (None, event.session):
                total += event.counts
        return total

    def of(self, stream: str, number: int) -> list[UsageEvent]:
        return [e for e in self.events if (e.stream, e.number) == (stream, number)]

    def _answer(self, call: str) -> None:
        self.calls[call] += 1
        if self.away:
            raise LedgerAwayError("the fake ledger is away")

    def _cursor(self, producer: str) -> ProducerCursor:
        return ProducerCursor(producer=producer, acked_seq=self.cursors.get(producer, 0))
