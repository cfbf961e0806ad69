"""What the SageMaker wire works with."""

import asyncio
from dataclasses import dataclass, field

from gristmill_contracts import limits
from gristmill_contracts.http import SessionView
from gristmill_contracts.session import TrainingSession
from gristmill_gateway.access import Access, OwnersAccess
from gristmill_gateway.directory import Directory
from gristmill_gateway.ledger_client import LedgerClient
from gristmill_gateway.meters import Meters
from gristmill_gateway.metrics import Metrics
from gristmill_sessions.port import ResourceStore


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeContext:
    """Also a `control_context.Context`. operation_key signs operation ids, token_key page tokens.

    draining: set when the process is told to end; held answers are then let go.
    """

    store: ResourceStore
    directory: Directory
    ledger: LedgerClient
    meters: Meters
    metrics: Metrics
    operation_key: bytes
    token_key: bytes
    access: Access = field(default_factory=OwnersAccess)
    in_cluster: bool = False
    result_wait_s: float = limits.RESULT_WAIT_S_MAX
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    async def fresh(self, session: TrainingSession) -> TrainingSession | None:
        return await self.directory.fresh(session)

    async def namespace(self, tenant: str) -> str:
        return await self.directory.namespace(tenant)

    async def session_view(self, session: TrainingSession) -> SessionView | None:
        """What the session's meter says now; None where there is no meter or it cannot be reached."""
        return await self.meters.view(session)

    async def last_received_number(self, session: TrainingSession) -> int:
        """Highest train number that the ledger knows of; 0 = none, or not known now."""
        return await self.meters.last_received_number(session)
