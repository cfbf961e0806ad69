"""Indices behind the queries: events of a session, usage by time, lists of checkpoints, prices."""

from typing import Final

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

INDICES: Final = (
    "CREATE INDEX usage_event_by_session ON usage_event (session, tenant, seq)",
    "CREATE INDEX usage_event_by_start ON usage_event (tenant, op_start_us)",
    "CREATE INDEX checkpoint_by_creation ON checkpoint (tenant, created_us, id)",
    "CREATE INDEX price_by_start ON price (book, effective_from_us)",
)


def upgrade() -> None:
    for statement in INDICES:
        op.execute(statement)
