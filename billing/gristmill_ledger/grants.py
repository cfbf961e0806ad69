"""Append-only by rights: on PostgreSQL the ledger serves as a role that may not change a fact.

The tables' owner migrates and grants; the role that serves owns nothing. It can neither update nor delete
a fact, nor switch off the triggers that refuse it too.
"""

from collections.abc import Iterator
from typing import Final

from sqlalchemy import Engine, text

from gristmill_ledger import schema

LOCKED_FACTS: Final = {"price_book": "written_by", "checkpoint_group": "description"}
"""Facts whose rows are locked, and a column of each: PostgreSQL locks a row only for those who may update
one of its columns. Their triggers refuse the update itself."""


def grant_statements(role: str) -> Iterator[str]:
    """What makes `role`, a quoted name, one that serves and changes no fact."""
    yield f"GRANT USAGE ON SCHEMA public TO {role}"
    yield f"GRANT SELECT ON alembic_version TO {role}"
    for table in sorted(schema.metadata.tables):
        yield f"REVOKE ALL ON {table} FROM {role}"
        if table in schema.FACT_TABLES:
            yield f"GRANT SELECT, INSERT ON {table} TO {role}"
        else:
            yield f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {role}"
    for table, column in LOCKED_FACTS.items():
        yield f"GRANT UPDATE ({column}) ON {table} TO {role}"


def grant(engine: Engine, role: str) -> None:
    """Grant a role what serving needs. Raises ValueError on SQLite, which has no roles."""
    if engine.dialect.name != "postgresql":
        raise ValueError(
            "only PostgreSQL has roles to grant to; SQLite's facts are kept by triggers"
        )
    quoted = engine.dialect.identifier_preparer.quote_identifier(role)
    with engine.begin() as connection:
        for statement in grant_statements(quoted):
            connection.execute(text(statement))
