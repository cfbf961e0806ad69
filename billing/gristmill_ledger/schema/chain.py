"""Signed heads of the tenants' chains. Facts."""

from sqlalchemy import Column, LargeBinary, Table, Text

from gristmill_ledger.schema.base import INT64, metadata

chain_checkpoint = Table(
    "chain_checkpoint",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("seq", INT64, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary, nullable=False),
    Column("slot", Text, nullable=False),
    Column("note", Text, nullable=False),
    Column("at_us", INT64, nullable=False),
)
"""`slot`: the hour that a head was signed for, or the moment where somebody asked: one head for each, by
whichever replica comes first. `note`: the signed head, as gristmill_contracts.chain.notes writes it."""
