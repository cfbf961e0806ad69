"""The 12-digit account of a tenant: from its resource, else from the ledger, which allocates it."""

from gristmill_gateway.directory import Directory
from gristmill_gateway.ledger_client import LedgerClient


class Accounts:
    """An account never changes, so one asked for is remembered for good."""

    def __init__(self, directory: Directory, ledger: LedgerClient) -> None:
        self._directory = directory
        self._ledger = ledger
        self._known: dict[str, str] = {}

    async def account_id(self, tenant: str) -> str:
        """Raises UnavailableError if only the ledger could tell and it does not answer."""
        known = self._known.get(tenant)
        if known is not None:
            return known
        resource = await self._directory.tenant(tenant)
        account = resource.status.account_id if resource is not None else ""
        if not account:
            account = (await self._ledger.put_tenant(tenant)).account_id
        self._known[tenant] = account
        return account
