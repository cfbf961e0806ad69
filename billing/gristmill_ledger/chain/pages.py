"""Reading chains in order: pages of raw rows, and the heads that say where they end."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, func, select

from gristmill_contracts import limits
from gristmill_contracts.chain import encoding
from gristmill_contracts.chain.walk import Walk
from gristmill_ledger import schema
from gristmill_ledger.chain.rows import Head
from gristmill_ledger.driver import is_postgresql, raw_rows

_HEADS: Final = select(schema.tenant_head).order_by(schema.tenant_head.c.tenant)
_NAMES: Final = ", ".join(encoding.COLUMNS)
_PAGE: Final = (
    f"SELECT {_NAMES} FROM usage_event WHERE tenant = {{0}} AND seq > {{0}} AND seq <= {{0}} "  # noqa: S608
    "ORDER BY seq LIMIT {0}"
)
_SQLITE_PAGE: Final = _PAGE.format("?")
_POSTGRESQL_PAGE: Final = _PAGE.format("%s")


def chain_heads(connection: Connection) -> list[Head]:
    """The head of each tenant's chain, as the ledger records it."""
    return [
        Head(tenant=row.tenant, seq=row.seq, hash=bytes(row.hash))
        for row in connection.execute(_HEADS)
    ]


def chain_head(connection: Connection, tenant: str) -> Head:
    """The head of one tenant's chain; of no rows where there is none."""
    query = select(schema.tenant_head).where(schema.tenant_head.c.tenant == tenant)
    row = connection.execute(query).one_or_none()
    if row is None:
        return Head(tenant=tenant, seq=0, hash=encoding.GENESIS)
    return Head(tenant=tenant, seq=row.seq, hash=bytes(row.hash))


def rows_after(
    connection: Connection, tenant: str, after: int, last: int, most: int
) -> Sequence[tuple[Any, ...]]:  # Any: column values
    """Rows behind number `after` up to `last`, at most `most`, in the order of `encoding.COLUMNS`."""
    statement = _POSTGRESQL_PAGE if is_postgresql(connection) else _SQLITE_PAGE
    return raw_rows(connection, statement, (tenant, after, last, most))


def row_hash_at(connection: Connection, tenant: str, seq: int) -> bytes | None:
    """The hash that row `seq` carries; None = there is no such row."""
    if seq == 0:
        return encoding.GENESIS
    table = schema.usage_event.c
    query = select(table.hash).where(table.tenant == tenant, table.seq == seq)
    digest = connection.execute(query).scalar_one_or_none()
    return None if digest is None else bytes(digest)


def last_row(connection: Connection, tenant: str) -> int:
    """The highest number that a row of the tenant carries; 0 = no row."""
    table = schema.usage_event.c
    query = select(func.max(table.seq)).where(table.tenant == tenant)
    return connection.execute(query).scalar_one() or 0


def walk_page(
    connection: Connection, walk: Walk, last: int, rows_max: int = limits.CHAIN_PAGE_ROWS
) -> None:
    """Verify the next rows of a walk. Raises BrokenChainError."""
    rows = rows_after(connection, walk.tenant, walk.seq, last, rows_max)
    walk.add(rows)
    if not rows:
        walk.finish([], last=(last, walk.hash))
