"""The ledger's inbox and archive of a session: where its operations go, and its results are, while no meter
serves it."""

import time
from dataclasses import dataclass, field
from typing import Final, Protocol

from gristmill_contracts.errors import NotFoundError, ServedError, UnavailableError
from gristmill_contracts.http import OperationView, Refuse, Submit, Submitted
from gristmill_contracts.ids import OpId, SessionUid, TenantName
from gristmill_contracts.inbox import CloseInbox, InboxView, PostInbox

UNKNOWN_S: Final = 1.0
"""How long what the ledger does not know is not asked for again: many polls of one operation may be held."""
UNKNOWN_MAX: Final = 10_000


class Inboxes(Protocol):
    """The ledger's part. Every call raises UnavailableError where it does not answer."""

    async def post_inbox(self, uid: SessionUid, post: PostInbox) -> Submitted: ...

    async def view_inbox(self, uid: SessionUid) -> InboxView: ...

    async def close_inbox(self, uid: SessionUid, message: CloseInbox) -> None: ...

    async def archived(self, operation: OpId) -> OperationView:
        """Raises NotFoundError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbox:
    ledger: Inboxes
    _unknown: dict[OpId, float] = field(default_factory=dict)
    """Operations that the ledger knows nothing of, and until when it is not asked again."""

    async def keep(
        self, uid: SessionUid, tenant: str, message: Submit | Refuse, error: UnavailableError
    ) -> Submitted:
        """Accept it in the place of a meter that cannot be reached, which is `error`.

        Raises `error` where the ledger cannot take it either, or knows that the meter serves; else what the
        ledger refuses it for.
        """
        post = PostInbox(tenant=TenantName(tenant))
        if isinstance(message, Submit):
            post.submit = message
        else:
            post.refuse = message
        try:
            return await self.ledger.post_inbox(uid, post)
        except (ServedError, NotFoundError, UnavailableError) as refused:
            raise error from refused

    async def find(self, operation: OpId, *, anew: bool = False) -> OperationView | None:
        """What the ledger knows of an operation; None = nothing, now or (unless asked anew) a moment ago.

        Raises UnavailableError where it cannot tell just now: what it may have accepted is not lost.
        """
        # It accepts an operation before anybody can ask for it: what it does not know is no news.
        if not anew and time.monotonic() < self._unknown.get(operation, 0.0):
            return None
        try:
            return await self.ledger.archived(operation)
        except NotFoundError:
            if len(self._unknown) >= UNKNOWN_MAX:
                self._unknown.clear()
            self._unknown[operation] = time.monotonic() + UNKNOWN_S
            return None

    async def skip(self, tenant: str, operation: OpId) -> OperationView | None:
        """What became of an operation of a session that is over: nothing that still waits will run."""
        message = CloseInbox(
            tenant=TenantName(tenant), reason="the session ended before a meter took it"
        )
        try:
            await self.ledger.close_inbox(operation.session, message)
        except NotFoundError:
            return None
        return await self.find(operation, anew=True)

    async def last_received_number(self, uid: SessionUid) -> int:
        """Highest train number that waits or was told; 0 = none, or not known now."""
        try:
            return (await self.ledger.view_inbox(uid)).last_received_number
        except (NotFoundError, UnavailableError):
            return 0
