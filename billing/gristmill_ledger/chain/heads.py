"""Heads of the tenants' chains, signed each hour and whenever somebody asks."""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, func, select

from gristmill_contracts.chain.notes import SignedHead, SigningKey
from gristmill_ledger import schema
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.schema.chain import chain_checkpoint

HOUR_US: Final = 3_600_000_000

_LAST_SIGNED: Final = (
    select(chain_checkpoint.c.tenant, func.max(chain_checkpoint.c.seq).label("seq"))
    .group_by(chain_checkpoint.c.tenant)
    .subquery()
)
_UNSIGNED: Final = (
    select(schema.tenant_head)
    .outerjoin(_LAST_SIGNED, _LAST_SIGNED.c.tenant == schema.tenant_head.c.tenant)
    .where(schema.tenant_head.c.seq > func.coalesce(_LAST_SIGNED.c.seq, 0))
    .order_by(schema.tenant_head.c.tenant)
)
_NOTES: Final = (
    select(chain_checkpoint.c.tenant, chain_checkpoint.c.seq, chain_checkpoint.c.note)
    .where(
        chain_checkpoint.c.tenant == bindparam("key"), chain_checkpoint.c.seq > bindparam("after")
    )
    .order_by(chain_checkpoint.c.seq)
    .limit(bindparam("most"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A signed head as it is recorded."""

    tenant: str
    seq: int
    text: str


def hour_slot(at_us: int) -> str:
    """The slot of the hour that a moment lies in."""
    return f"hour {at_us // HOUR_US}"


def sign_heads(
    connection: Connection, key: SigningKey, *, at_us: int, slot: str, tenant: str | None = None
) -> list[Note]:
    """Sign the heads that moved since they were signed last, of one tenant or of all.

    A slot is signed once for each tenant: a replica that finds it taken signs nothing.
    """
    query = _UNSIGNED if tenant is None else _UNSIGNED.where(schema.tenant_head.c.tenant == tenant)
    signed = []
    for row in connection.execute(query).all():
        head = SignedHead(tenant=row.tenant, seq=row.seq, hash=bytes(row.hash), at_us=at_us)
        note = key.sign(head)
        if insert_or_skip(
            connection,
            chain_checkpoint,
            tenant=head.tenant,
            seq=head.seq,
            hash=head.hash,
            slot=slot,
            note=note,
            at_us=at_us,
        ):
            signed.append(Note(tenant=head.tenant, seq=head.seq, text=note))
    return signed


def notes_after(connection: Connection, tenant: str, after: int, most: int) -> list[Note]:
    """Signed heads of a tenant that name more than `after` rows, in order."""
    rows = connection.execute(_NOTES, {"key": tenant, "after": after, "most": most})
    return [Note(tenant=row.tenant, seq=row.seq, text=row.note) for row in rows]


def newest_notes(connection: Connection, tenant: str | None = None) -> list[Note]:
    """The newest signed head of each tenant, or of one."""
    newest = (chain_checkpoint.c.tenant == _LAST_SIGNED.c.tenant) & (
        chain_checkpoint.c.seq == _LAST_SIGNED.c.seq
    )
    query = select(chain_checkpoint).join(_LAST_SIGNED, newest).order_by(chain_checkpoint.c.tenant)
    if tenant is not None:
        query = query.where(chain_checkpoint.c.tenant == tenant)
    return [
        Note(tenant=row.tenant, seq=row.seq, text=row.note) for row in connection.execute(query)
    ]
