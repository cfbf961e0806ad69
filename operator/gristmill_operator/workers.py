"""Takes keys from the queue and reconciles them, several at once; decides when each comes again."""

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from gristmill_contracts.errors import (
    ConflictError,
    GristmillError,
    NotFoundError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)
from gristmill_operator.kinds import SESSIONS
from gristmill_operator.problems import NotLeaderError, ThrottledError
from gristmill_operator.queue import BACKOFF_MAX_S, TRANSIENT_MAX_S, KeyQueue
from gristmill_operator.reconcile import SessionReconciler, StepFailedError
from gristmill_operator.seams import Key, Reconcilers

logger = logging.getLogger(__name__)

TRANSIENT: Final = (
    UnavailableError, OverloadedError, UnauthenticatedError, OSError, TimeoutError,
)  # fmt: skip
CONFLICT_MAX_S: Final = 1.0
PASS_S_MAX: Final = 300.0
"""A pass that takes longer has lost its way: it is ended, and the key comes again."""
RESYNC_SLICES: Final = 60

Result = Literal["done", "stale", "transient", "failed", "ended"]
"""Of a pass. ended: with the process, or with its lead. Alerts name these words."""
Finished = Callable[[Key, Result, float], None]
"""Told of each pass: key, result, seconds."""


@dataclass(slots=True, kw_only=True)
class Workers:
    queue: KeyQueue
    sessions: SessionReconciler
    others: Reconcilers
    finished: Finished = lambda key, result, seconds: None
    waited: Callable[[float], None] = lambda seconds: None

    async def run(self, count: int) -> None:
        """Work until cancelled. Raises NotLeaderError when leadership was lost."""
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self._work(), name=f"worker-{number}")

    async def _work(self) -> None:
        while True:
            key, waited_s = await self.queue.get()
            self.waited(waited_s)
            started = time.monotonic()
            result: Result = "ended"
            try:
                result = await self._one(key)
            finally:
                self.queue.done(key)
                self.finished(key, result, time.monotonic() - started)

    async def _one(self, key: Key) -> Result:
        try:
            async with asyncio.timeout(PASS_S_MAX):
                again_s = await self._reconcile(key)
        except NotLeaderError:
            raise
        except (ConflictError, NotFoundError) as error:
            return await self._stale(key, error)
        except StepFailedError as error:
            return self._failed(key, error.cause)
        except (GristmillError, OSError, TimeoutError) as error:
            self._say(key, error)
            return self._failed(key, error)
        except Exception as error:
            # A bug in the handling of one object must not end the work on all others.
            logger.exception("reconcile_crashed", extra=_fields(key))
            return self._failed(key, error)
        self.queue.forget(key)
        if again_s is not None:
            self.queue.add_after(key, again_s)
        return "done"

    async def _reconcile(self, key: Key) -> float | None:
        if key.kind == SESSIONS.kind:
            return await self.sessions.reconcile(key)
        return await self.others[key.kind].reconcile(key.name)

    async def _stale(self, key: Key, error: GristmillError) -> Result:
        """Something is newer than what was looked at, or gone: read it, and look again soon."""
        if isinstance(error, NotFoundError) and key.kind != SESSIONS.kind:
            # Others are not read anew: a cache that goes on naming what is gone must not be asked every second.
            self._say(key, error)
            return self._failed(key, error)
        logger.info("stale", extra={**_fields(key), "error": error.message})
        if key.kind == SESSIONS.kind:
            with contextlib.suppress(GristmillError):
                await self.sessions.refresh(key)
        self.queue.add_limited(key, longest_s=CONFLICT_MAX_S)
        return "stale"

    def _failed(self, key: Key, error: BaseException) -> Result:
        transient = isinstance(error, TRANSIENT)
        longest_s = TRANSIENT_MAX_S if transient else BACKOFF_MAX_S
        if isinstance(error, ThrottledError) and error.retry_after_s is not None:
            self.queue.add_after(key, error.retry_after_s)
        else:
            self.queue.add_limited(key, longest_s=longest_s)
        return "transient" if transient else "failed"

    def _say(self, key: Key, error: BaseException) -> None:
        message = f"{type(error).__name__}: {error}"
        logger.warning("reconcile_failed", extra={**_fields(key), "error": message})


def _fields(key: Key) -> dict[str, object]:
    return {"kind": key.kind, "namespace": key.namespace, "object": key.name}


@dataclass(slots=True, kw_only=True)
class Resync:
    """Every key once in `every_s`, spread evenly: what no watch told is seen all the same."""

    queue: KeyQueue
    keys: Callable[[], Iterable[Key]]
    every_s: float
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self) -> None:
        """Until cancelled."""
        turn = 0
        while True:
            await self.sleep(self.every_s / RESYNC_SLICES)
            for key in self.keys():
                if slice_of(key) == turn:
                    self.queue.add(key)
            turn = (turn + 1) % RESYNC_SLICES


def slice_of(key: Key) -> int:
    """Which part of the resync a key belongs to; the same in every process."""
    return zlib.crc32(f"{key.kind}/{key.namespace}/{key.name}".encode()) % RESYNC_SLICES
