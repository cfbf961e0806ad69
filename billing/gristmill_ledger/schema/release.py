"""Grants to release results. State: a grant is worth nothing once it has run out."""

from sqlalchemy import Column, Table, Text

from gristmill_ledger.schema.base import INT64, metadata

release_grant = Table(
    "release_grant",
    metadata,
    Column("session", Text, primary_key=True),
    Column("attempt", INT64, nullable=False),
    Column("until_us", INT64, nullable=False),
)
"""The attempt of each session that had a grant last, and when that ends by the ledger's clock."""
