"""Who may release results of a session: one attempt at a time, by a grant that runs out by itself.

The meter counts its grant from *sending* the heartbeat, by its own clock; we count from answering, by
ours. Ours therefore ends last: when the next attempt gets a grant, nobody else holds one.
"""

from collections.abc import Collection
from typing import Final

from sqlalchemy import Connection, or_, select, text

from gristmill_contracts import limits
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.units import now_us
from gristmill_ledger import schema
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.driver import is_postgresql

GRANT_US: Final = int(limits.RELEASE_GRANT_S * 1_000_000)
DATABASE_CLOCK: Final = text(
    "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)"
)


def clock_us(connection: Connection) -> int:
    """The one clock of all replicas: PostgreSQL's own; a SQLite file has one ledger, and thus ours."""
    if is_postgresql(connection):
        return int(connection.execute(DATABASE_CLOCK).scalar_one())
    return now_us()


def grant_releases(
    connection: Connection, heartbeats: Collection[Heartbeat], at_us: int
) -> dict[str, float]:
    """Session -> seconds for which the attempt that beat may release results.

    An attempt gets a grant once it is the newest that has registered and no other one's grant runs. It
    keeps it by beating, and gives it up with `released`.
    """
    beats = {(beat.view.uid, beat.view.attempt): beat for beat in heartbeats}
    producer = schema.producer.c
    owners = dict(
        connection.execute(
            select(producer.producer, producer.attempt).where(
                producer.producer.in_({uid for uid, _ in beats})
            )
        ).all()
    )
    granted: dict[str, float] = {}
    for (uid, attempt), beat in sorted(beats.items()):
        if beat.released:
            _give_up(connection, uid, attempt, at_us)
        elif owners.get(uid) == attempt and _take(connection, uid, attempt, at_us):
            granted[uid] = limits.RELEASE_GRANT_S
    return granted


def _take(connection: Connection, uid: str, attempt: int, at_us: int) -> bool:
    """The row's lock decides between two attempts: whoever comes second sees what the first wrote."""
    table = schema.release_grant
    values = {"attempt": attempt, "until_us": at_us + GRANT_US}
    update = (
        table.update()
        .where(
            table.c.session == uid,
            or_(
                table.c.attempt == attempt,
                (table.c.attempt < attempt) & (table.c.until_us <= at_us),
            ),
        )
        .values(**values)
    )
    if connection.execute(update).rowcount:
        return True
    return insert_or_skip(connection, table, session=uid, **values)


def _give_up(connection: Connection, uid: str, attempt: int, at_us: int) -> None:
    table = schema.release_grant
    connection.execute(
        table.update()
        .where(table.c.session == uid, table.c.attempt == attempt, table.c.until_us > at_us)
        .values(until_us=at_us)
    )
