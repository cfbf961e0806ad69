"""Reconciliation: runs, differences and decisions; and the time that devices were held for sessions."""

from typing import Final

from gristmill_ledger.migrations import steps

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

TABLES: Final = """
CREATE TABLE recon_run (
    id TEXT NOT NULL PRIMARY KEY,
    slot TEXT NOT NULL UNIQUE,
    scope TEXT NOT NULL,
    asked_by TEXT NOT NULL,
    started_us {int} NOT NULL,
    ended_us {int} NOT NULL,
    sessions {int} NOT NULL CHECK (sessions >= 0),
    in_flight {int} NOT NULL CHECK (in_flight >= 0),
    silent {int} NOT NULL CHECK (silent >= 0),
    differences {int} NOT NULL CHECK (differences >= 0)
){strict};

CREATE TABLE recon_diff (
    id TEXT NOT NULL PRIMARY KEY,
    run TEXT NOT NULL,
    pair TEXT NOT NULL CHECK (pair IN ('worker-meter', 'meter-ledger', 'ledger')),
    kind TEXT NOT NULL
        CHECK (kind IN ('missing', 'duplicate', 'mismatch', 'orphan_reservation', 'unknown')),
    tenant TEXT NOT NULL,
    session TEXT NOT NULL,
    subject TEXT NOT NULL,
    operations {int} NOT NULL,
    prefill {int} NOT NULL,
    cached_prefill {int} NOT NULL,
    sample {int} NOT NULL,
    train {int} NOT NULL,
    amount {int} NOT NULL,
    detail TEXT NOT NULL,
    found_us {int} NOT NULL
){strict};

CREATE INDEX recon_diff_by_session ON recon_diff (session, found_us);

CREATE TABLE recon_decision (
    diff TEXT NOT NULL PRIMARY KEY,
    decided_by TEXT NOT NULL,
    reason TEXT NOT NULL CHECK (reason <> ''),
    at_us {int} NOT NULL
){strict};

CREATE TABLE device_time (
    session TEXT NOT NULL,
    attempt {int} NOT NULL,
    since_us {int} NOT NULL,
    held_us {int} NOT NULL CHECK (held_us >= 0),
    tenant TEXT NOT NULL,
    devices {int} NOT NULL CHECK (devices >= 0),
    busy_us {int} NOT NULL CHECK (busy_us >= 0),
    recorded_us {int} NOT NULL,
    PRIMARY KEY (session, attempt, since_us, held_us)
){strict}
"""


def upgrade() -> None:
    steps.run(TABLES)
    steps.make_append_only(["recon_run", "recon_diff", "recon_decision", "device_time"])
