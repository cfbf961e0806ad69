"""What a cluster adds: directives to meters, recorded gaps, and a price book of each session."""

from typing import Final

from gristmill_ledger.migrations import steps

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLES: Final = """
CREATE TABLE directive (
    session TEXT NOT NULL PRIMARY KEY,
    attempt {int} NOT NULL,
    desired TEXT NOT NULL CHECK (desired IN ('serve', 'stop')),
    told_us {int} NOT NULL
){strict};

CREATE TABLE usage_gap (
    id TEXT NOT NULL PRIMARY KEY CHECK (length(id) = 64),
    tenant TEXT NOT NULL,
    session TEXT NOT NULL,
    attempt {int} NOT NULL,
    acked_seq {int} NOT NULL CHECK (acked_seq >= 0),
    head_seq {int} CHECK (head_seq >= 0),
    reason TEXT NOT NULL,
    at_us {int} NOT NULL,
    recorded_us {int} NOT NULL
){strict};

CREATE TABLE session_price_book (
    session TEXT NOT NULL PRIMARY KEY,
    book TEXT NOT NULL,
    since_us {int} NOT NULL
){strict};

ALTER TABLE price_book ADD COLUMN written_by TEXT NOT NULL DEFAULT '';

CREATE INDEX usage_gap_by_session ON usage_gap (session, at_us)
"""

FACTS: Final = ("usage_gap", "session_price_book")


def upgrade() -> None:
    steps.run(TABLES)
    steps.make_append_only(FACTS)
