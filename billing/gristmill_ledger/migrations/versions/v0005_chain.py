"""The hash chain: rows of usage name the one before, the key, the lease and what they correct.

The table is made anew, for its checks change, and its rows are chained on the way over. Meters that post
an event again are told from others by `payload_hash`, whose encoding changes here too.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final

from alembic import op
from sqlalchemy import Connection, text

from gristmill_contracts.chain import encoding
from gristmill_ledger.migrations import steps

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TABLE: Final = """
CREATE TABLE usage_event (
    tenant TEXT NOT NULL,
    seq {int} NOT NULL CHECK (seq >= 1),
    event_id TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('usage', 'attempt', 'adjustment', 'void')),
    n {int} NOT NULL CHECK (n >= 0),
    session TEXT NOT NULL,
    stream TEXT NOT NULL,
    number {int} NOT NULL,
    operation TEXT NOT NULL,
    model TEXT NOT NULL,
    project TEXT NOT NULL,
    key TEXT NOT NULL,
    lease TEXT NOT NULL,
    producer TEXT NOT NULL,
    producer_seq {int} NOT NULL,
    attempt {int} NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('completed', 'aborted', 'failed', 'unknown')),
    completeness TEXT NOT NULL CHECK (completeness IN ('final', 'unknown')),
    op_start_us {int} NOT NULL,
    op_end_us {int} NOT NULL,
    ingested_us {int} NOT NULL,
    prefill {int} CHECK (prefill >= 0 OR corrects <> ''),
    cached_prefill {int} CHECK (cached_prefill >= 0 OR corrects <> ''),
    sample {int} CHECK (sample >= 0 OR corrects <> ''),
    train {int} CHECK (train >= 0 OR corrects <> ''),
    corrects TEXT NOT NULL CHECK ((corrects <> '') = (kind IN ('adjustment', 'void'))),
    reason TEXT NOT NULL CHECK ((reason <> '') = (corrects <> '')),
    quarantined TEXT,
    enc_v {int} NOT NULL,
    payload_hash {blob} NOT NULL CHECK (length(payload_hash) = 32),
    prev_hash {blob} NOT NULL CHECK (length(prev_hash) = 32),
    hash {blob} NOT NULL CHECK (length(hash) = 32),
    PRIMARY KEY (tenant, seq),
    UNIQUE (tenant, event_id),
    CHECK ((completeness = 'unknown') = (prefill IS NULL)),
    CHECK ((completeness = 'unknown') = (cached_prefill IS NULL)),
    CHECK ((completeness = 'unknown') = (sample IS NULL)),
    CHECK ((completeness = 'unknown') = (train IS NULL))
){strict}
"""
INDICES: Final = (
    "CREATE INDEX usage_event_by_session ON usage_event (session, tenant, seq)",
    "CREATE INDEX usage_event_by_start ON usage_event (tenant, op_start_us)",
)
OLD_COLUMNS: Final = (
    "enc_v", "event_id", "kind", "n", "tenant", "session", "stream", "number", "operation", "model",
    "project", "outcome", "prefill", "cached_prefill", "sample", "train", "op_start_us", "op_end_us",
    "seq", "producer", "producer_seq", "attempt", "completeness", "quarantined", "ingested_us",
)  # fmt: skip
ROWS_AT_ONCE: Final = 1000


def upgrade() -> None:
    connection = op.get_bind()
    genesis = encoding.GENESIS.hex()
    default = f"'\\x{genesis}'" if steps.on_postgresql() else f"X'{genesis}'"
    op.execute("ALTER TABLE usage_event RENAME TO usage_event_unchained")
    steps.run(TABLE)
    op.execute(
        f"ALTER TABLE tenant_head ADD COLUMN hash {steps.types()['blob']} NOT NULL "
        f"DEFAULT {default} CHECK (length(hash) = 32)"
    )
    _copy(connection)
    op.execute("DROP TABLE usage_event_unchained")
    for statement in INDICES:
        op.execute(statement)
    steps.make_append_only(["usage_event"])


def _copy(connection: Connection) -> None:
    """Chain the rows of each tenant, in the order of their numbers."""
    insert = text(
        f"INSERT INTO usage_event ({', '.join(encoding.COLUMNS)}) "  # noqa: S608
        f"VALUES ({', '.join(':' + name for name in encoding.COLUMNS)})"
    )
    for tenant, rows in groupby(_old_rows(connection), lambda row: row["tenant"]):
        prev_hash = encoding.GENESIS
        pending = []
        for row in rows:
            prev_hash = _chain(row, prev_hash)
            pending.append(row)
            if len(pending) == ROWS_AT_ONCE:
                connection.execute(insert, pending)
                pending = []
        if pending:
            connection.execute(insert, pending)
        connection.execute(
            text("UPDATE tenant_head SET hash = :hash WHERE tenant = :tenant"),
            {"hash": prev_hash, "tenant": tenant},
        )


def _old_rows(connection: Connection) -> Iterator[dict[str, Any]]:  # Any: column values
    query = text(
        f"SELECT {', '.join(OLD_COLUMNS)} FROM usage_event_unchained "  # noqa: S608
        "WHERE (tenant, seq) > (:tenant, :seq) ORDER BY tenant, seq LIMIT :limit"
    )
    tenant, seq = "", 0
    while True:
        page = connection.execute(
            query, {"tenant": tenant, "seq": seq, "limit": ROWS_AT_ONCE}
        ).all()
        if not page:
            return
        for row in page:
            yield dict(row._mapping)
        tenant, seq = page[-1].tenant, page[-1].seq


def _chain(row: dict[str, Any], prev_hash: bytes) -> bytes:  # Any: as above
    """Fill what the row lacked; returns its hash."""
    row |= {"key": "", "lease": "", "corrects": "", "reason": "", "prev_hash": prev_hash}
    row["enc_v"] = encoding.VERSION
    facts = encoding.encode([row[name] for name in encoding.FACTS])
    row["payload_hash"] = encoding.payload_hash(facts)
    posting = encoding.encode([row[name] for name in encoding.POSTING])
    row["hash"] = encoding.row_hash(prev_hash, facts, posting)
    digest: bytes = row["hash"]
    return digest
