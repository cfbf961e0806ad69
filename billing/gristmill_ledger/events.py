"""Ingest of usage batches: dedupe, numbering, chain and cursors in one transaction.

`decisions.decide` says what becomes of each event; `store_batches` reads what it needs, asks it, and
writes what it says. Batches of several producers of one tenant share a commit.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from sqlalchemy import Connection, bindparam, select

from gristmill_contracts import units
from gristmill_contracts.errors import GristmillError, NotFoundError
from gristmill_contracts.http import ProducerCursor, UsageBatch
from gristmill_contracts.usage import UsageEvent
from gristmill_ledger import schema
from gristmill_ledger.budgets.settle import UNSETTLED, Settled, settle
from gristmill_ledger.chain.rows import NewRow, append_rows, lock_head
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.decisions import Decision, Encoded, ProducerState, decide, oddities
from gristmill_ledger.driver import change_all, is_postgresql
from gristmill_ledger.lists import among, array_text
from gristmill_ledger.prices import PriceList, load_prices

# Built once: composing a statement costs more than SQLite takes to run it.
_PRODUCERS: Final = (
    select(schema.producer)
    .where(among(schema.producer.c.producer, "keys"))
    .order_by(schema.producer.c.producer)
    .with_for_update()
)
# One parameter for all ids: a list of 500 makes another statement for each length, parsed each time.
_SQLITE_KNOWN: Final = (
    "SELECT event_id, payload_hash FROM usage_event "
    "WHERE tenant = ? AND event_id IN (SELECT value FROM json_each(?))"
)
_POSTGRESQL_KNOWN: Final = "SELECT event_id, payload_hash FROM usage_event WHERE tenant = %s AND event_id = ANY(%s::text[])"
_SESSIONS: Final = (
    select(schema.session.c.uid, schema.session.c.tenant, schema.session_price_book.c.book)
    .outerjoin(
        schema.session_price_book, schema.session_price_book.c.session == schema.session.c.uid
    )
    .where(among(schema.session.c.uid, "uids"))
)
"""A session's book is recorded with the session, never without it."""
_MOVE_CURSOR: Final = (
    schema.producer.update()
    .where(schema.producer.c.producer == bindparam("key"))
    .values(acked_seq=bindparam("value"))
)

_MOVE_CURSORS: Final = (
    "UPDATE producer AS known SET acked_seq = told.acked_seq "
    "FROM unnest(%s::text[], %s::bigint[]) AS told (producer, acked_seq) "
    "WHERE known.producer = told.producer"
)
"""Their rows are locked already, so that the order does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A checked batch, and the attempt of the meter that sent it; None = not told."""

    batch: UsageBatch
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a commit did with one batch, for metrics and logs."""

    cursor: ProducerCursor
    inserted: int
    duplicates: int
    conflicts: list[UsageEvent]
    quarantined: int
    settled: Settled = UNSETTLED
    """What the whole commit did to budgets; with the first of its batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A batch that will be stored."""

    state: ProducerState
    decision: Decision


def store_batch(
    connection: Connection,
    batch: UsageBatch,
    *,
    book: str,
    now_us: int,
    attempt: int | None = None,
) -> Stored:
    """Store one checked batch. Raises as `decide` says."""
    post = Post(batch=batch, attempt=attempt)
    (answer,) = store_batches(connection, [post], book=book, now_us=now_us)
    if isinstance(answer, GristmillError):
        raise answer
    return answer


def store_batches(
    connection: Connection,
    posts: Sequence[Post],
    *,
    book: str,
    now_us: int | None = None,
    price_lists: dict[str, PriceList] | None = None,
) -> list[Stored | GristmillError]:
    """Store checked batches of one tenant, each after the ones before it, and move their cursors.

    The answer to each is its own: a batch that is refused changes nothing and stops no other.
    now_us: None = by the clock. price_lists: kept from one call to the next, by name of the book.
    """
    tenant = posts[0].batch.events[0].tenant
    now_us = units.now_us() if now_us is None else now_us
    states = _find_producers(connection, {post.batch.producer for post in posts})
    head = None
    known: dict[str, bytes] = {}
    if any(state is not None and state.tenant == tenant for state in states.values()):
        # Before the look: another process may be about to store the same events.
        head = lock_head(connection, tenant)
        known = _known_hashes(connection, tenant, posts)
    decided = [_decide(post, states, known) for post in posts]
    accepted = [each for each in decided if isinstance(each, Decided)]
    judge = Judge(
        connection=connection, tenant=tenant, book=book, now_us=now_us, lists=price_lists or {}
    )
    rows = judge.rows(accepted)
    if price_lists is not None:
        price_lists |= judge.lists
    settled = UNSETTLED
    if head is not None and any(rows):
        append_rows(connection, head, [row for of_batch in rows for row in of_batch], now_us)
        new = [encoded.event for each in accepted for encoded in each.decision.new]
        settled = settle(connection, tenant, new, now_us, book=book)
    for each in accepted:
        for conflict in each.decision.conflicts:
            _bury(connection, conflict, each.state, now_us)
    _move_cursors(connection, accepted)
    made = [_stored(*each) for each in zip(accepted, rows, strict=True)]
    stored = iter([replace(each, settled=settled) for each in made[:1]] + made[1:])
    return [next(stored) if isinstance(each, Decided) else each for each in decided]


def _decide(
    post: Post, states: dict[str, ProducerState | None], known: dict[str, bytes]
) -> Decided | GristmillError:
    """Decide one batch, and remember what it does for those behind it."""
    producer = post.batch.producer
    state = states[producer]
    if state is None:
        return _unknown_producer(producer)
    try:
        decision = decide(post.batch, state, known, post.attempt)
    except GristmillError as error:
        return error
    known |= {encoded.event.event_id: encoded.digest for encoded in decision.new}
    if not decision.fenced:
        states[producer] = replace(state, acked_seq=decision.acked_seq)
    return Decided(state=state, decision=decision)


def _find_producers(
    connection: Connection, producers: Collection[str]
) -> dict[str, ProducerState | None]:
    """Rows of producers, locked in their order to the end of the transaction; None = not registered."""
    states: dict[str, ProducerState | None] = dict.fromkeys(producers)
    for row in connection.execute(_PRODUCERS, {"keys": sorted(producers)}):
        states[row.producer] = ProducerState(
            producer=row.producer,
            tenant=row.tenant,
            session=row.session,
            epoch=row.epoch,
            attempt=row.attempt,
            acked_seq=row.acked_seq,
        )
    return states


def lock_producer(connection: Connection, producer: str) -> ProducerState:
    """The producer's row, locked to the end of the transaction. Raises NotFoundError."""
    state = _find_producers(connection, [producer])[producer]
    if state is None:
        raise _unknown_producer(producer)
    return state


