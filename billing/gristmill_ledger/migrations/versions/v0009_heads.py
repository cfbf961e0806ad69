"""Signed heads of the tenants' chains."""

from typing import Final

from alembic import op

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
POSTGRESQL_TRIGGER: Final = """
CREATE TRIGGER chain_checkpoint_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON chain_checkpoint
FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
"""
SQLITE_TRIGGER: Final = """
CREATE TRIGGER chain_checkpoint_no_{change} BEFORE {change} ON chain_checkpoint
BEGIN SELECT RAISE(ABORT, 'chain_checkpoint is append-only: {change} refused'); END
"""


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(TABLE.format(int="BIGINT", blob="BYTEA", strict=""))
        op.execute(POSTGRESQL_TRIGGER)
        return
    op.execute(TABLE.format(int="INTEGER", blob="BLOB", strict=" STRICT"))
    for change in ("UPDATE", "DELETE"):
        op.execute(SQLITE_TRIGGER.format(change=change))
