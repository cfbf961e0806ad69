"""Which attempt of a session may release results, and until when."""

from typing import Final

from gristmill_ledger.migrations import steps

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
    steps.run(TABLE)
