"""Which holds have not ended, kept by the database itself: no look at them reads those that have."""

from typing import Final

from alembic import op

from gristmill_ledger.migrations import steps

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

TABLE: Final = """
CREATE TABLE reservation_open (
    lease TEXT NOT NULL,
    budget TEXT NOT NULL,
    PRIMARY KEY (lease, budget)
){strict}
"""

FILL: Final = """
INSERT INTO reservation_open (lease, budget)
SELECT taken.lease, taken.budget FROM reservation AS taken
WHERE NOT EXISTS (
    SELECT 1 FROM reservation_resolution AS ended
    WHERE ended.lease = taken.lease AND ended.budget = taken.budget
)
"""

SQLITE: Final = (
    """
CREATE TRIGGER reservation_opens AFTER INSERT ON reservation
BEGIN INSERT INTO reservation_open (lease, budget) VALUES (NEW.lease, NEW.budget); END
""",
    """
CREATE TRIGGER reservation_ends AFTER INSERT ON reservation_resolution
BEGIN DELETE FROM reservation_open WHERE lease = NEW.lease AND budget = NEW.budget; END
""",
)

# Once for a statement of many rows. The plan is kept, and must be by key however short the table was when
# it was made.
POSTGRESQL: Final = (
    """
CREATE FUNCTION open_reservations() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN INSERT INTO reservation_open (lease, budget) SELECT lease, budget FROM added; RETURN NULL; END $$
""",
    """
CREATE FUNCTION end_reservations() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS
$$ BEGIN DELETE FROM reservation_open AS held USING added
WHERE held.lease = added.lease AND held.budget = added.budget; RETURN NULL; END $$
""",
    """
CREATE TRIGGER reservation_opens AFTER INSERT ON reservation
REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION open_reservations()
""",
    """
CREATE TRIGGER reservation_ends AFTER INSERT ON reservation_resolution
REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION end_reservations()
""",
)


def upgrade() -> None:
    steps.run(TABLE)
    op.execute(FILL)
    for statement in POSTGRESQL if steps.on_postgresql() else SQLITE:
        op.execute(statement)
