"""Holds an answer until work ends, the client leaves, or the process is told to end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from gristmill_gateway.body import ClientGoneError

T = TypeVar("T")


async def hold(
    connection: Request, draining: asyncio.Event, work: Coroutine[Any, Any, T]
) -> T | None:
    """What `work` gives; None if the process began to drain before. Raises ClientGoneError.

    Whichever comes first, `work` is not running any more afterwards: a poll that nobody reads must
    not claim a result.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(connection))
    ending = asyncio.create_task(draining.wait())
    try:
        await asyncio.wait({task, gone, ending}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        return None
    finally:
        rest = [each for each in (task, gone, ending) if not each.done()]
        for each in rest:
            each.cancel()
        if rest:
            await asyncio.wait(rest)


async def _disconnected(connection: Request) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await connection.receive())["type"] != "http.disconnect":
        pass
