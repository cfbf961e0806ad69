"""Parts of an export, as `gristmill_contracts.chain.export` describes it: the head of one, and its pages."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from gristmill_contracts import limits
from gristmill_contracts.chain import export
from gristmill_contracts.chain.notes import VerifierKey
from gristmill_contracts.errors import InvalidRequestError
from gristmill_ledger.chain.heads import notes_after
from gristmill_ledger.chain.pages import chain_head, chain_heads, row_hash_at, rows_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Items of one tenant, and where the next page goes on; None = this was the last one."""

    body: bytes
    next_after: int | None
    rows: int


def export_start(connection: Connection, keys: Sequence[VerifierKey], now_us: int) -> bytes:
    """The first two items: what this is, and which tenants there are."""
    tenants = [head.tenant for head in chain_heads(connection)]
    return export.header(keys, now_us) + export.item("tenants", tenants)


def export_page(connection: Connection, tenant: str, after: int) -> Page:
    """The next rows of a tenant behind number `after`, with the signed heads that name one of them.

    Raises InvalidRequestError for an `after` beyond the last row.
    """
    digest = row_hash_at(connection, tenant, after)
    if digest is None:
        raise InvalidRequestError(f"tenant {tenant!r} has no row {after}; begin at 0, or at a head")
    head = chain_head(connection, tenant)
    # Beyond the head too: rows that the ledger does not own up to are for the auditor to see.
    rows = rows_after(connection, tenant, after, limits.QUANTITY_MAX, limits.CHAIN_PAGE_ROWS)
    ended = len(rows) < limits.CHAIN_PAGE_ROWS
    end = after + len(rows)
    # The head of the row that the page begins behind too: who begins there needs it.
    notes = notes_after(connection, tenant, max(0, after - 1), limits.CHAIN_PAGE_ROWS + 1)
    body = [export.item("tenant", tenant, after, digest)]
    body += [export.item("head", note.text) for note in notes if ended or note.seq <= end]
    body.append(export.item("rows", rows))
    if ended:
        body.append(export.item("tenant_end", head.seq, head.hash))
    return Page(body=b"".join(body), next_after=None if ended else end, rows=len(rows))
