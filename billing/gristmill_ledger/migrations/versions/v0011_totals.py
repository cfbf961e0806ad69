"""Sums of usage without its operation, by day and month, made of the finer ones."""

from typing import Final

from alembic import op

from gristmill_ledger.migrations import steps

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

TABLE: Final = """
CREATE TABLE {name} (
    tenant TEXT NOT NULL,
    bucket_us {int} NOT NULL,
    session TEXT NOT NULL CHECK (session = ''),
    project TEXT NOT NULL CHECK (project = ''),
    key TEXT NOT NULL CHECK (key = ''),
    model TEXT NOT NULL,
    operation TEXT NOT NULL CHECK (operation = ''),
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

MEASURES: Final = (
    "events", "unknown", "prefill", "cached_prefill", "sample", "train", "prefill_with",
    "cached_prefill_with", "sample_with", "train_with",
)  # fmt: skip

FILL: Final = """
INSERT INTO {name} (
    tenant, bucket_us, session, project, key, model, operation, kind, odd, rate, part,
    {measures}, through_seq
)
SELECT
    tenant, {bucket} AS start_us, '', '', '', model, '', kind, odd, rate, part,
    {sums}, max(through_seq)
FROM {source}
GROUP BY tenant, start_us, model, kind, odd, rate, part
"""

DAY_US: Final = 86_400 * 10**6
EARLIEST_US: Final = -(2**63 - 1)
FIRST_DAY_US: Final = EARLIEST_US // DAY_US * DAY_US + DAY_US
"""Hours before it are of a day that begins before what 64 bits hold: it is cut off at EARLIEST_US."""
DAY: Final = (
    f"CASE WHEN bucket_us < {FIRST_DAY_US} THEN {EARLIEST_US} "
    f"ELSE bucket_us - ((bucket_us % {DAY_US}) + {DAY_US}) % {DAY_US} END"
)

SOURCES: Final = (
    ("usage_total_daily", "usage_rollup_hourly", DAY),
    ("usage_total_monthly", "usage_rollup_monthly", "bucket_us"),
)


def upgrade() -> None:
    types = dict(steps.types())
    for name, source, bucket in SOURCES:
        op.execute(TABLE.format(name=name, **types))
        op.execute(
            FILL.format(
                name=name,
                source=source,
                bucket=bucket,
                measures=", ".join(MEASURES),
                sums=", ".join(f"sum({each})" for each in MEASURES),
            )
        )
        op.execute(f"CREATE INDEX {name}_by_bucket ON {name} (bucket_us)")
