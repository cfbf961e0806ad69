"""Budgets that name what nobody knows: said, for it may be misspelt; made all the same, for it may be to come."""

from pathlib import Path
from typing import Final

from gristmill_cli.options import find_layout, open_store
from gristmill_contracts.budgets import BudgetView
from gristmill_contracts.credentials import AccessKey
from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_sessions.identity import session_uid
from gristmill_sessions.local import LocalStore

COMMANDS: Final = {
    "tenant": "`gristmill keys list` shows the tenants of this machine",
    "project": "a session names its project in spec.project",
    "session": "name its uid, as `gristmill describe session` tells it",
    "key": "`gristmill keys list` shows the ids of keys",
}


def warnings_of(budget: BudgetView, data_dir: Path | None, ledger_url: str) -> list[str]:
    """What is to be said of what a budget names. On one machine its store knows more than the ledger was told."""
    if budget.ended:
        return []
    unknown: str = budget.unheard_of
    if not ledger_url:
        unknown = _unknown_here(open_store(find_layout(data_dir)), budget)
    if not unknown:
        return []
    name = budget.tenant if unknown == "tenant" else budget.scope
    where = "" if unknown == "tenant" else f" in tenant {budget.tenant}"
    return [
        f"nobody knows a {unknown} {name!r}{where} so far, so that budget {budget.id} bounds nothing yet; if it is "
        f"misspelt, end the budget: {COMMANDS[unknown]}"
    ]


def _unknown_here(store: LocalStore, budget: BudgetView) -> str:
    """What neither the store nor the ledger knows."""
    kind = budget.scope_type
    if budget.unheard_of == "tenant":
        try:
            store.get(Tenant, "", budget.tenant)
        except NotFoundError:
            return "tenant"
    if kind == "key":
        keys = {key.spec.access_key_id for key in store.list(AccessKey, budget.tenant)}
        return "" if budget.scope in keys else "key"
    if kind == "tenant" or not budget.unheard_of:
        return ""
    sessions = store.list(TrainingSession, budget.tenant)
    if kind == "session":
        names = {str(session_uid(session)) for session in sessions}
    else:
        names = {session.spec.project for session in sessions}
    return "" if budget.scope in names else kind
