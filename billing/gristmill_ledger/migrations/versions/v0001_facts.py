"""The first tables: facts with their triggers, registries, cursors and heads.

Written out rather than taken from `schema.py`, for a released step must never change.
"""

from typing import Final

from alembic import op

from gristmill_ledger.migrations import steps

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES: Final = """
CREATE TABLE tenant (
    name TEXT NOT NULL PRIMARY KEY,
    account_id TEXT NOT NULL UNIQUE CHECK (length(account_id) = 12),
    created_us {int} NOT NULL
){strict};

CREATE TABLE counter (
    name TEXT NOT NULL PRIMARY KEY,
    value {int} NOT NULL
){strict};

CREATE TABLE session (
    uid TEXT NOT NULL PRIMARY KEY,
    tenant TEXT NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    model TEXT NOT NULL,
    rank {int} NOT NULL,
    created_us {int} NOT NULL
){strict};

CREATE TABLE producer (
    producer TEXT NOT NULL PRIMARY KEY,
    tenant TEXT NOT NULL,
    session TEXT NOT NULL,
    epoch {int} NOT NULL,
    attempt {int} NOT NULL,
    head_seq {int} NOT NULL,
    acked_seq {int} NOT NULL CHECK (acked_seq >= 0),
    registered_us {int} NOT NULL
){strict};

CREATE TABLE tenant_head (
    tenant TEXT NOT NULL PRIMARY KEY,
    seq {int} NOT NULL CHECK (seq >= 0)
){strict};

CREATE TABLE usage_event (
    tenant TEXT NOT NULL,
    seq {int} NOT NULL CHECK (seq >= 1),
    event_id TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('usage', 'attempt')),
    n {int} NOT NULL CHECK (n >= 0),
    session TEXT NOT NULL,
    stream TEXT NOT NULL,
    number {int} NOT NULL,
    operation TEXT NOT NULL,
    model TEXT NOT NULL,
    project TEXT NOT NULL,
    producer TEXT NOT NULL,
    producer_seq {int} NOT NULL,
    attempt {int} NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('completed', 'aborted', 'failed', 'unknown')),
    completeness TEXT NOT NULL CHECK (completeness IN ('final', 'unknown')),
    op_start_us {int} NOT NULL,
    op_end_us {int} NOT NULL,
    ingested_us {int} NOT NULL,
    prefill {int} CHECK (prefill >= 0),
    cached_prefill {int} CHECK (cached_prefill >= 0),
    sample {int} CHECK (sample >= 0),
    train {int} CHECK (train >= 0),
    quarantined TEXT,
    enc_v {int} NOT NULL,
    payload_hash {blob} NOT NULL CHECK (length(payload_hash) = 32),
    PRIMARY KEY (tenant, seq),
    UNIQUE (tenant, event_id),
    CHECK ((completeness = 'unknown') = (prefill IS NULL)),
    CHECK ((completeness = 'unknown') = (cached_prefill IS NULL)),
    CHECK ((completeness = 'unknown') = (sample IS NULL)),
    CHECK ((completeness = 'unknown') = (train IS NULL))
){strict};

CREATE TABLE dead_letter (
    tenant TEXT NOT NULL,
    event_id TEXT NOT NULL,
    payload_hash {blob} NOT NULL,
    reason TEXT NOT NULL,
    producer TEXT NOT NULL,
    producer_seq {int} NOT NULL,
    body {blob} NOT NULL,
    received_us {int} NOT NULL,
    PRIMARY KEY (tenant, event_id, payload_hash)
){strict};

CREATE TABLE checkpoint_group (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    description TEXT NOT NULL,
    created_us {int} NOT NULL,
    PRIMARY KEY (tenant, name)
){strict};

CREATE TABLE checkpoint (
    id TEXT NOT NULL PRIMARY KEY,
    tenant TEXT NOT NULL,
    session TEXT NOT NULL,
    group_name TEXT NOT NULL,
    version {int} NOT NULL CHECK (version >= 1),
    kind TEXT NOT NULL CHECK (kind IN ('weights', 'state')),
    path TEXT NOT NULL,
    model TEXT NOT NULL,
    rank {int} NOT NULL,
    alpha {int} NOT NULL,
    size_bytes {int} NOT NULL,
    manifest_sha256 TEXT NOT NULL,
    description TEXT NOT NULL,
    created_us {int} NOT NULL,
    UNIQUE (tenant, group_name, version)
){strict};

CREATE TABLE checkpoint_tombstone (
    id TEXT NOT NULL PRIMARY KEY REFERENCES checkpoint (id),
    deleted_us {int} NOT NULL
){strict};

CREATE TABLE price_book (
    name TEXT NOT NULL PRIMARY KEY,
    currency TEXT NOT NULL CHECK (length(currency) = 3),
    created_us {int} NOT NULL
){strict};

CREATE TABLE price (
    book TEXT NOT NULL REFERENCES price_book (name),
    model TEXT NOT NULL,
    token_type TEXT NOT NULL
        CHECK (token_type IN ('prefill', 'cached_prefill', 'sample', 'train')),
    effective_from_us {int} NOT NULL CHECK (effective_from_us >= 0),
    micros_per_mtok {int} NOT NULL CHECK (micros_per_mtok >= 0),
    created_us {int} NOT NULL,
    PRIMARY KEY (book, model, token_type, effective_from_us)
){strict};

CREATE TABLE heartbeat (
    session TEXT NOT NULL PRIMARY KEY,
    cursor {int} NOT NULL UNIQUE,
    attempt {int} NOT NULL,
    at_us {int} NOT NULL,
    body {blob} NOT NULL
){strict};

INSERT INTO counter (name, value) VALUES ('account_id', 100000000000);

INSERT INTO counter (name, value) VALUES ('heartbeat', 0)
"""

FACTS: Final = (
    "tenant", "session", "usage_event", "dead_letter", "checkpoint_group", "checkpoint",
    "checkpoint_tombstone", "price_book", "price",
)  # fmt: skip

POSTGRESQL_REFUSAL: Final = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP; END $$
"""


def upgrade() -> None:
    steps.run(TABLES)
    if steps.on_postgresql():
        op.execute(POSTGRESQL_REFUSAL)
    steps.make_append_only(FACTS)
