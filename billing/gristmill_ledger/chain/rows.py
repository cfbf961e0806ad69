"""New rows at the end of a tenant's chain: numbered without a gap, linked, inserted as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, select

from gristmill_contracts.chain import encoding
from gristmill_ledger import schema
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.driver import copy_rows, is_postgresql

Row = tuple[encoding.Value, ...]
"""The values of a row in the order of `encoding.COLUMNS`."""

_NAMES: Final = ", ".join(encoding.COLUMNS)
# Straight to the driver: composing a statement of 32 columns for each row took most of an ingest.
_SQLITE_INSERT: Final = (
    f"INSERT INTO usage_event ({_NAMES}) VALUES ({', '.join('?' * len(encoding.COLUMNS))})"  # noqa: S608
)
_POSTGRESQL_COPY: Final = f"COPY usage_event ({_NAMES}) FROM STDIN"

_HEAD: Final = (
    select(schema.tenant_head.c.seq, schema.tenant_head.c.hash)
    .where(schema.tenant_head.c.tenant == bindparam("key"))
    .with_for_update()
)
_MOVE_HEAD: Final = (
    schema.tenant_head.update()
    .where(schema.tenant_head.c.tenant == bindparam("key"))
    .values(seq=bindparam("last_seq"), hash=bindparam("last_hash"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The last row of a tenant's chain; `seq` 0 = no row yet."""

    tenant: str
    seq: int
    hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A row that has no number yet."""

    values: Row
    """The facts, in the order of `encoding.FACTS`, and their frozen bytes."""
    facts: bytes
    payload_hash: bytes
    producer: str
    producer_seq: int
    attempt: int
    lease: str
    completeness: str
    quarantined: str | None


def lock_head(connection: Connection, tenant: str) -> Head:
    """The head of a tenant's chain, locked to the end of the transaction."""
    row = connection.execute(_HEAD, {"key": tenant}).one_or_none()
    if row is None:
        insert_or_skip(connection, schema.tenant_head, tenant=tenant, seq=0, hash=encoding.GENESIS)
        row = connection.execute(_HEAD, {"key": tenant}).one()
    return Head(tenant=tenant, seq=row.seq, hash=bytes(row.hash))


def chained(head: Head, rows: Sequence[NewRow], now_us: int) -> tuple[list[Row], Head]:
    """The rows numbered behind the head and linked, and the new head. Pure."""
    seq, digest = head.seq, head.hash
    finished = []
    for row in rows:
        seq += 1
        posting = (
            seq, row.producer, row.producer_seq, row.attempt, row.lease, row.completeness,
            row.quarantined, now_us, row.payload_hash,
        )  # fmt: skip
        prev_hash = digest
        digest = encoding.row_hash(prev_hash, row.facts, encoding.encode(posting))
        finished.append((*row.values, *posting, prev_hash, digest))
    return finished, Head(tenant=head.tenant, seq=seq, hash=digest)


def append_rows(connection: Connection, head: Head, rows: Sequence[NewRow], now_us: int) -> Head:
    """Insert the rows behind a locked head, and move it."""
    finished, last = chained(head, rows, now_us)
    if not is_postgresql(connection):
        connection.exec_driver_sql(_SQLITE_INSERT, finished)
    else:
        copy_rows(connection, _POSTGRESQL_COPY, finished)
    connection.execute(
        _MOVE_HEAD, {"key": last.tenant, "last_seq": last.seq, "last_hash": last.hash}
    )
    return last
