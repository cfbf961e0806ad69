"""What a cluster adds: directives to meters, recorded gaps, and a price book of each session."""

from typing import Final

from alembic import op

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

POSTGRESQL_TRIGGER: Final = """
CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}
FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
"""
SQLITE_TRIGGER: Final = """
CREATE TRIGGER {table}_no_{change} BEFORE {change} ON {table}
BEGIN SELECT RAISE(ABORT, '{table} is append-only: {change} refused'); END
"""


def upgrade() -> None:
    postgresql = op.get_bind().dialect.name == "postgresql"
    types = {"int": "BIGINT", "strict": ""}
    if not postgresql:
        types = {"int": "INTEGER", "strict": " STRICT"}
    for statement in TABLES.format(**types).split(";"):
        op.execute(statement)
    for table in FACTS:
        if postgresql:
            op.execute(POSTGRESQL_TRIGGER.format(table=table))
            continue
        for change in ("UPDATE", "DELETE"):
            op.execute(SQLITE_TRIGGER.format(table=table, change=change))
