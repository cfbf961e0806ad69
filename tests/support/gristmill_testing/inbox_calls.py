"""Asks a ledger about the inbox and archive of one session, as gateways and meters do."""

from dataclasses import dataclass
from typing import Any

import msgspec

from gristmill_contracts import operations as ops
from gristmill_contracts.cluster_http import HeartbeatAnswer
from gristmill_contracts.http import (
    Empty,
    Heartbeat,
    OperationState,
    OperationView,
    Refuse,
    SessionView,
    Submit,
    Submitted,
)
from gristmill_contracts.ids import SessionUid, Stream, TenantName
from gristmill_contracts.inbox import (
    AckInbox,
    ArchivedOperation,
    ArchiveOperations,
    ClaimInbox,
    CloseInbox,
    InboxPage,
    InboxSkip,
    InboxView,
    PostInbox,
)
from gristmill_contracts.units import now_us
from gristmill_contracts.usage import Counts
from gristmill_testing.ledger import LedgerClient
from gristmill_testing.meter_world import make_submit, optim_step

TENANT = TenantName("acme")


@dataclass(slots=True, kw_only=True)
class InboxCalls:
    client: LedgerClient
    uid: str = "s-1"

    async def post(self, message: Submit | Refuse, tenant: TenantName = TENANT) -> Submitted:
        post = PostInbox(tenant=tenant)
        if isinstance(message, Submit):
            post.submit = message
        else:
            post.refuse = message
        return await self.client.ask(Submitted, "POST", f"{self._path}/inbox", post)

    async def submit(
        self, number: int | None, operation: ops.Operation | None = None, **how: Any
    ) -> Submitted:
        return await self.post(make_submit(number, operation or optim_step(), **how))

    async def refuse(self, number: int, *, breaks: bool = False) -> Submitted:
        return await self.post(
            Refuse(number=number, client_token=None, message="no", breaks_accumulation=breaks)
        )

    async def register(self, attempt: int = 1, head_seq: int = 0) -> None:
        await self.client.register(self.uid, session=self.uid, attempt=attempt, head_seq=head_seq)

    async def claim(self, attempt: int = 1, after: int = 0) -> InboxPage:
        request = ClaimInbox(attempt=attempt, after=after)
        return await self.client.ask(InboxPage, "POST", f"{self._path}/inbox/claim", request)

    async def ack(
        self, *taken: int, attempt: int = 1, skipped: list[InboxSkip] | None = None
    ) -> None:
        request = AckInbox(attempt=attempt, taken=list(taken), skipped=skipped or [])
        await self.client.ask(Empty, "POST", f"{self._path}/inbox/ack", request)

    async def close(self, reason: str = "the session was stopped") -> None:
        request = CloseInbox(tenant=TENANT, reason=reason)
        await self.client.ask(Empty, "POST", f"{self._path}/inbox/close", request)

    async def view(self) -> InboxView:
        return await self.client.ask(InboxView, "GET", f"{self._path}/inbox")

    async def poll(self, stream: Stream, number: int) -> OperationView:
        path = f"{self._path}/archive/{stream}/{number}"
        return await self.client.ask(OperationView, "GET", path)

    async def archive(
        self, *operations: ArchivedOperation, attempt: int = 1, retention_s: float = 3600
    ) -> None:
        request = ArchiveOperations(
            attempt=attempt, retention_s=retention_s, operations=list(operations)
        )
        await self.client.ask(Empty, "POST", f"{self._path}/archive", request)

    async def beat(self, attempt: int = 1, state: Any = "Serving", received: int = 0) -> Any:
        """A heartbeat of a meter that received the train numbers up to `received`."""
        view = SessionView(
            uid=SessionUid(self.uid),
            attempt=attempt,
            last_received_number=received,
            next_number=received + 1,
            missing_number=None,
            missing_since_us=None,
            state=state,
            error=None,
            counts=Counts(),
            last_activity_us=0,
        )
        beat = Heartbeat(
            view=view,
            tenant=TENANT,
            acked_seq=0,
            head_seq=0,
            snapshot_applied=0,
            worker_ready=True,
            at_us=now_us(),
        )
        return await self.client.ask(HeartbeatAnswer, "POST", "/v1/heartbeats", [beat])

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{self.uid}"


def archived(
    number: int,
    *,
    stream: Stream = "train",
    state: OperationState = "Completed",
    ended_us: int | None = None,
    size: int = 0,
) -> ArchivedOperation:
    """An operation that ended just now; `size`: about how many bytes its result has."""
    result = ops.OptimStepResult(metrics={"step": float(number)})
    encoded = msgspec.msgpack.encode(result)
    if size:
        logprobs = ops.tensor("float32", [0.5] * (size // 4))
        encoded = msgspec.msgpack.encode(
            ops.ForwardResult(outputs=[{"logprobs": logprobs}], metrics={})
        )
    return ArchivedOperation(
        stream=stream,
        number=number,
        kind="optim_step",
        state=state,
        ended_us=now_us() if ended_us is None else ended_us,
        result=encoded if state == "Completed" else None,
        counts=Counts(train=number) if state == "Completed" else None,
    )
