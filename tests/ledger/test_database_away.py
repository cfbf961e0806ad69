"""A database that cannot take writes for a while: it is away, and the ledger goes on by itself when it is back."""

import uuid

import psycopg
import pytest

from gristmill_contracts.errors import UnavailableError
from gristmill_ledger.database import Database, open_engine
from gristmill_ledger.registry import put_tenant
from gristmill_testing.postgres import create_database


def test_a_server_that_became_a_standby_is_away_until_it_or_another_takes_writes(
    postgres_url: str,
) -> None:
    """Connections that were made to it would refuse writes for ever, also where it takes them again."""
    name = f"t{uuid.uuid4().hex}"
    url = create_database(postgres_url, name, "migrated")
    database = Database(
        open_engine(url, busy_timeout_s=30, connections=2), readers=1, writes_pending_max=8
    )

    def told_to_be_standby(told: str) -> None:
        with psycopg.connect(postgres_url, autocommit=True) as server:
            statement = f'ALTER DATABASE "{name}" SET default_transaction_read_only = {told}'
            server.execute(statement.encode())

    try:
        told_to_be_standby("on")
        for _ in range(2):
            with pytest.raises(UnavailableError, match="read-only"):
                database.write_now(lambda c: put_tenant(c, "acme"))
        told_to_be_standby("off")
        assert database.write_now(lambda c: put_tenant(c, "acme")).tenant == "acme"
    finally:
        database.close()
