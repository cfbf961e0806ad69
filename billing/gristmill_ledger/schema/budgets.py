"""Budgets, the leases that hold parts of them, and what became of each hold.

Facts: `budget`, `budget_limit`, `budget_crossing`, `budget_lease`, `reservation`, `reservation_suspense`,
`reservation_resolution`. The rest is state that a sum over the facts and the usage explains. Amounts are
tokens, or pico-units of the budget's currency.
"""

from sqlalchemy import Column, LargeBinary, Table, Text

from gristmill_ledger.schema.base import INT64, metadata

budget = Table(
    "budget",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("scope_type", Text, nullable=False),
    Column("scope", Text, nullable=False),
    Column("unit", Text, nullable=False),
    Column("recurrence", Text, nullable=False),
    Column("time_zone", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("created_us", INT64, nullable=False),
    Column("created_by", Text, nullable=False),
)
"""What never changes of a budget. `id` is <tenant>/<name>."""

budget_limit = Table(
    "budget_limit",
    metadata,
    Column("budget", Text, primary_key=True),
    Column("n", INT64, primary_key=True, autoincrement=False),
    Column("amount", INT64),
    Column("mode", Text, nullable=False),
    Column("thresholds", Text, nullable=False),
    Column("set_us", INT64, nullable=False),
    Column("set_by", Text, nullable=False),
)
"""What may change of a budget; the newest row holds. `amount` NULL: the budget has ended."""

budget_terms = Table(
    "budget_terms",
    metadata,
    Column("budget", Text, primary_key=True),
    Column("n", INT64, nullable=False),
    Column("amount", INT64),
    Column("mode", Text, nullable=False),
    Column("thresholds", Text, nullable=False),
)
"""The newest `budget_limit` row of each budget; locked by whoever changes it or opens a period. State."""

budget_period = Table(
    "budget_period",
    metadata,
    Column("budget", Text, primary_key=True),
    Column("start_us", INT64, primary_key=True, autoincrement=False),
    Column("end_us", INT64, nullable=False),
    Column("limit_amount", INT64, nullable=False),
    Column("posted", INT64, nullable=False),
    Column("late_posted", INT64, nullable=False),
    Column("reserved", INT64, nullable=False),
    Column("suspense", INT64, nullable=False),
)
"""A period of a budget, made when it is first used. `limit_amount` repeats the terms, so that one
statement on one row both checks and takes. State."""

budget_version = Table(
    "budget_version",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("version", INT64, nullable=False),
)
"""How often a tenant's budgets changed: tells meters to ask again. State."""

budget_crossing = Table(
    "budget_crossing",
    metadata,
    Column("budget", Text, primary_key=True),
    Column("start_us", INT64, primary_key=True, autoincrement=False),
    Column("percent", INT64, primary_key=True, autoincrement=False),
    Column("limit_amount", INT64, primary_key=True, autoincrement=False),
    Column("used", INT64, nullable=False),
    Column("at_us", INT64, nullable=False),
)
"""A threshold of a period that was passed: told once for each limit."""

budget_lease = Table(
    "budget_lease",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("session", Text, nullable=False),
    Column("attempt", INT64, nullable=False),
    Column("seq", INT64, nullable=False),
    Column("key", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("prices", LargeBinary, nullable=False),
    Column("taken_us", INT64, nullable=False),
    Column("usable_until_us", INT64, nullable=False),
)
"""What was granted to one attempt of a session. `prices`: msgpack, token type -> micros."""

reservation = Table(
    "reservation",
    metadata,
    Column("lease", Text, primary_key=True),
    Column("budget", Text, primary_key=True),
    Column("start_us", INT64, nullable=False),
    Column("amount", INT64, nullable=False),
    Column("floor", INT64, nullable=False),
)
"""What a lease held of one period of one budget at first. `start_us`: of the period."""

reservation_suspense = Table(
    "reservation_suspense",
    metadata,
    Column("lease", Text, primary_key=True),
    Column("budget", Text, primary_key=True),
    Column("amount", INT64, nullable=False),
    Column("reason", Text, nullable=False),
    Column("at_us", INT64, nullable=False),
)
"""A hold whose time ran out with `amount` of it unaccounted for: it counts until it is resolved."""

reservation_resolution = Table(
    "reservation_resolution",
    metadata,
    Column("lease", Text, primary_key=True),
    Column("budget", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("posted", INT64, nullable=False),
    Column("voided", INT64, nullable=False),
    Column("reason", Text, nullable=False),
    Column("decided_by", Text, nullable=False),
    Column("at_us", INT64, nullable=False),
)
"""How a hold ended, once: what of it was posted, and what was freed."""

reservation_balance = Table(
    "reservation_balance",
    metadata,
    Column("lease", Text, primary_key=True),
    Column("budget", Text, primary_key=True),
    Column("start_us", INT64, nullable=False),
    Column("session", Text, nullable=False),
    Column("attempt", INT64, nullable=False),
    Column("posted", INT64, nullable=False),
    Column("rest", INT64, nullable=False),
    Column("expires_us", INT64, nullable=False),
    Column("suspended", INT64, nullable=False),
    Column("unknown_usage", INT64, nullable=False),
)
"""A hold without a resolution: what was posted under it and what is left. 1 or 0: `suspended`, and
`unknown_usage` (an event whose cost nobody knows was posted under it). State; locked before periods."""

reservation_open = Table(
    "reservation_open",
    metadata,
    Column("lease", Text, primary_key=True),
    Column("budget", Text, primary_key=True),
)
"""The reservations without a resolution. State, kept by triggers on these two alone: so that what the
balances say can be compared with it."""
