"""Which attempt of a session may release results, and until when."""

from typing import Final

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLE: Final = """
CREATE TABLE release_grant (
    session TEXT NOT NULL PRIMARY KEY,
    attempt {int} NOT NULL,
    until_us {int} NOT NULL
){strict}
"""


def upgrade() -> None:
    postgresql = op.get_bind().dialect.name == "postgresql"
    types = (
        {"int": "BIGINT", "strict": ""} if postgresql else {"int": "INTEGER", "strict": " STRICT"}
    )
    op.execute(TABLE.format(**types))
