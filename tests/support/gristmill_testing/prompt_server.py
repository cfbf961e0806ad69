"""uvicorn that ends when it is told, for the hundreds of servers that tests start and stop.

The original looks ten times a second whether it shall end, and then waits another tenth whatever is open.
"""

import asyncio
import socket
from contextlib import suppress
from typing import Final

import uvicorn

TICK_S: Final = 0.1
"""uvicorn's own: how often it looks at the date."""
POLL_S: Final = 0.002


class PromptServer(uvicorn.Server):
    """`stop` from any thread ends it once its requests are answered and its connections closed."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # Its loop is closed: it has ended already.
                self._loop.call_soon_threadsafe(self._told.set)

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, in its order, without its pauses."""
        for server in self.servers:
            server.close()
        for each in sockets or []:
            each.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(POLL_S)
        for server in self.servers:
            await server.wait_closed()
        await self.lifespan.shutdown()
