"""A ledger for tests: served in this process on a loopback port, with a client that speaks msgpack."""

import asyncio
import io
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import uvicorn

from gristmill_contracts.errors import error_from
from gristmill_contracts.http import (
    ATTEMPT_HEADER,
    CONTENT_TYPE,
    SERVICE_HEADER,
    SESSION_HEADER,
    Heartbeat,
    Problem,
    ProducerCursor,
    RegisterProducer,
    SessionView,
    UsageBatch,
)  # fmt: skip
from gristmill_contracts.ids import OpId, SessionUid, TenantName, UsageKind, event_id
from gristmill_contracts.secrets import Service, producer_secret, service_secret
from gristmill_contracts.usage import Counts, UsageEvent
from gristmill_ledger.app import make_app
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.settings import LedgerSettings
from gristmill_testing.ledger_file import migrated_sqlite
from gristmill_testing.prompt_server import PromptServer

Message = TypeVar("Message")
START_US = 1_764_460_800_000_000
"""2025-11-30T00:00:00Z: when events of `make_event` begin unless told."""


@dataclass(slots=True, kw_only=True)
class LedgerClient:
    """Calls one ledger. Refusals raise the error of their code; `call` returns the raw answer."""

    url: str
    ledger: Ledger
    http: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every call: who asks."""

    def as_service(self, key: bytes, service: Service) -> "LedgerClient":
        """The same ledger, asked by one of the cluster's services."""
        secret = service_secret(key, service)
        headers = {"Authorization": f"Bearer {secret}", SERVICE_HEADER: service}
        return replace(self, headers=headers)

    def as_meter(self, key: bytes, uid: str, attempt: int = 1) -> "LedgerClient":
        """The same ledger, asked by the meter of an attempt."""
        secret = producer_secret(key, SessionUid(uid), attempt)
        headers = {"Authorization": f"Bearer {secret}", SESSION_HEADER: uid}
        return replace(self, headers=headers | {ATTEMPT_HEADER: str(attempt)})

    async def call(
        self, method: str, path: str, message: object = None, **parameters: str | int
    ) -> tuple[int, bytes]:
        """Status and body of a request with a msgpack body (bytes are sent as they are)."""
        body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        async with self.http.request(
            method,
            self.url + path,
            data=None if message is None else io.BytesIO(body),
            params=parameters,
            headers={"Content-Type": CONTENT_TYPE} | self.headers,
        ) as response:
            return response.status, await response.read()

    async def ask(
        self,
        kind: type[Message],
        method: str,
        path: str,
        message: object = None,
        **parameters: str | int,
    ) -> Message:
        """The decoded answer. Raises the GristmillError that the ledger reported."""
        status, body = await self.call(method, path, message, **parameters)
        if status != 200:
            problem = msgspec.msgpack.decode(body, type=Problem)
            raise error_from(problem.code, problem.message)
        return msgspec.msgpack.decode(body, type=kind)

    async def usage(self, **parameters: str | int) -> dict[str, Any]:
        """GET /v1/usage, which answers JSON. Raises as `ask` does."""
        status, body = await self.call("GET", "/v1/usage", **parameters)
        if status != 200:
            problem = msgspec.json.decode(body, type=Problem)
            raise error_from(problem.code, problem.message)
        answer: dict[str, Any] = msgspec.json.decode(body)
        return answer

    async def register(
        self,
        producer: str,
        *,
        tenant: str = "acme",
        session: str = "s-1",
        epoch: int = 1,
        attempt: int = 1,
        head_seq: int = 0,
    ) -> ProducerCursor:
        message = RegisterProducer(
            producer=producer,
            tenant=TenantName(tenant),
            session=SessionUid(session),
            epoch=epoch,
            attempt=attempt,
            head_seq=head_seq,
        )
        return await self.ask(ProducerCursor, "POST", "/v1/producers", message)

    async def post(
        self, producer: str, events: list[UsageEvent], *, epoch: int = 1
    ) -> ProducerCursor:
        batch = UsageBatch(
            producer=producer, epoch=epoch, first_seq=events[0].producer_seq, events=events
        )
        return await self.ask(ProducerCursor, "POST", "/v1/usage/batches", batch)


@asynccontextmanager
async def running_ledger(
    data_dir: Path, *, listen_port: int = 0, **settings: Any
) -> AsyncIterator[LedgerClient]:
    """Serve a ledger on a loopback port, a free one unless told, for the length of the block."""
    ledger = Ledger(LedgerSettings(data_dir=data_dir, **settings))
    store = data_dir / "ledger.sqlite3"
    if ledger.settings.url == f"sqlite:///{store}" and not store.exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        store.write_bytes(migrated_sqlite())
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", listen_port))
    config = uvicorn.Config(make_app(ledger), log_config=None, access_log=False)
    server = PromptServer(config)
    # Not `serve`: it would take over this process's signal handlers.
    task = asyncio.create_task(server._serve([listener]))
    try:
        while not server.started:
            if task.done():
                await task
                raise RuntimeError("the ledger did not start")
            await asyncio.sleep(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with aiohttp.ClientSession() as http:
            yield LedgerClient(url=url, ledger=ledger, http=http)
    finally:
        server.stop()
        await ledger.wake()
        await task
        listener.close()


def make_event(number: int, **changes: Any) -> UsageEvent:
    """Event of operation `log/<number>` of session s-1 of acme, at producer_seq `number`."""
    session = SessionUid(changes.pop("session", "s-1"))
    kind: UsageKind = changes.pop("kind", "usage")
    n: int = changes.pop("n", 0)
    fields: dict[str, Any] = {
        "event_id": event_id(OpId(session, "log", number), kind, n),
        "producer_seq": number,
        "kind": kind,
        "n": n,
        "tenant": TenantName("acme"),
        "session": session,
        "stream": "log",
        "number": number,
        "operation": "sample",
        "model": "tiny",
        "project": "",
        "attempt": 1,
        "outcome": "completed",
        "counts": Counts(prefill=10, cached_prefill=20, sample=5),
        "op_start_us": START_US + number,
        "op_end_us": START_US + number + 1,
    }
    return UsageEvent(**(fields | changes))


def make_batch(producer: str, events: list[UsageEvent], *, epoch: int = 1) -> UsageBatch:
    """A batch that begins where its first event says."""
    first_seq = events[0].producer_seq
    return UsageBatch(producer=producer, epoch=epoch, first_seq=first_seq, events=events)


def make_heartbeat(uid: str, *, attempt: int = 1, at_us: int = START_US) -> Heartbeat:
    """A heartbeat of an idle session."""
    view = SessionView(
        uid=SessionUid(uid),
        attempt=attempt,
        last_received_number=0,
        next_number=1,
        missing_number=None,
        missing_since_us=None,
        state="Serving",
        error=None,
        counts=Counts(),
        last_activity_us=at_us,
    )
    return Heartbeat(
        view=view,
        tenant=TenantName("acme"),
        acked_seq=0,
        head_seq=0,
        snapshot_applied=0,
        worker_ready=True,
        at_us=at_us,
    )


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
