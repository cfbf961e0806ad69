"""Numbers handed out one by one under a row lock."""

from sqlalchemy import Connection, select

from gristmill_ledger import schema


def lock_counter(connection: Connection, name: str) -> int:
    """The counter's last value; nobody else moves it until the transaction ends."""
    table = schema.counter.c
    value: int = connection.execute(
        select(table.value).where(table.name == name).with_for_update()
    ).scalar_one()
    return value


def set_counter(connection: Connection, name: str, value: int) -> None:
    connection.execute(
        schema.counter.update().where(schema.counter.c.name == name).values(value=value)
    )
