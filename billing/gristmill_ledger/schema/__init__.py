"""The tables, as SQLAlchemy Core sees them. The migrations make them; a test compares the two.

Facts (`FACT_TABLES`) are append-only: triggers refuse UPDATE and DELETE on both databases. The rest
is state. Quantities and times are 64-bit integers; times are UTC microseconds. SQLite's are STRICT.
"""

from typing import Final

from sqlalchemy import Column, LargeBinary, Table, Text

from gristmill_contracts.chain import encoding
from gristmill_ledger.schema import budgets as budgets
from gristmill_ledger.schema import rating as rating
from gristmill_ledger.schema.base import INT64
from gristmill_ledger.schema.base import metadata as metadata
from gristmill_ledger.schema.chain import chain_checkpoint as chain_checkpoint
from gristmill_ledger.schema.inbox import archive as archive
from gristmill_ledger.schema.inbox import inbox as inbox
from gristmill_ledger.schema.inbox import inbox_entry as inbox_entry
from gristmill_ledger.schema.reconcile import device_time as device_time
from gristmill_ledger.schema.reconcile import recon_decision as recon_decision
from gristmill_ledger.schema.reconcile import recon_diff as recon_diff
from gristmill_ledger.schema.reconcile import recon_run as recon_run
from gristmill_ledger.schema.release import release_grant as release_grant

tenant = Table(
    "tenant",
    metadata,
    Column("name", Text, primary_key=True),
    Column("account_id", Text, nullable=False, unique=True),
    Column("created_us", INT64, nullable=False),
)
"""A tenant and its 12-digit account id."""

counter = Table(
    "counter",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", INT64, nullable=False),
)
"""Numbers handed out under a row lock: `account_id`, `heartbeat`. State."""

session = Table(
    "session",
    metadata,
    Column("uid", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("project", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("rank", INT64, nullable=False),
    Column("created_us", INT64, nullable=False),
)

producer = Table(
    "producer",
    metadata,
    Column("producer", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("session", Text, nullable=False),
    Column("epoch", INT64, nullable=False),
    Column("attempt", INT64, nullable=False),
    Column("head_seq", INT64, nullable=False),
    Column("acked_seq", INT64, nullable=False),
    Column("registered_us", INT64, nullable=False),
)
"""How far each session log was received. State: it moves in the transaction that stores the events."""

tenant_head = Table(
    "tenant_head",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("seq", INT64, nullable=False),
    Column("hash", LargeBinary, nullable=False, default=encoding.GENESIS),
)
"""The highest `usage_event.seq` of a tenant, and that row's `hash`; locked by whoever numbers new events. State."""

usage_event = Table(
    "usage_event",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("seq", INT64, primary_key=True, autoincrement=False),
    Column("event_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("n", INT64, nullable=False),
    Column("session", Text, nullable=False),
    Column("stream", Text, nullable=False),
    Column("number", INT64, nullable=False),
    Column("operation", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("project", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("lease", Text, nullable=False),
    Column("producer", Text, nullable=False),
    Column("producer_seq", INT64, nullable=False),
    Column("attempt", INT64, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("completeness", Text, nullable=False),
    Column("op_start_us", INT64, nullable=False),
    Column("op_end_us", INT64, nullable=False),
    Column("ingested_us", INT64, nullable=False),
    Column("prefill", INT64),
    Column("cached_prefill", INT64),
    Column("sample", INT64),
    Column("train", INT64),
    Column("corrects", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("quarantined", Text),
    Column("enc_v", INT64, nullable=False),
    Column("payload_hash", LargeBinary, nullable=False),
    Column("prev_hash", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
)
"""One row for each operation that was released, gapless by `seq` in its tenant, and chained by `hash`.

The token columns are disjoint, and NULL together where completeness is `unknown`.
`quarantined` names what is odd about the row (comma list), NULL where nothing is.
"""

dead_letter = Table(
    "dead_letter",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("event_id", Text, primary_key=True),
    Column("payload_hash", LargeBinary, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("producer", Text, nullable=False),
    Column("producer_seq", INT64, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("received_us", INT64, nullable=False),
)
"""Events whose id is taken by another payload: kept whole (msgpack) for a decision."""

checkpoint_group = Table(
    "checkpoint_group",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("description", Text, nullable=False),
    Column("created_us", INT64, nullable=False),
)

checkpoint = Table(
    "checkpoint",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("session", Text, nullable=False),
    Column("group_name", Text, nullable=False),
    Column("version", INT64, nullable=False),
    Column("kind", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("rank", INT64, nullable=False),
    Column("alpha", INT64, nullable=False),
    Column("size_bytes", INT64, nullable=False),
    Column("manifest_sha256", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("created_us", INT64, nullable=False),
)

checkpoint_tombstone = Table(
    "checkpoint_tombstone",
    metadata,
    Column("id", Text, primary_key=True),
    Column("deleted_us", INT64, nullable=False),
)

price_book = Table(
    "price_book",
    metadata,
    Column("name", Text, primary_key=True),
    Column("currency", Text, nullable=False),
    Column("created_us", INT64, nullable=False),
    Column("written_by", Text, nullable=False, server_default=""),
)
"""`written_by`: the service that made the book, "" where callers are not told apart."""

price = Table(
    "price",
    metadata,
    Column("book", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("token_type", Text, primary_key=True),
    Column("effective_from_us", INT64, primary_key=True, autoincrement=False),
    Column("micros_per_mtok", INT64, nullable=False),
    Column("created_us", INT64, nullable=False),
)
"""In force from `effective_from_us` until the next row of the same book, model and token type."""

heartbeat = Table(
    "heartbeat",
    metadata,
    Column("session", Text, primary_key=True),
    Column("cursor", INT64, nullable=False, unique=True),
    Column("attempt", INT64, nullable=False),
    Column("at_us", INT64, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
"""The newest heartbeat of each session (msgpack). State."""

directive = Table(
    "directive",
    metadata,
    Column("session", Text, primary_key=True),
    Column("attempt", INT64, nullable=False),
    Column("desired", Text, nullable=False),
    Column("told_us", INT64, nullable=False),
)
"""What the meter of one attempt is to do. State."""

usage_gap = Table(
    "usage_gap",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("session", Text, nullable=False),
    Column("attempt", INT64, nullable=False),
    Column("acked_seq", INT64, nullable=False),
    Column("head_seq", INT64),
    Column("reason", Text, nullable=False),
    Column("at_us", INT64, nullable=False),
    Column("recorded_us", INT64, nullable=False),
)
"""Usage that could not be brought in. `id`: SHA-256 of what makes two gaps the same."""

session_price_book = Table(
    "session_price_book",
    metadata,
    Column("session", Text, primary_key=True),
    Column("book", Text, nullable=False),
    Column("since_us", INT64, nullable=False),
)
"""The price book of a session; one without a row has the ledger's default."""

FACT_TABLES: Final = (
    "tenant", "session", "usage_event", "dead_letter", "checkpoint_group", "checkpoint",
    "checkpoint_tombstone", "price_book", "price", "usage_gap", "session_price_book",
    "budget", "budget_limit", "budget_crossing", "budget_lease", "reservation", "reservation_suspense",
    "reservation_resolution", "rate", "rate_price", "rating_run", "rated_usage",
    "chain_checkpoint", "recon_run", "recon_diff", "recon_decision", "device_time",
)  # fmt: skip
