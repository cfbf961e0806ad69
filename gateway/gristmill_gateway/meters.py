"""Talks to the meter of a session, wherever it is now: finds it, and looks again where it has moved."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, TypeVar

from gristmill_contracts import conditions
from gristmill_contracts.errors import (
    ConflictError,
    FencedError,
    GristmillError,
    NotFoundError,
    UnavailableError,
)
from gristmill_contracts.http import TERMINAL_STATES as ENDED
from gristmill_contracts.http import (
    OperationView,
    Refuse,
    SessionView,
    StreamChunk,
    Submit,
    Submitted,
)
from gristmill_contracts.ids import OpId
from gristmill_contracts.session import TERMINAL_STATES, TrainingSession
from gristmill_gateway.directory import Directory, Endpoint
from gristmill_gateway.inbox import Inbox
from gristmill_gateway.meter_client import MeterAwayError, MeterClient, NotServedError
from gristmill_gateway.waiting_room import WaitingRoom, is_passing
from gristmill_sessions.identity import session_name, session_uid

T = TypeVar("T")

MOVED_LOOK_S: Final = 1.0
INBOX_LOOK_S: Final = 1.0
"""How often a waiting submit asks the ledger's inbox again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meters:
    directory: Directory
    client: MeterClient
    room: WaitingRoom
    inbox: Inbox | None = None
    """Where operations go that find no meter; None = they wait for it."""

    async def submit(
        self, session: TrainingSession, message: Submit, as_of: float | None = None
    ) -> Submitted:
        """To the meter, or into the inbox of a session that is not served just now. Waits a while for either.

        Raises UnavailableError where neither takes it, ConflictError where it ended meanwhile, else what the
        meter or the ledger reported.
        """
        return await self._accepted(
            session,
            message,
            lambda: self._served(session, lambda at: self.client.submit(at, message), as_of),
        )

    async def refuse(self, session: TrainingSession, message: Refuse) -> Submitted:
        """As a submit: the number that was refused must reach the log before the next one."""
        return await self._accepted(
            session,
            message,
            lambda: self._served(session, lambda at: self.client.refuse(at, message)),
        )

    async def _accepted(
        self,
        session: TrainingSession,
        message: Submit | Refuse,
        served: Callable[[], Awaitable[Submitted]],
    ) -> Submitted:
        inbox = self.inbox
        if inbox is None:
            return await self._patiently(session, served)
        uid = session_uid(session)
        tenant = await self.directory.owner(session.metadata.namespace)
        look_at = 0.0

        async def accept() -> Submitted:
            nonlocal look_at
            try:
                return await served()
            except UnavailableError as error:
                if not is_passing(error):
                    raise
                look_at = time.monotonic() + INBOX_LOOK_S
                return await inbox.keep(uid, tenant, message, error)

        async def may_try() -> bool:
            return await self._may_try(session) or time.monotonic() >= look_at

        return await self.room.served(uid, accept, may_try)

    async def poll(
        self,
        session: TrainingSession,
        operation: OpId,
        wait_s: float,
        as_of: float | None = None,
    ) -> OperationView:
        """What the meter says; while none does, what the ledger's archive and inbox know.

        Raises NotFoundError only where the session is served and the operation's result is gone,
        UnavailableError where nobody can tell.
        """
        try:
            return await self._polled(session, operation, wait_s, as_of)
        except NotFoundError:
            waiting = await self._in_inbox(operation)
            if waiting is None:
                raise
            if waiting.state == "InProgress":  # Taken meanwhile, or long ago.
                return await self._polled(session, operation, wait_s, None)
            return waiting
        except UnavailableError:
            kept = await self._kept(session, operation)
            if kept is None:
                raise
            return kept

    async def _polled(
        self, session: TrainingSession, operation: OpId, wait_s: float, as_of: float | None
    ) -> OperationView:
        try:
            return await self._at(
                session, lambda at: self.client.poll(at, operation, wait_s), as_of
            )
        except NotFoundError:
            # The meter knows no such operation, or no such session yet: its view tells which.
            await self._served(session, self.client.view)
            raise

    async def _in_inbox(self, operation: OpId) -> OperationView | None:
        return None if self.inbox is None else await self.inbox.find(operation)

    async def _kept(self, session: TrainingSession, operation: OpId) -> OperationView | None:
        """What the ledger says of an operation that no meter tells of; None = nothing that will ever change."""
        if self.inbox is None:
            return None
        over = await self._is_over(session)
        # Its results may have come into the archive a moment ago, and nobody will ask again.
        found = await self.inbox.find(operation, anew=over)
        if found is None or found.state in ENDED or not over:
            return found
        if found.state == "Pending":
            tenant = await self.directory.owner(session.metadata.namespace)
            found = await self.inbox.skip(tenant, operation)
        return found if found is not None and found.state in ENDED else None

    async def _is_over(self, session: TrainingSession) -> bool:
        """Whether no meter will ever serve it again, and none does."""
        meta = session.metadata
        current = await self.directory.session_object(meta.namespace, meta.name)
        if current is None or session_uid(current) != session_uid(session):
            return True
        over = current.status.state in TERMINAL_STATES
        return over and await self.directory.endpoint(current) is None

    async def last_received_number(self, session: TrainingSession) -> int:
        """Highest train number that the ledger knows of; 0 = none, or not known now."""
        if self.inbox is None:
            return 0
        return await self.inbox.last_received_number(session_uid(session))

    async def view(self, session: TrainingSession) -> SessionView | None:
        """What the meter says now; None where there is none or it cannot be reached."""
        try:
            return await self._at(session, self.client.view)
        except GristmillError:
            return None

    async def open_stream(
        self, session: TrainingSession, message: Submit, stack: AsyncExitStack
    ) -> AsyncGenerator[StreamChunk, None]:
        """Submit a sample whose tokens are streamed; closing `stack` ends it, wherever it is."""

        async def open_at(at: Endpoint) -> AsyncGenerator[StreamChunk, None]:
            return await stack.enter_async_context(self.client.stream(at, message))

        return await self._patiently(session, lambda: self._served(session, open_at, stays=True))

    async def endpoint(self, session: TrainingSession, as_of: float | None = None) -> Endpoint:
        """Raises MeterAwayError where the session has no meter."""
        found = await self.directory.endpoint(session, as_of)
        if found is None:
            raise MeterAwayError(
                f"session {session.metadata.name} has no meter just now: it is being started or "
                f"recovered{_why(session)}; try again"
            )
        return found

    async def _patiently(self, session: TrainingSession, call: Callable[[], Awaitable[T]]) -> T:
        return await self.room.served(session_uid(session), call, lambda: self._may_try(session))

    async def _may_try(self, session: TrainingSession) -> bool:
        """Whether somebody serves the session now. Raises ConflictError once nobody will."""
        meta = session.metadata
        current = await self.directory.session_object(meta.namespace, meta.name)
        ending = current is None or current.metadata.deletion_time_us is not None
        if current is None or ending or current.status.state in TERMINAL_STATES:
            state = "Deleting" if current is None or ending else current.status.state
            raise ConflictError(
                f"Training session {session_name(session)} is {state}; operations are taken while it is "
                "Running or Blocked"
            )
        return await self.directory.endpoint(current) is not None

    async def _served(
        self,
        session: TrainingSession,
        call: Callable[[Endpoint], Awaitable[T]],
        as_of: float | None = None,
        *,
        stays: bool = False,
    ) -> T:
        try:
            return await self._at(session, call, as_of, stays=stays)
        except NotFoundError as error:
            raise NotServedError(f"{error.message}; it is being started: try again") from error

    async def _at(
        self,
        session: TrainingSession,
        call: Callable[[Endpoint], Awaitable[T]],
        as_of: float | None = None,
        *,
        stays: bool = False,
    ) -> T:
        """Call the meter; where another attempt serves by now, look it up and call that one.

        stays: the call is not given up when the session moves, for it stands in its caller's task.
        """
        made = self._made if stays else self._made_while_there
        try:
            return await made(session, await self.endpoint(session, as_of), call)
        except FencedError:
            fresh = await self.endpoint(session)
        try:
            return await made(session, fresh, call)
        except FencedError as error:
            raise UnavailableError(
                f"session {session.metadata.name} is moving to another attempt; try again"
            ) from error

    async def _made(
        self,
        _session: TrainingSession,
        endpoint: Endpoint,
        call: Callable[[Endpoint], Awaitable[T]],
    ) -> T:
        return await call(endpoint)

    async def _made_while_there(
        self,
        session: TrainingSession,
        endpoint: Endpoint,
        call: Callable[[Endpoint], Awaitable[T]],
    ) -> T:
        """A call to a meter whose node is gone would hang: it is given up once the session has left there."""
        task = asyncio.ensure_future(call(endpoint))
        try:
            while not (await asyncio.wait({task}, timeout=MOVED_LOOK_S))[0]:
                if await self._has_left(session, endpoint):
                    raise MeterAwayError(
                        f"session {session.metadata.name} has left its pod; try again"
                    )
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _has_left(self, session: TrainingSession, endpoint: Endpoint) -> bool:
        try:
            # One look at the store a second serves all calls that are held.
            found = await self.directory.endpoint(session, time.monotonic() - MOVED_LOOK_S)
        except UnavailableError:
            return False
        return found != endpoint


def _why(session: TrainingSession) -> str:
    """What the operator last said about it, in brackets."""
    for kind in (conditions.SERVING, conditions.PODS_READY, conditions.QUOTA_RESERVED):
        found = conditions.find(session.status.conditions, kind)
        if found is not None and found.status == "False":
            return f" ({': '.join(part for part in (found.reason, found.message) if part)})"
    return ""
