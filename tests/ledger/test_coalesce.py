"""Batches of one tenant that wait together share a commit, and each is answered for itself."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from gristmill_contracts import limits
from gristmill_contracts.errors import (
    ConflictError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)  # fmt: skip
from gristmill_contracts.ids import EventId, TenantName
from gristmill_contracts.price_book import Price, PriceBook
from gristmill_contracts.usage import TOKEN_TYPES, UsageEvent
from gristmill_ledger.coalesce import Answers, Coalescer
from gristmill_ledger.database import Database
from gristmill_ledger.events import Post, store_batches
from gristmill_ledger.prices import PriceList, put_price_book
from gristmill_testing.ledger import make_batch, make_event
from gristmill_testing.ledger_store import NOW_US, name_session, register, stored_rows


class Store:
    """The real store, which counts its transactions."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, connection: Connection, posts: Sequence[Post]) -> Answers:
        self.sizes.append(len(posts))
        return store_batches(connection, posts, book="default", now_us=NOW_US)


def events_of(session: str, *numbers: int, **changes: Any) -> list[UsageEvent]:
    return [make_event(number, session=session, **changes) for number in numbers]


def post_of(producer: str, events: list[UsageEvent]) -> Post:
    return Post(batch=make_batch(producer, events))


async def while_the_writer_is_busy(database: Database, begin: Callable[[], None]) -> None:
    """Hold the writer, call `begin` and let what it started wait; then free the writer."""
    holds, free = threading.Event(), threading.Event()

    def hold(_connection: Connection) -> None:
        holds.set()
        free.wait(30)

    held = asyncio.create_task(database.write(hold))
    await asyncio.to_thread(holds.wait, 30)
    begin()
    for _ in range(3):
        await asyncio.sleep(0)
    free.set()
    await held


async def post_together(
    database: Database, store: Store, posts: Sequence[Post], *, waiting_max: int = 64
) -> list[Any]:  # Any: Stored or an exception
    coalescer = Coalescer(database, store, waiting_max=waiting_max)
    tasks: list[asyncio.Task[Any]] = []

    def begin() -> None:
        tasks.extend(asyncio.create_task(coalescer.post(post)) for post in posts)

    await while_the_writer_is_busy(database, begin)
    return await asyncio.gather(*tasks, return_exceptions=True)


def register_producers(database: Database, count: int, tenant: str = "acme") -> list[str]:
    names = [f"{tenant}-{index}" for index in range(count)]
    for name in names:
        register(database, name, session=name, tenant=tenant)
    return names


async def test_batches_of_one_tenant_that_wait_are_one_commit(database: Database) -> None:
    names, store = register_producers(database, 8), Store()
    answers = await post_together(
        database, store, [post_of(name, events_of(name, 1, 2)) for name in names]
    )
    assert [(each.cursor.producer, each.inserted) for each in answers] == [
        (name, 2) for name in names
    ]
    assert store.sizes == [8]
    rows = stored_rows(database)
    assert [row["seq"] for row in rows] == list(range(1, 17))
    assert [row["producer"] for row in rows] == [name for name in names for _ in range(2)]


async def test_tenants_do_not_share_a_commit(database: Database) -> None:
    names = register_producers(database, 2) + register_producers(database, 2, "other")
    store = Store()
    await post_together(
        database,
        store,
        [post_of(name, events_of(name, 1, tenant=TenantName(name[:-2]))) for name in names],
    )
    assert store.sizes == [2, 2]
    assert [row["seq"] for row in stored_rows(database)] == [1, 2, 1, 2]


async def test_one_refusal_leaves_the_others_as_they_are(database: Database) -> None:
    names, store = register_producers(database, 2), Store()
    posts = [
        post_of("nobody", events_of("x", 1)),
        post_of(names[0], events_of(names[0], 1)),
        post_of(names[1], events_of(names[1], 5)),
        post_of(names[1], events_of(names[1], 1)),
    ]
    answers = await post_together(database, store, posts)
    assert store.sizes == [4]
    assert isinstance(answers[0], NotFoundError)
    assert isinstance(answers[2], ConflictError)
    assert [each.cursor.acked_seq for each in (answers[1], answers[3])] == [1, 1]
    assert [row["producer"] for row in stored_rows(database)] == names


async def test_a_batch_sees_what_the_ones_before_it_in_the_commit_did(database: Database) -> None:
    """The same batch twice, the next one, and another payload under a taken id."""
    (name,), store = register_producers(database, 1), Store()
    other = events_of(name, 3, event_id=EventId(events_of(name, 1)[0].event_id))
    posts = [
        post_of(name, events_of(name, 1)),
        post_of(name, events_of(name, 1)),
        post_of(name, events_of(name, 2)),
        post_of(name, other),
    ]
    answers = await post_together(database, store, posts)
    assert store.sizes == [4]
    assert [(each.inserted, each.duplicates, len(each.conflicts)) for each in answers] == [
        (1, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1),
    ]  # fmt: skip
    assert [row["acked_seq"] for row in stored_rows(database, "producer")] == [3]
    assert len(stored_rows(database, "dead_letter")) == 1


