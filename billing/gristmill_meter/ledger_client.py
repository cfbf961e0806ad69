"""The ledger over HTTP."""

from typing import Final, TypeVar

import aiohttp
import msgspec

from gristmill_contracts.errors import error_from
from gristmill_contracts.http import (
    CONTENT_TYPE,
    Checkpoint,
    Heartbeat,
    Problem,
    ProducerCursor,
    RegisterCheckpoint,
    RegisterProducer,
    UsageBatch,
)
from gristmill_meter.ports import LedgerAwayError, SequenceGapError

T = TypeVar("T")

TIMEOUT_S: Final = 15.0
_HEADERS: Final = {"Content-Type": CONTENT_TYPE}
_AWAY_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


class LedgerClient:
    """Implements `ports.Ledger`. Call `open` in the event loop, and `close` at the end."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.http: aiohttp.ClientSession | None = None

    def open(self) -> None:
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))

    async def close(self) -> None:
        if self.http is not None:
            await self.http.close()

    async def register_producer(self, request: RegisterProducer) -> ProducerCursor:
        return await self._post("/v1/producers", request, ProducerCursor)

    async def post_batch(self, batch: UsageBatch) -> ProducerCursor:
        return await self._post("/v1/usage/batches", batch, ProducerCursor)

    async def register_checkpoint(self, request: RegisterCheckpoint) -> Checkpoint:
        return await self._post("/v1/checkpoints", request, Checkpoint)

    async def post_heartbeats(self, heartbeats: list[Heartbeat]) -> None:
        await self._post("/v1/heartbeats", heartbeats, dict[str, object])

    async def _post(self, path: str, body: object, answer: type[T]) -> T:
        if self.http is None:
            raise RuntimeError("the ledger client was used before open()")
        try:
            async with self.http.post(
                self.base_url + path, data=msgspec.msgpack.encode(body), headers=_HEADERS
            ) as response:
                read = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise LedgerAwayError(
                f"the ledger at {self.base_url} is away: {type(error).__name__}: {error}"
            ) from error
        if status < 400:
            return msgspec.msgpack.decode(read, type=answer)
        raise _error_of(read, status, self.base_url)


def _error_of(body: bytes, status: int, base_url: str) -> Exception:
    try:
        problem = msgspec.msgpack.decode(body, type=Problem)
    except msgspec.MsgspecError:
        problem = Problem(code="internal", message=f"answered {status} without a problem body")
    if problem.expected_seq is not None:
        return SequenceGapError(problem.message, problem.expected_seq)
    if problem.retryable or status in _AWAY_STATUSES:
        return LedgerAwayError(f"the ledger at {base_url} cannot answer now: {problem.message}")
    return error_from(problem.code, problem.message)
