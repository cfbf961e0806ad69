"""Runs of the reconciliation, the differences that they found, and what was decided of each. Facts."""

from sqlalchemy import Column, Table, Text

from gristmill_ledger.schema.base import INT64, metadata

recon_run = Table(
    "recon_run",
    metadata,
    Column("id", Text, primary_key=True),
    Column("slot", Text, nullable=False, unique=True),
    Column("scope", Text, nullable=False),
    Column("asked_by", Text, nullable=False),
    Column("started_us", INT64, nullable=False),
    Column("ended_us", INT64, nullable=False),
    Column("sessions", INT64, nullable=False),
    Column("in_flight", INT64, nullable=False),
    Column("silent", INT64, nullable=False),
    Column("differences", INT64, nullable=False),
)
"""`slot`: the hour, so that one replica alone records its run; of a run that was asked for, its id."""

recon_diff = Table(
    "recon_diff",
    metadata,
    Column("id", Text, primary_key=True),
    Column("run", Text, nullable=False),
    Column("pair", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("session", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("operations", INT64, nullable=False),
    Column("prefill", INT64, nullable=False),
    Column("cached_prefill", INT64, nullable=False),
    Column("sample", INT64, nullable=False),
    Column("train", INT64, nullable=False),
    Column("amount", INT64, nullable=False),
    Column("detail", Text, nullable=False),
    Column("found_us", INT64, nullable=False),
)
"""What was found minus what was expected. The same difference found again is the same row."""

recon_decision = Table(
    "recon_decision",
    metadata,
    Column("diff", Text, primary_key=True),
    Column("decided_by", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("at_us", INT64, nullable=False),
)
"""Why a difference is no open one any more: one for each, and final."""

device_time = Table(
    "device_time",
    metadata,
    Column("session", Text, primary_key=True),
    Column("attempt", INT64, primary_key=True, autoincrement=False),
    Column("since_us", INT64, primary_key=True, autoincrement=False),
    Column("held_us", INT64, primary_key=True, autoincrement=False),
    Column("tenant", Text, nullable=False),
    Column("devices", INT64, nullable=False),
    Column("busy_us", INT64, nullable=False),
    Column("recorded_us", INT64, nullable=False),
)
"""How long a session's worker had been held since `since_us`, as it was told at some moments: of each stretch
the highest counts. Internal: nobody is billed by it."""
