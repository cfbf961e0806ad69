"""Where operations and results lie while no meter serves their session: inbox and archive."""

from typing import Final

from gristmill_ledger.migrations import steps

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TABLES: Final = """
CREATE TABLE inbox (
    session TEXT NOT NULL PRIMARY KEY,
    tenant TEXT NOT NULL,
    last_position {int} NOT NULL,
    log_number {int} NOT NULL,
    waiting {int} NOT NULL CHECK (waiting >= 0),
    waiting_bytes {int} NOT NULL CHECK (waiting_bytes >= 0),
    served_by {int},
    served_us {int},
    claimed_by {int},
    closed_us {int}
){strict};

CREATE TABLE inbox_entry (
    session TEXT NOT NULL,
    position {int} NOT NULL,
    stream TEXT NOT NULL CHECK (stream IN ('train', 'log')),
    number {int} NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('submit', 'refuse')),
    client_token TEXT,
    body_hash {blob} NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'taken', 'skipped')),
    reason TEXT NOT NULL,
    body {blob},
    blob TEXT,
    size {int} NOT NULL CHECK (size >= 0),
    accepted_us {int} NOT NULL,
    ended_us {int},
    PRIMARY KEY (session, position)
){strict};

CREATE TABLE archive (
    session TEXT NOT NULL,
    stream TEXT NOT NULL CHECK (stream IN ('train', 'log')),
    number {int} NOT NULL,
    tenant TEXT NOT NULL,
    view {blob} NOT NULL,
    body {blob},
    blob TEXT,
    size {int} NOT NULL CHECK (size >= 0),
    expires_us {int} NOT NULL,
    PRIMARY KEY (session, stream, number)
){strict};

CREATE INDEX inbox_entry_by_number ON inbox_entry (session, stream, number, position);

CREATE INDEX inbox_entry_by_token ON inbox_entry (session, client_token, position)
WHERE client_token IS NOT NULL;

CREATE INDEX inbox_entry_by_end ON inbox_entry (ended_us) WHERE ended_us IS NOT NULL;

CREATE INDEX archive_by_expiry ON archive (expires_us)
"""


def upgrade() -> None:
    steps.run(TABLES)
