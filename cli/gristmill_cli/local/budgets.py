"""The budgets of manifests on this machine: told to the ledger before a session starts, and when they change."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from gristmill_contracts.budgets import PutBudget, ScopeType
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_sessions.budgets import (
    BudgetLedger,
    keep_budgets,
    session_budgets,
    tenant_budgets,
)
from gristmill_sessions.identity import session_uid

logger = logging.getLogger(__name__)
Owner = tuple[str, ScopeType, str]
"""Tenant, kind of scope, and whose budget it is."""


@dataclass(slots=True)
class BudgetKeeper:
    """Remembers what it told, so that nothing is told twice."""

    ledger: BudgetLedger
    told: dict[Owner, dict[str, PutBudget]] = field(default_factory=dict)
    failed: dict[Owner, str] = field(default_factory=dict)
    """What stands in the log: it is said once, not at every pass."""

    async def tell_session(self, session: TrainingSession, currency: str | None) -> None:
        """Raises the ledger's errors. currency: of the session's rate card, if it is known."""
        uid = session_uid(session)
        owner: Owner = (session.metadata.namespace, "session", uid)
        await self._tell(owner, session_budgets(session, uid, currency))

    async def keep_tenants(self, tenants: Iterable[Tenant]) -> None:
        """What the ledger refuses, or cannot take now, is logged and told again at the next pass."""
        for tenant in tenants:
            name = tenant.metadata.name
            try:
                await self._tell((name, "tenant", name), tenant_budgets(tenant))
            except GristmillError as error:
                self._say_once((name, "tenant", name), error)

    async def keep_session(self, session: TrainingSession, currency: str | None) -> None:
        """Of one that was registered before: as `keep_tenants`."""
        try:
            await self.tell_session(session, currency)
        except GristmillError as error:
            self._say_once((session.metadata.namespace, "session", session_uid(session)), error)

    def _say_once(self, owner: Owner, error: GristmillError) -> None:
        said = error.code if error.retryable else error.message
        if self.failed.get(owner) == said:
            return
        self.failed[owner] = said
        _tenant, kind, name = owner
        logger.warning("budget_not_told", extra={kind: name, "error": error.message})

    async def _tell(self, owner: Owner, wanted: dict[str, PutBudget]) -> None:
        if self.told.get(owner) == wanted:
            return
        tenant, scope_type, scope = owner
        await keep_budgets(self.ledger, tenant, scope_type, scope, wanted)
        self.told[owner] = wanted
        self.failed.pop(owner, None)
