"""Statements straight to the database's driver, where composing and sending each alone would be most of the work."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Executable, Table
from sqlalchemy.exc import DBAPIError

from gristmill_ledger.lists import array_text

COPY_ROWS_MIN: Final = 4
"""Below it a COPY takes longer than the inserts."""

Values = Sequence[Any]  # Any: column values


def is_postgresql(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


def raw_rows(
    connection: Connection, statement: str, parameters: Values
) -> list[tuple[Any, ...]]:  # Any: column values
    """All rows of a query, as the driver has them. The statement is in the driver's own paramstyle."""
    if not is_postgresql(connection):
        cursor = connection.exec_driver_sql(statement, tuple(parameters)).cursor
        return [] if cursor is None else [*cursor.fetchall()]
    # Any: psycopg's connection. Binary: hashes come as they are, and integers need no parsing.
    raw: Any = connection.connection.driver_connection
    with _translated(connection, statement), raw.cursor(binary=True) as binary:
        return [*binary.execute(statement, parameters).fetchall()]


def copy_rows(connection: Connection, statement: str, rows: Iterable[Values]) -> None:
    """COPY … FROM STDIN, on PostgreSQL alone."""
    raw: Any = connection.connection.driver_connection  # Any: psycopg's connection
    with _translated(connection, statement), raw.cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)


def insert_all(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that all have the same columns: on PostgreSQL in one statement, not in one for each."""
    if not rows:
        return
    if not is_postgresql(connection) or len(rows) < COPY_ROWS_MIN:
        connection.execute(table.insert(), list(rows))
        return
    names = list(rows[0])
    statement = f"COPY {table.name} ({', '.join(names)}) FROM STDIN"
    copy_rows(connection, statement, ([row[name] for name in names] for row in rows))


def change_all(
    connection: Connection, each: Executable, all_at_once: str, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Run `each` once for every row; on PostgreSQL `all_at_once`, whose parameters are the rows' columns as
    arrays, in the order of the first row."""
    if not is_postgresql(connection) or len(rows) == 1:
        connection.execute(each, list(rows))
        return
    columns = tuple(array_text([row[name] for row in rows]) for name in rows[0])
    connection.exec_driver_sql(all_at_once, columns)


@contextmanager
def _translated(connection: Connection, statement: str) -> Iterator[None]:
    """Past SQLAlchemy: make an error the one that a statement of its own would have raised."""
    driver = connection.dialect.loaded_dbapi
    try:
        yield
    except driver.Error as error:
        raise DBAPIError.instance(
            statement, None, error, driver.Error, dialect=connection.dialect
        ) from error
