"""The ledger's store without HTTP: short calls for tests, each in its own transaction."""

from functools import partial
from typing import Any

from sqlalchemy import Connection, select

from gristmill_contracts.http import ProducerCursor, RegisterProducer, RegisterSession
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.usage import UsageEvent
from gristmill_ledger import schema
from gristmill_ledger.database import Database
from gristmill_ledger.decisions import check_batch
from gristmill_ledger.events import Stored, store_batch
from gristmill_ledger.producers import Registered, register_producer
from gristmill_ledger.rating import rate_behind
from gristmill_ledger.registry import register_session
from gristmill_ledger.rerating import (
    Outcome,
    Place,
    Rerate,
    check_rerate,
    preview,
    rerate_step,
    touched,
)
from gristmill_ledger.usage import usage_page
from gristmill_ledger.usage_query import parse_usage_query
from gristmill_testing.ledger import START_US, make_batch

NOW_US = START_US + 1_000_000


def register(
    database: Database,
    producer: str = "p",
    *,
    tenant: str = "acme",
    session: str = "s-1",
    epoch: int = 1,
    head_seq: int = 0,
    attempt: int = 1,
) -> Registered:
    message = RegisterProducer(
        producer=producer,
        tenant=TenantName(tenant),
        session=SessionUid(session),
        epoch=epoch,
        attempt=attempt,
        head_seq=head_seq,
    )
    return database.write_now(lambda connection: register_producer(connection, message))


def name_session(
    database: Database, uid: str, name: str, *, tenant: str = "acme", price_book: str | None = None
) -> None:
    message = RegisterSession(
        uid=SessionUid(uid),
        tenant=TenantName(tenant),
        project="",
        name=name,
        model="tiny",
        rank=8,
        created_us=START_US,
        price_book=price_book,
    )
    database.write_now(lambda connection: register_session(connection, message))


def post(
    database: Database,
    events: list[UsageEvent],
    producer: str = "p",
    *,
    epoch: int = 1,
    attempt: int | None = None,
) -> Stored:
    """Check and store a batch, as the route does."""
    batch = make_batch(producer, events, epoch=epoch)
    check_batch(batch)
    return database.write_now(
        lambda connection: store_batch(
            connection, batch, book="default", now_us=NOW_US, attempt=attempt
        )
    )


def acked(stored: Stored) -> int:
    cursor: ProducerCursor = stored.cursor
    return cursor.acked_seq


def stored_rows(database: Database, table: str = "usage_event") -> list[dict[str, Any]]:
    """All rows of a table, in the order of its key."""
    found = schema.metadata.tables[table]
    query = select(found).order_by(*found.primary_key)
    return database.read_now(
        lambda connection: [dict(row._mapping) for row in connection.execute(query)]
    )


def usage(database: Database, book: str = "default", **parameters: str | int) -> dict[str, Any]:
    """The answer of GET /v1/usage."""
    query = parse_usage_query([(name, str(value)) for name, value in parameters.items()])
    return database.read_now(lambda connection: usage_page(connection, query, book))


def rate_all(database: Database, book: str = "default", *, rows_max: int = 1000) -> int:
    """Rate everything that is stored, as the follower does; returns how many rows that were."""
    total = 0
    while True:
        done = database.write_now(
            lambda c: rate_behind(c, book=book, now_us=NOW_US, rows_max=rows_max)
        )
        total += done.rows
        if not done.more:
            return total


def rerate_all(database: Database, request: Rerate, book: str, *, dry: bool = False) -> Outcome:
    """Rate everything again that the request names, as the route does."""
    check_rerate(request)
    outcome = Outcome()
    run: int | None = None
    for place in database.read_now(partial(touched, request=request, default_book=book)):
        if dry:
            found = database.read_now(partial(_preview, place, request, book))
        else:
            found, run = database.write_now(partial(_step, place, request, book, run))
        outcome.add(found)
    return outcome


def _preview(place: Place, request: Rerate, book: str, connection: Connection) -> Outcome:
    return preview(connection, place, request, book)


def _step(
    place: Place, request: Rerate, book: str, run: int | None, connection: Connection
) -> tuple[Outcome, int]:
    return rerate_step(connection, place, request, book, run, NOW_US)
