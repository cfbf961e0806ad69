"""Rating as facts, and rollups of usage by hour and month. What is stored already is rated by the follower."""

from typing import Final

from alembic import op

from gristmill_ledger.migrations import steps

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TABLES: Final = """
CREATE TABLE rate (
    id {int} NOT NULL PRIMARY KEY,
    digest {blob} NOT NULL UNIQUE CHECK (length(digest) = 32),
    book TEXT NOT NULL,
    currency TEXT NOT NULL,
    created_us {int} NOT NULL
){strict};

CREATE TABLE rate_price (
    rate {int} NOT NULL REFERENCES rate (id),
    token_type TEXT NOT NULL
        CHECK (token_type IN ('prefill', 'cached_prefill', 'sample', 'train')),
    model TEXT NOT NULL,
    effective_from_us {int} NOT NULL,
    micros_per_mtok {int} NOT NULL CHECK (micros_per_mtok >= 0),
    PRIMARY KEY (rate, token_type)
){strict};

CREATE TABLE rating_run (
    id {int} NOT NULL PRIMARY KEY CHECK (id >= 1),
    tenant TEXT NOT NULL,
    book TEXT NOT NULL,
    since_us {int} NOT NULL,
    until_us {int} NOT NULL,
    reason TEXT NOT NULL,
    written_by TEXT NOT NULL,
    started_us {int} NOT NULL
){strict};

CREATE TABLE rated_usage (
    tenant TEXT NOT NULL,
    seq {int} NOT NULL,
    run {int} NOT NULL CHECK (run >= 0),
    rate {int} NOT NULL REFERENCES rate (id),
    amount_pico {amount},
    rated_us {int} NOT NULL,
    PRIMARY KEY (tenant, seq, run)
){narrow};

CREATE TABLE rating_cursor (
    tenant TEXT NOT NULL PRIMARY KEY,
    seq {int} NOT NULL CHECK (seq >= 0)
){strict};

INSERT INTO counter (name, value) VALUES ('rate', 0);

INSERT INTO counter (name, value) VALUES ('rating_run', 0)
"""

ROLLUP: Final = """
CREATE TABLE {name} (
    tenant TEXT NOT NULL,
    bucket_us {int} NOT NULL,
    session TEXT NOT NULL,
    project TEXT NOT NULL,
    key TEXT NOT NULL,
    model TEXT NOT NULL,
    operation TEXT NOT NULL,
    kind TEXT NOT NULL,
    odd {int} NOT NULL CHECK (odd IN (0, 1)),
    rate {int} NOT NULL,
    part {int} NOT NULL,
    events {int} NOT NULL CHECK (events >= 0),
    unknown {int} NOT NULL CHECK (unknown >= 0),
    prefill {int} NOT NULL,
    cached_prefill {int} NOT NULL,
    sample {int} NOT NULL,
    train {int} NOT NULL,
    prefill_with {int} NOT NULL CHECK (prefill_with >= 0),
    cached_prefill_with {int} NOT NULL CHECK (cached_prefill_with >= 0),
    sample_with {int} NOT NULL CHECK (sample_with >= 0),
    train_with {int} NOT NULL CHECK (train_with >= 0),
    through_seq {int} NOT NULL,
    PRIMARY KEY (
        tenant, bucket_us, session, project, key, model, operation, kind, odd, rate, part
    )
){strict}
"""

INDICES: Final = (
    "CREATE INDEX usage_rollup_hourly_by_session ON usage_rollup_hourly (session, bucket_us)",
    "CREATE INDEX usage_rollup_hourly_by_bucket ON usage_rollup_hourly (bucket_us)",
)

FACTS: Final = ("rate", "rate_price", "rating_run", "rated_usage")


def upgrade() -> None:
    types = dict(steps.types())
    if steps.on_postgresql():
        types |= {"amount": "NUMERIC(60, 0)", "narrow": ""}
    else:
        types |= {"amount": "TEXT", "narrow": " STRICT, WITHOUT ROWID"}
    for statement in TABLES.format(**types).split(";"):
        op.execute(statement)
    for name in ("usage_rollup_hourly", "usage_rollup_monthly"):
        op.execute(ROLLUP.format(name=name, **types))
    for statement in INDICES:
        op.execute(statement)
    steps.make_append_only(FACTS)
