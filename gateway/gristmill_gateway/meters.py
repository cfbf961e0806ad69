"""Talks to the meter of a session, wherever it is now: finds it, and looks again where it has moved."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

from gristmill_contracts.errors import (
    FencedError,
    GristmillError,
    NotFoundError,
    UnavailableError,
)
from gristmill_contracts.http import (
    OperationView,
    Refuse,
    SessionView,
    StreamChunk,
    Submit,
    Submitted,
)
from gristmill_contracts.ids import OpId
from gristmill_contracts.session import TrainingSession
from gristmill_gateway.directory import Directory, Endpoint
from gristmill_gateway.meter_client import MeterAwayError, MeterClient, NotServedError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meters:
    directory: Directory
    client: MeterClient

    async def submit(
        self, session: TrainingSession, message: Submit, as_of: float | None = None
    ) -> Submitted:
        """Raises UnavailableError where the session is not served now, else what the meter reported."""
        return await self._served(session, lambda at: self.client.submit(at, message), as_of)

    async def refuse(self, session: TrainingSession, message: Refuse) -> Submitted:
        return await self._served(session, lambda at: self.client.refuse(at, message))

    async def poll(
        self,
        session: TrainingSession,
        operation: OpId,
        wait_s: float,
        as_of: float | None = None,
    ) -> OperationView:
        """Raises NotFoundError only where the session is served and the operation's result is gone."""
        try:
            return await self._at(
                session, lambda at: self.client.poll(at, operation, wait_s), as_of
            )
        except NotFoundError:
            # The meter knows no such operation, or no such session yet: its view tells which.
            await self._served(session, self.client.view)
            raise

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
        return await self._served(
            session, lambda at: stack.enter_async_context(self.client.stream(at, message))
        )

    async def endpoint(self, session: TrainingSession, as_of: float | None = None) -> Endpoint:
        """Raises MeterAwayError where the session has no meter."""
        found = await self.directory.endpoint(session, as_of)
        if found is None:
            raise MeterAwayError(
                f"session {session.metadata.name} has no meter just now: it is being started or "
                "recovered; try again"
            )
        return found

    async def _served(
        self,
        session: TrainingSession,
        call: Callable[[Endpoint], Awaitable[T]],
        as_of: float | None = None,
    ) -> T:
        try:
            return await self._at(session, call, as_of)
        except NotFoundError as error:
            raise NotServedError(f"{error.message}; it is being started: try again") from error

    async def _at(
        self,
        session: TrainingSession,
        call: Callable[[Endpoint], Awaitable[T]],
        as_of: float | None = None,
    ) -> T:
        """Call the meter; where another attempt serves by now, look it up and call that one."""
        try:
            return await call(await self.endpoint(session, as_of))
        except FencedError:
            fresh = await self.endpoint(session)
        try:
            return await call(fresh)
        except FencedError as error:
            raise UnavailableError(
                f"session {session.metadata.name} is moving to another attempt; try again"
            ) from error
