"""Finds bodies that no row names: what was stored for a row that was never written, or left behind by one."""

from typing import Final

from sqlalchemy import Connection, select

from gristmill_contracts import limits
from gristmill_contracts.units import now_us
from gristmill_ledger import schema
from gristmill_ledger.artifact_port import ArtifactStore

TABLES: Final = (schema.inbox_entry, schema.archive)


def tenants_with_bodies(connection: Connection) -> list[str]:
    """Tenants of which some session ever had an inbox or an archive."""
    found = {
        *connection.execute(select(schema.inbox.c.tenant).distinct()).scalars(),
        *connection.execute(select(schema.archive.c.tenant).distinct()).scalars(),
    }
    return sorted(tenant for tenant in found if tenant)


def old_bodies(store: ArtifactStore, tenant: str, after: str) -> tuple[list[str], str | None]:
    """A page of bodies that are older than any upload lasts, and where the next page begins. Blocks."""
    page = store.list(
        tenant, prefix="", after=after, limit=limits.OBJECTS_PAGE_MAX, delimiter=False
    )
    oldest_us = now_us() - int(limits.ORPHAN_AGE_S * 1e6)
    old = [each.path for each in page.artifacts if each.modified_us < oldest_us]
    return old, page.next_after


def unnamed(connection: Connection, blobs: list[str]) -> list[str]:
    """Those that no row names."""
    named: set[str | None] = set()
    for table in TABLES:
        found = select(table.c.blob).where(table.c.blob.in_(blobs))
        named.update(connection.execute(found).scalars())
    return [blob for blob in blobs if blob not in named]
