"""What a control plane handler is given: who asks, and the few things it may use."""

from typing import Protocol

from gristmill_contracts.http import SessionView
from gristmill_contracts.session import TrainingSession
from gristmill_gateway.access import Access
from gristmill_gateway.ledger_client import LedgerClient
from gristmill_gateway.sagemaker.arns import Scope
from gristmill_sessions.port import ResourceStore


class Caller(Protocol):
    """An authenticated caller."""

    @property
    def tenant(self) -> str: ...
    @property
    def service_account(self) -> str:
        """Whose rights the caller has; empty = all of the tenant's."""
        ...

    @property
    def scope(self) -> Scope: ...
    @property
    def invocation_id(self) -> str:
        """What the client sends again with every retry of one call; empty if it sends none."""
        ...


class Context(Protocol):
    @property
    def store(self) -> ResourceStore: ...
    @property
    def ledger(self) -> LedgerClient: ...
    @property
    def token_key(self) -> bytes:
        """Signs NextTokens."""
        ...

    @property
    def access(self) -> Access: ...
    @property
    def in_cluster(self) -> bool:
        """Sessions are custom resources: there are networks to choose, and a stop is an annotation."""
        ...

    async def namespace(self, tenant: str) -> str:
        """Where the tenant's sessions lie. Raises UnavailableError while that is nowhere."""
        ...

    async def fresh(self, session: TrainingSession) -> TrainingSession | None:
        """The session as it is this moment; None = it is gone. Raises UnavailableError."""
        ...

    async def session_view(self, session: TrainingSession) -> SessionView | None:
        """What the session's meter says now; None where there is no meter or it cannot be reached."""
        ...

    async def last_received_number(self, session: TrainingSession) -> int:
        """Highest train number that the ledger knows of; 0 = none, or not known now."""
        ...
