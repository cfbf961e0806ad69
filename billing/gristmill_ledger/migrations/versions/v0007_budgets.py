"""Budgets: limits, periods, leases and holds, suspense, and how each hold ended."""

from typing import Final

from gristmill_ledger.migrations import steps

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TABLES: Final = """
CREATE TABLE budget (
    id TEXT NOT NULL PRIMARY KEY,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    scope_type TEXT NOT NULL CHECK (scope_type IN ('tenant', 'project', 'session', 'key')),
    scope TEXT NOT NULL,
    unit TEXT NOT NULL,
    recurrence TEXT NOT NULL CHECK (recurrence IN ('once', 'day', 'week', 'month')),
    time_zone TEXT NOT NULL,
    source TEXT NOT NULL CHECK (source IN ('manual', 'resource')),
    created_us {int} NOT NULL,
    created_by TEXT NOT NULL,
    UNIQUE (tenant, name)
){strict};

CREATE TABLE budget_limit (
    budget TEXT NOT NULL,
    n {int} NOT NULL CHECK (n >= 1),
    amount {int} CHECK (amount >= 0),
    mode TEXT NOT NULL CHECK (mode IN ('hard', 'soft')),
    thresholds TEXT NOT NULL,
    set_us {int} NOT NULL,
    set_by TEXT NOT NULL,
    PRIMARY KEY (budget, n)
){strict};

CREATE TABLE budget_terms (
    budget TEXT NOT NULL PRIMARY KEY,
    n {int} NOT NULL,
    amount {int} CHECK (amount >= 0),
    mode TEXT NOT NULL,
    thresholds TEXT NOT NULL
){strict};

CREATE TABLE budget_period (
    budget TEXT NOT NULL,
    start_us {int} NOT NULL,
    end_us {int} NOT NULL CHECK (end_us > start_us),
    limit_amount {int} NOT NULL CHECK (limit_amount >= 0),
    posted {int} NOT NULL CHECK (posted >= 0),
    late_posted {int} NOT NULL,
    reserved {int} NOT NULL CHECK (reserved >= 0),
    suspense {int} NOT NULL CHECK (suspense >= 0),
    PRIMARY KEY (budget, start_us)
){strict};

CREATE TABLE budget_version (
    tenant TEXT NOT NULL PRIMARY KEY,
    version {int} NOT NULL
){strict};

CREATE TABLE budget_crossing (
    budget TEXT NOT NULL,
    start_us {int} NOT NULL,
    percent {int} NOT NULL,
    limit_amount {int} NOT NULL,
    used {int} NOT NULL,
    at_us {int} NOT NULL,
    PRIMARY KEY (budget, start_us, percent, limit_amount)
){strict};

CREATE TABLE budget_lease (
    id TEXT NOT NULL PRIMARY KEY,
    tenant TEXT NOT NULL,
    session TEXT NOT NULL,
    attempt {int} NOT NULL,
    seq {int} NOT NULL,
    key TEXT NOT NULL,
    model TEXT NOT NULL,
    prices {blob} NOT NULL,
    taken_us {int} NOT NULL,
    usable_until_us {int} NOT NULL,
    UNIQUE (session, attempt, seq)
){strict};

CREATE TABLE reservation (
    lease TEXT NOT NULL,
    budget TEXT NOT NULL,
    start_us {int} NOT NULL,
    amount {int} NOT NULL CHECK (amount >= 0),
    floor {int} NOT NULL CHECK (floor >= 0),
    PRIMARY KEY (lease, budget)
){strict};

CREATE TABLE reservation_suspense (
    lease TEXT NOT NULL,
    budget TEXT NOT NULL,
    amount {int} NOT NULL CHECK (amount >= 0),
    reason TEXT NOT NULL CHECK (reason IN ('expired', 'unknown_usage')),
    at_us {int} NOT NULL,
    PRIMARY KEY (lease, budget)
){strict};

CREATE TABLE reservation_resolution (
    lease TEXT NOT NULL,
    budget TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('posted', 'voided')),
    posted {int} NOT NULL CHECK (posted >= 0),
    voided {int} NOT NULL CHECK (voided >= 0),
    reason TEXT NOT NULL,
    decided_by TEXT NOT NULL,
    at_us {int} NOT NULL,
    PRIMARY KEY (lease, budget)
){strict};

CREATE TABLE reservation_balance (
    lease TEXT NOT NULL,
    budget TEXT NOT NULL,
    start_us {int} NOT NULL,
    session TEXT NOT NULL,
    attempt {int} NOT NULL,
    posted {int} NOT NULL CHECK (posted >= 0),
    rest {int} NOT NULL CHECK (rest >= 0),
    expires_us {int} NOT NULL,
    suspended {int} NOT NULL CHECK (suspended IN (0, 1)),
    unknown_usage {int} NOT NULL CHECK (unknown_usage IN (0, 1)),
    PRIMARY KEY (lease, budget)
){strict};

CREATE INDEX budget_by_scope ON budget (tenant, scope_type, scope);

CREATE INDEX reservation_balance_by_session ON reservation_balance (session);

CREATE INDEX reservation_balance_by_expiry ON reservation_balance (expires_us) WHERE suspended = 0
"""

FACTS: Final = (
    "budget", "budget_limit", "budget_crossing", "budget_lease", "reservation", "reservation_suspense",
    "reservation_resolution",
)  # fmt: skip


def upgrade() -> None:
    steps.run(TABLES)
    steps.make_append_only(FACTS)