async def test_what_the_database_refuses_hurts_its_own_batch_alone(database: Database) -> None:
    """A row that passed every check and still breaks a constraint: stored apart, one by one."""
    names, store = register_producers(database, 3), Store()
    impossible = events_of(names[1], 1, outcome="lost")
    posts = [
        post_of(names[0], events_of(names[0], 1)),
        post_of(names[1], impossible),
        post_of(names[2], events_of(names[2], 1)),
    ]
    answers = await post_together(database, store, posts)
    assert isinstance(answers[1], DBAPIError)
    assert [answers[index].inserted for index in (0, 2)] == [1, 1]
    assert store.sizes == [3, 1, 1, 1]
    assert [row["seq"] for row in stored_rows(database)] == [1, 2]


async def test_batches_share_a_commit_up_to_its_bound(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches with half of what a commit takes, and one with more than that, which has its own."""
    monkeypatch.setattr(limits, "COMMIT_EVENTS_MAX", 8)
    names, store = register_producers(database, 5), Store()
    sizes = (4, 4, 4, 9, 1)
    posts = [
        post_of(name, events_of(name, *range(1, size + 1)))
        for name, size in zip(names, sizes, strict=True)
    ]
    await post_together(database, store, posts)
    assert store.sizes == [2, 1, 1, 1]
    assert [row["producer"] for row in stored_rows(database)] == [
        name for name, size in zip(names, sizes, strict=True) for _ in range(size)
    ]
    assert [row["seq"] for row in stored_rows(database)] == list(range(1, sum(sizes) + 1))


async def test_who_hangs_up_stops_nobody(database: Database) -> None:
    names, store = register_producers(database, 3), Store()
    coalescer = Coalescer(database, store, waiting_max=64)
    tasks: list[asyncio.Task[Any]] = []

    def begin() -> None:
        tasks.extend(
            asyncio.create_task(coalescer.post(post_of(name, events_of(name, 1)))) for name in names
        )
        asyncio.get_running_loop().call_soon(tasks[0].cancel)

    await while_the_writer_is_busy(database, begin)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert [each.inserted for each in answers[1:]] == [1, 1]
    assert sum(store.sizes) >= 2


async def test_past_the_bound_a_batch_is_told_to_come_again(database: Database) -> None:
    names, store = register_producers(database, 3), Store()
    posts = [post_of(name, events_of(name, 1)) for name in names]
    answers = await post_together(database, store, posts, waiting_max=2)
    assert isinstance(answers[2], OverloadedError)
    assert [each.inserted for each in answers[:2]] == [1, 1]


async def test_f34_a_failed_commit_leaves_every_batch_to_be_sent_again(database: Database) -> None:
    """Each producer keeps its records until they are acknowledged; then there is one row for each."""
    names = register_producers(database, 2)
    failures = 3

    class Failing(Store):
        def __call__(self, connection: Connection, posts: Sequence[Post]) -> Answers:
            answers = super().__call__(connection, posts)
            if len(self.sizes) <= failures:
                raise UnavailableError("the disk is full")
            return answers

    store = Failing()
    posts = [post_of(name, events_of(name, 1, 2)) for name in names]
    for _ in range(failures):
        refused = await post_together(database, store, posts)
        assert all(isinstance(each, UnavailableError) for each in refused)
        assert stored_rows(database) == []
    answers = await post_together(database, store, posts)
    assert [each.inserted for each in answers] == [2, 2]
    assert len(stored_rows(database)) == 4


def test_f26_the_same_id_in_two_tenants_is_two_rows(database: Database) -> None:
    for tenant in ("acme", "other"):
        register(database, tenant, tenant=tenant, session=tenant)
        event = make_event(1, tenant=TenantName(tenant), event_id=EventId("same"), session=tenant)
        database.write_now(
            partial(store_batches, posts=[post_of(tenant, [event])], book="default", now_us=NOW_US)
        )
    assert [(row["tenant"], row["seq"]) for row in stored_rows(database)] == [
        ("acme", 1), ("other", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("order", ["coalesced", "one by one"])
async def test_the_chain_is_the_same_however_the_batches_came(
    database: Database, order: str
) -> None:
    names, store = register_producers(database, 2), Store()
    posts = [post_of(name, events_of(name, 1)) for name in names]
    if order == "coalesced":
        await post_together(database, store, posts)
    else:
        for post in posts:
            await Coalescer(database, store, waiting_max=1).post(post)
    hashes = [row["hash"].hex()[:16] for row in stored_rows(database)]
    assert hashes == ["c5a2d62a1aeefa78", "c19297e55afabcc7"]


def test_a_price_that_comes_after_its_book_was_kept_is_found(database: Database) -> None:
    """A kept list of prices may be old: another replica wrote the price."""
    register(database)
    name_session(database, "s-1", "first", price_book="later")
    lists: dict[str, PriceList] = {}

    def quarantined(number: int) -> str | None:
        store = partial(store_batches, book="default", now_us=NOW_US, price_lists=lists)
        post = post_of("p", [make_event(number)])
        database.write_now(partial(store, posts=[post]))
        reason: str | None = stored_rows(database)[-1]["quarantined"]
        return reason

    assert quarantined(1) == "unpriced"
    prices = [Price(model="*", token_type=name, micros_per_mtok=1) for name in TOKEN_TYPES]
    book = PriceBook(name="later", currency="USD", effective_from_us=0, prices=prices)
    database.write_now(lambda c: put_price_book(c, "later", book))
    assert quarantined(2) is None
    assert quarantined(3) is None
    assert set(lists) == {"default", "later"}
