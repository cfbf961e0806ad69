"""Chains for tests: rows as an auditor sees them, exports, and ways to falsify a database."""

import io
from collections.abc import Sequence
from functools import partial
from typing import Any

from sqlalchemy import text

from gristmill_contracts.chain import encoding, export
from gristmill_contracts.chain.export import Auditor, Report
from gristmill_contracts.chain.notes import SigningKey, VerifierKey, new_key_pem, read_key_pem
from gristmill_contracts.usage import UsageEvent
from gristmill_ledger.chain.exporting import export_page, export_start
from gristmill_ledger.chain.heads import sign_heads
from gristmill_ledger.chain.pages import chain_heads, rows_after
from gristmill_ledger.chain.rows import Head, NewRow, chained
from gristmill_ledger.database import Database
from gristmill_ledger.decisions import encode_event
from gristmill_testing.ledger import make_event
from gristmill_testing.ledger_store import NOW_US, post, register

Row = list[Any]  # Any: column values


def signing_key(name: str = "gristmill") -> SigningKey:
    return read_key_pem(new_key_pem(), name)


def fill_chain(database: Database, tenant: str = "acme", rows: int = 9) -> None:
    """A tenant with that many rows, one of them of unknown usage."""
    session = f"s-{tenant}"
    register(database, session, tenant=tenant, session=session)
    post(database, events_of(tenant, session, rows), session)


def events_of(tenant: str, session: str, count: int) -> list[UsageEvent]:
    """The third is of unknown usage."""
    counts = make_event(1).counts
    return [
        make_event(n, session=session, tenant=tenant, key="GMK", counts=None if n == 3 else counts)
        for n in range(1, count + 1)
    ]


def made_rows(tenant: str = "acme", count: int = 9) -> list[Row]:
    """The rows that `fill_chain` makes, without a database."""
    encoded = map(encode_event, events_of(tenant, f"s-{tenant}", count))
    new = [
        NewRow(
            values=each.values,
            facts=each.facts,
            payload_hash=each.digest,
            producer=f"s-{tenant}",
            producer_seq=each.event.producer_seq,
            attempt=1,
            lease="",
            completeness="unknown" if each.event.counts is None else "final",
            quarantined=None,
        )
        for each in encoded
    ]
    rows, _ = chained(Head(tenant=tenant, seq=0, hash=encoding.GENESIS), new, NOW_US)
    return [list(row) for row in rows]


def sign(database: Database, key: SigningKey, *, at_us: int = NOW_US) -> None:
    database.write_now(lambda c: sign_heads(c, key, at_us=at_us, slot=f"at {at_us}"))


def rows_of(database: Database, tenant: str = "acme") -> list[Row]:
    found = database.read_now(lambda c: rows_after(c, tenant, 0, 2**62, 10**6))
    return [list(row) for row in found]


def rehash(rows: Sequence[Row]) -> list[Row]:
    """The rows numbered and chained anew, as a forger with the database would."""
    chained = []
    prev_hash = encoding.GENESIS
    for seq, row in enumerate(rows, start=1):
        named = dict(zip(encoding.COLUMNS, row, strict=True)) | {"seq": seq}
        facts = encoding.encode([named[name] for name in encoding.FACTS])
        named["payload_hash"] = encoding.payload_hash(facts)
        posting = encoding.encode([named[name] for name in encoding.POSTING])
        named["prev_hash"] = prev_hash
        named["hash"] = prev_hash = encoding.row_hash(prev_hash, facts, posting)
        chained.append(list(named.values()))
    return chained


def falsify(database: Database, *statements: str) -> None:
    """Change facts as somebody with all rights over the database can: without its triggers."""
    postgresql = database.engine.dialect.name == "postgresql"
    with database.engine.begin() as connection:
        if postgresql:
            connection.execute(text("ALTER TABLE usage_event DISABLE TRIGGER ALL"))
        else:
            connection.execute(text("DROP TRIGGER IF EXISTS usage_event_no_UPDATE"))
            connection.execute(text("DROP TRIGGER IF EXISTS usage_event_no_DELETE"))
        for statement in statements:
            connection.execute(text(statement))


def export_file(
    database: Database,
    keys: Sequence[VerifierKey] = (),
    *,
    after: int = 0,
) -> bytes:
    """A whole export of a database, put together from its pages."""
    names = [head.tenant for head in database.read_now(chain_heads)]
    parts = [database.read_now(partial(export_start, keys=keys, now_us=NOW_US))]
    rows = 0
    for name in names:
        at: int | None = after
        while at is not None:
            page = database.read_now(partial(export_page, tenant=name, after=at))
            parts.append(page.body)
            rows += page.rows
            at = page.next_after
    parts.append(export.item("end", len(names), rows))
    return b"".join(parts)


def audit(content: bytes, *keys: VerifierKey, **options: Any) -> Report:
    auditor = Auditor(keys=keys, **options)
    auditor.feed(export.read_items(io.BytesIO(content)))
    return auditor.finish()
