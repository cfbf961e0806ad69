"""What an attempt of a session is to do: told by the operator, passed on to its meter."""

from collections.abc import Collection
from typing import Literal

from sqlalchemy import Connection, select

from gristmill_contracts.cluster_http import Directive, HeartbeatAnswer
from gristmill_contracts.errors import ConflictError
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.units import now_us
from gristmill_ledger import checks, schema
from gristmill_ledger.database import insert_or_skip


def put_directive(connection: Connection, uid: str, directive: Directive) -> None:
    """Keep it in the place of the one before.

    Raises ConflictError for an attempt that is older than the one that was told last.
    """
    checks.text("session", uid)
    checks.quantity("attempt", directive.attempt)
    table = schema.directive
    values = {"attempt": directive.attempt, "desired": directive.desired, "told_us": now_us()}
    if insert_or_skip(connection, table, session=uid, **values):
        return
    update = (
        table.update()
        .where(table.c.session == uid, table.c.attempt <= directive.attempt)
        .values(**values)
    )
    if not connection.execute(update).rowcount:
        raise ConflictError(
            f"attempt {directive.attempt} of session {uid} is over: a newer one was told something "
            "since; read the session again"
        )


def answer_heartbeats(connection: Connection, heartbeats: Collection[Heartbeat]) -> HeartbeatAnswer:
    """The directives of the attempts that beat, which a newer one has fenced, and what is stored of them."""
    attempts = {beat.view.uid: beat.view.attempt for beat in heartbeats}
    table, producer = schema.directive.c, schema.producer.c
    told = connection.execute(
        select(table.session, table.attempt, table.desired).where(table.session.in_(attempts))
    ).all()
    owners = connection.execute(
        select(producer.producer, producer.attempt, producer.acked_seq).where(
            producer.producer.in_(attempts)
        )
    ).all()
    directives: dict[str, Literal["serve", "stop"]] = {
        row.session: row.desired for row in told if row.attempt == attempts[row.session]
    }
    fenced = [SessionUid(row.producer) for row in owners if row.attempt > attempts[row.producer]]
    # An attempt that it does not know any more, after a restore, is to register anew.
    acked = {row.producer: row.acked_seq for row in owners if row.attempt == attempts[row.producer]}
    return HeartbeatAnswer(directives=directives, fenced=sorted(fenced), acked=acked)
