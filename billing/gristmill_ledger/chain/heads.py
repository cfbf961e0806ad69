"""Heads of the tenants' chains, signed each hour and whenever somebody asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, func, select

from gristmill_contracts.chain.notes import SignedHead, SigningKey
from gristmill_ledger import schema
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.schema.chain import chain_checkpoint

HOUR_US: Final = 3_600_000_000

_head, _note, _of_tenant = schema.tenant_head.c, chain_checkpoint.c, chain_checkpoint.alias().c
# Tenant by tenant, from the end of its key: there is a note for each tenant and hour, for ever.
_LAST_SIGNED: Final = (
    select(func.max(_of_tenant.seq))
    .where(_of_tenant.tenant == _head.tenant)
    .correlate(schema.tenant_head)
    .scalar_subquery()
)
_UNSIGNED: Final = (
    select(schema.tenant_head)
    .where(_head.seq > func.coalesce(_LAST_SIGNED, 0))
    .order_by(_head.tenant)
)
_NEWEST: Final = (
    select(_note.tenant, _note.seq, _note.note)
    .join(schema.tenant_head, _head.tenant == _note.tenant)
    .where(_note.seq == _LAST_SIGNED)
    .order_by(_note.tenant)
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


def unsigned_tenants(connection: Connection) -> list[str]:
    """Those whose head moved since it was signed last."""
    return [row.tenant for row in connection.execute(_UNSIGNED)]


def sign_heads(
    connection: Connection,
    key: SigningKey,
    *,
    at_us: int,
    slot: str,
    tenants: Sequence[str] | None = None,
) -> list[Note]:
    """Sign the heads that moved since they were signed last, of these tenants or of all.

    A slot is signed once for each tenant: a replica that finds it taken signs nothing.
    """
    query = _UNSIGNED if tenants is None else _UNSIGNED.where(_head.tenant.in_(tenants))
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
    query = _NEWEST if tenant is None else _NEWEST.where(_head.tenant == tenant)
    return [
        Note(tenant=row.tenant, seq=row.seq, text=row.note) for row in connection.execute(query)
    ]
