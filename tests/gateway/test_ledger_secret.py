"""The gateway at a ledger that asks its callers for a secret, as in a cluster."""

from pathlib import Path

import pytest

from gristmill_contracts.errors import UnavailableError
from gristmill_gateway.ledger_client import LedgerClient
from gristmill_testing.ledger import running_ledger

KEY = bytes(range(32))


@pytest.mark.parametrize(("key", "let_in"), [(KEY, True), (None, False), (b"x" * 32, False)])
async def test_the_ledger_lets_in_a_gateway_of_its_own_cluster_alone(
    tmp_path: Path, key: bytes | None, let_in: bool
) -> None:
    file = tmp_path / "cluster.key"
    file.write_bytes(KEY)
    async with running_ledger(tmp_path / "ledger", cluster_key_file=file) as ledger:
        client = LedgerClient(ledger.http, ledger.url, key)
        if let_in:
            account = await client.put_tenant("acme")
            assert len(account.account_id) == 12
            assert await client.session_usage("acme", "s-1") is not None
            return
        with pytest.raises(UnavailableError, match="both must have one cluster key"):
            await client.put_tenant("acme")
