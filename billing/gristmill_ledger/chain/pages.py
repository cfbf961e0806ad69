"""Reading chains in order: pages of raw rows, and the heads that say where they end."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, select

from gristmill_contracts import limits
from gristmill_contracts.chain import encoding
from gristmill_contracts.chain.walk import Walk
from gristmill_ledger import schema
from gristmill_ledger.chain.rows import Head

_HEADS: Final = select(schema.tenant_head).order_by(schema.tenant_head.c.tenant)
_PAGE: Final = (
    select(*(schema.usage_event.c[name] for name in encoding.COLUMNS))
    .where(
        schema.usage_event.c.tenant == bindparam("key"),
        schema.usage_event.c.seq > bindparam("after"),
        schema.usage_event.c.seq <= bindparam("last"),
    )
    .order_by(schema.usage_event.c.seq)
    .limit(bindparam("most"))
)


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
    values = {"key": tenant, "after": after, "last": last, "most": most}
    return [tuple(row) for row in connection.execute(_PAGE, values)]


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


def walk_page(connection: Connection, walk: Walk, last: int) -> None:
    """Verify the next rows of a walk. Raises BrokenChainError."""
    rows = rows_after(connection, walk.tenant, walk.seq, last, limits.CHAIN_PAGE_ROWS)
    walk.add(rows)
    if not rows:
        walk.finish([], last=(last, walk.hash))
