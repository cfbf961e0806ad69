"""What the steps have in common: one text of SQL for both databases, and the guard of facts.

As the steps themselves it never changes once it is released: a new guard is a new function.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from alembic import op

POSTGRESQL: Final = {"int": "BIGINT", "blob": "BYTEA", "strict": ""}
SQLITE: Final = {"int": "INTEGER", "blob": "BLOB", "strict": " STRICT"}

_POSTGRESQL_TRIGGER: Final = """
CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}
FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
"""
_SQLITE_TRIGGER: Final = """
CREATE TRIGGER {table}_no_{change} BEFORE {change} ON {table}
BEGIN SELECT RAISE(ABORT, '{table} is append-only: {change} refused'); END
"""


def on_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def types() -> Mapping[str, str]:
    """The names that a template of SQL leaves open, for the database at hand."""
    return POSTGRESQL if on_postgresql() else SQLITE


def run(sql: str) -> None:
    """Statements divided by semicolons, with the names of `types` in braces."""
    for statement in sql.format(**types()).split(";"):
        op.execute(statement)


def make_append_only(tables: Iterable[str]) -> None:
    """From now on UPDATE and DELETE are refused. PostgreSQL needs `refuse_change` of the first step."""
    for table in tables:
        if on_postgresql():
            op.execute(_POSTGRESQL_TRIGGER.format(table=table))
            continue
        for change in ("UPDATE", "DELETE"):
            op.execute(_SQLITE_TRIGGER.format(table=table, change=change))
