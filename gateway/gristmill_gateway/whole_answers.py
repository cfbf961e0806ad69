"""An answer leaves in one write: a gateway that is killed has sent all of it, or nothing.

uvicorn writes head and body apart. botocore takes a head that no body follows for an empty answer (it has
urllib3 not check the length), so that a kill between the two would hand an SDK `{}` for a result.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class Together:
    """A transport whose writes of one turn of the event loop go out as one."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            together = b"".join(self._held)
            self._held.clear()
            self._transport.write(together)

    def __getattr__(self, name: str) -> Any:  # Any: whatever else a transport has
        return getattr(self._transport, name)


class WholeAnswers(H11Protocol):
    """uvicorn's own protocol, over such a transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Together(transport, self.loop))  # type: ignore[arg-type]
