"""Signed heads of the tenants' chains."""

from typing import Final

from gristmill_ledger.migrations import steps

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

TABLE: Final = """
CREATE TABLE chain_checkpoint (
    tenant TEXT NOT NULL,
    seq {int} NOT NULL CHECK (seq >= 1),
    hash {blob} NOT NULL CHECK (length(hash) = 32),
    slot TEXT NOT NULL,
    note TEXT NOT NULL,
    at_us {int} NOT NULL,
    PRIMARY KEY (tenant, seq),
    UNIQUE (tenant, slot)
){strict}
"""


def upgrade() -> None:
    steps.run(TABLE)
    steps.make_append_only(["chain_checkpoint"])
