"""Batches of one tenant that wait for the writer at the same time share one commit.

A tenant's rows are numbered under one lock, so its meters take turns; what a turn costs is mostly its
commit. The batches that came while the writer was busy are therefore stored together, in their order, and
each is answered for itself.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError, OverloadedError
from gristmill_ledger.database import Database
from gristmill_ledger.events import Post, Stored

Answers = list[Stored | GristmillError]


class Store(Protocol):
    """Stores batches of one tenant, and answers each."""

    def __call__(self, connection: Connection, posts: Sequence[Post]) -> Answers: ...


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A batch with whoever waits for its answer."""

    post: Post
    answer: asyncio.Future[Stored]


class Coalescer:
    """Stores batches through `store`, which takes batches of one tenant in one transaction."""

    def __init__(self, database: Database, store: Store, *, waiting_max: int) -> None:
        self._database = database
        self._store = store
        self._waiting_max = waiting_max
        self._waiting = 0
        self._queues: dict[str, deque[Waiting]] = {}
        """By tenant, in the order of arrival. A tenant with a queue has a task that empties it."""
        self._lock = threading.Lock()
        """Batches are put in on the event loop and taken out on the writer's thread."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def post(self, post: Post) -> Stored:
        """Store a checked batch with those of its tenant that wait too. Raises as `decide` says."""
        if self._waiting >= self._waiting_max:
            raise OverloadedError(
                f"{self._waiting} batches wait for the ledger's database, the most it holds; "
                "send the same request again later"
            )
        waiting = Waiting(post, asyncio.get_running_loop().create_future())
        self._waiting += 1
        try:
            self._put(post.batch.events[0].tenant, waiting)
            return await waiting.answer
        finally:
            self._waiting -= 1

    def _put(self, tenant: str, waiting: Waiting) -> None:
        with self._lock:
            queue = self._queues.get(tenant)
            if queue is not None:
                queue.append(waiting)
                return
            self._queues[tenant] = deque([waiting])
        # A task of its own: whoever began it may hang up.
        task = asyncio.create_task(self._empty(tenant))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take(self, tenant: str) -> list[Waiting]:
        """The next batches to store together: at least one, if any waits."""
        taken: list[Waiting] = []
        events = 0
        with self._lock:
            queue = self._queues[tenant]
            while queue and (
                not taken or events + len(queue[0].post.batch.events) <= limits.COMMIT_EVENTS_MAX
            ):
                taken.append(queue.popleft())
                events += len(taken[-1].post.batch.events)
        return taken

    def _ended(self, tenant: str) -> bool:
        with self._lock:
            if self._queues[tenant]:
                return False
            del self._queues[tenant]
            return True

    async def _empty(self, tenant: str) -> None:
        while not self._ended(tenant):
            taken: list[Waiting] = []
            try:
                answers = await self._store_next(tenant, taken)
            except DBAPIError as error:
                await self._store_apart(taken, error)
            except Exception as error:  # noqa: BLE001 - it is the answer to those who wait
                # Nothing was taken: there was no room for another write.
                for waiting in taken or self._take(tenant):
                    _answer(waiting, error)
            else:
                for waiting, answer in zip(taken, answers, strict=True):
                    _answer(waiting, answer)

    async def _store_next(self, tenant: str, taken: list[Waiting]) -> Answers:
        """Store what waits once the writer is free; `taken` tells what that was, however it ended."""

        def work(connection: Connection) -> Answers:
            if not taken:
                taken.extend(self._take(tenant))
            return self._store(connection, posts=[waiting.post for waiting in taken])

        return await self._database.write(work)

    async def _store_apart(self, taken: Sequence[Waiting], error: DBAPIError) -> None:
        """The database refused them together: one alone is to blame, and the others go on."""
        if len(taken) == 1:
            _answer(taken[0], error)
            return
        for waiting in taken:
            try:
                answers = await self._database.write(partial(self._store, posts=[waiting.post]))
            except Exception as own:  # noqa: BLE001 - as above
                _answer(waiting, own)
            else:
                _answer(waiting, answers[0])


def _answer(waiting: Waiting, answer: Stored | Exception) -> None:
    if waiting.answer.done():  # Whoever waited is gone.
        return
    if isinstance(answer, Exception):
        waiting.answer.set_exception(answer)
    else:
        waiting.answer.set_result(answer)
