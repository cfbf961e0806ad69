"""Sessions of this machine by their names: the ledger knows them by their uids."""

from pathlib import Path

from gristmill_cli.options import find_layout, open_store
from gristmill_contracts.session import TrainingSession
from gristmill_sessions.identity import session_uid


def uid_of(data_dir: Path | None, ledger_url: str, tenant: str, name: str) -> str:
    """The uid of a session that is named as it is here; else the name itself, as for a cluster's ledger.

    Tenant "" = any. A name that two tenants have is that of the first: name the tenant.
    """
    if ledger_url or not name:
        return name
    for session in open_store(find_layout(data_dir)).list(TrainingSession):
        mine = not tenant or session.metadata.namespace == tenant
        if mine and session.metadata.name == name:
            return session_uid(session)
    return name