def _unknown_producer(producer: str) -> NotFoundError:
    return NotFoundError(f"producer {producer!r} is not registered; register it first")


def _known_hashes(connection: Connection, tenant: str, posts: Sequence[Post]) -> dict[str, bytes]:
    ids = list({event.event_id for post in posts for event in post.batch.events})
    if not is_postgresql(connection):
        found = connection.exec_driver_sql(
            _SQLITE_KNOWN, (tenant, msgspec.json.encode(ids).decode())
        )
    else:
        found = connection.exec_driver_sql(_POSTGRESQL_KNOWN, (tenant, array_text(ids)))
    return {event_id: bytes(digest) for event_id, digest in found}


@dataclass(slots=True, kw_only=True)
class Judge:
    """Makes rows of new events, and finds out what is odd about them."""

    connection: Connection
    tenant: str
    book: str
    now_us: int
    lists: dict[str, PriceList]
    """By book. Prices are only ever added: one that is found here is good, and only one that is not makes
    the books be read again."""

    def rows(self, accepted: Sequence[Decided]) -> list[list[NewRow]]:
        """The new rows of each batch."""
        if not any(each.decision.new for each in accepted):
            return [[] for _ in accepted]
        uids: set[str] = {new.event.session for each in accepted for new in each.decision.new}
        uids |= {each.state.session for each in accepted}
        sessions = self.connection.execute(_SESSIONS, {"uids": list(uids)}).all()
        registered = {row.uid for row in sessions if row.tenant == self.tenant}
        books = {row.uid: row.book or self.book for row in sessions}
        missing = {self.book, *books.values()} - self.lists.keys()
        self._load(missing)
        rows = [self._batch(each, books, registered) for each in accepted]
        if any("unpriced" in (row.quarantined or "") for batch in rows for row in batch):
            self._load({self.book, *books.values()} - missing)
            rows = [self._batch(each, books, registered) for each in accepted]
        return rows

    def _load(self, names: Collection[str]) -> None:
        self.lists = self.lists | {name: load_prices(self.connection, name) for name in names}

    def _batch(
        self, decided: Decided, books: dict[str, str], registered: Collection[str]
    ) -> list[NewRow]:
        prices = self.lists[books.get(decided.state.session, self.book)]
        return [
            _row(
                new,
                decided,
                oddities(
                    new.event,
                    decided.state,
                    prices=prices,
                    registered=new.event.session in registered,
                    now_us=self.now_us,
                    fenced=decided.decision.fenced,
                ),
            )
            for new in decided.decision.new
        ]


def _row(new: Encoded, decided: Decided, quarantined: str | None) -> NewRow:
    event = new.event
    return NewRow(
        values=new.values,
        facts=new.facts,
        payload_hash=new.digest,
        producer=decided.state.producer,
        producer_seq=event.producer_seq,
        attempt=event.attempt,
        lease=event.lease,
        completeness="unknown" if event.counts is None else "final",
        quarantined=quarantined,
    )


def _move_cursors(connection: Connection, accepted: Sequence[Decided]) -> None:
    """Each cursor once, in the order in which the rows were locked."""
    cursors = {
        each.state.producer: each.decision.acked_seq
        for each in accepted
        if not each.decision.fenced and each.decision.acked_seq > each.state.acked_seq
    }
    if cursors:
        rows = [{"key": each, "value": cursors[each]} for each in sorted(cursors)]
        change_all(connection, _MOVE_CURSOR, _MOVE_CURSORS, rows)


def _stored(decided: Decided, rows: Sequence[NewRow]) -> Stored:
    decision = decided.decision
    return Stored(
        cursor=ProducerCursor(
            producer=decided.state.producer,
            acked_seq=decision.acked_seq,
            fenced=decision.fenced,
        ),
        inserted=len(rows),
        duplicates=len(decision.duplicates),
        conflicts=[conflict.event for conflict in decision.conflicts],
        quarantined=sum(row.quarantined is not None for row in rows),
    )


def _bury(connection: Connection, conflict: Encoded, state: ProducerState, now_us: int) -> None:
    insert_or_skip(
        connection,
        schema.dead_letter,
        tenant=state.tenant,
        event_id=conflict.event.event_id,
        payload_hash=conflict.digest,
        reason="payload_conflict",
        producer=state.producer,
        producer_seq=conflict.event.producer_seq,
        body=msgspec.msgpack.encode(conflict.event),
        received_us=now_us,
    )
