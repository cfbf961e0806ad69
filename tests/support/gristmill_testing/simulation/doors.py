"""Gateways: the real path of submits, polls and streams, between clients and meters."""

import asyncio
import struct
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from starlette.requests import Request

from gristmill_contracts.credentials import EndpointSecret, EndpointSecretSpec
from gristmill_contracts.errors import GristmillError, NotFoundError
from gristmill_contracts.http import Problem, Refuse, Submit
from gristmill_contracts.ids import OpId
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import TrainingSession
from gristmill_gateway.body import ClientGoneError
from gristmill_gateway.directory import Directory
from gristmill_gateway.hold import hold
from gristmill_gateway.inbox import Inbox
from gristmill_gateway.ledger_client import LedgerClient
from gristmill_gateway.meter_client import MeterClient
from gristmill_gateway.meters import Meters
from gristmill_gateway.operation_ids import make_operation_id, read_operation_id
from gristmill_gateway.sagemaker.context import RuntimeContext
from gristmill_gateway.sagemaker.runtime import wait_for_end
from gristmill_gateway.waiting_room import WaitingRoom
from gristmill_sessions.identity import session_uid
from gristmill_testing.simulation.loop import Process
from gristmill_testing.simulation.network import SimHttp

if TYPE_CHECKING:
    from gristmill_testing.simulation.world import World

KEY = b"k" * 32
HOLD_S = 8.0
STATUSES = {
    "not_found": 404,
    "conflict": 409,
    "fenced": 409,
    "invalid_request": 400,
    "overloaded": 429,
}

R = TypeVar("R")


class SimStore:
    """Sessions and endpoints, as they are or as the watch of a gateway knows them."""

    def __init__(self, sessions: dict[str, TrainingSession] | None = None) -> None:
        self.sessions = {} if sessions is None else sessions
        self.endpoints: dict[str, EndpointSecret] = {}
        self.changes = 0

    def revision(self) -> int:
        return self.changes

    def list(self, kind: type[R], namespace: str | None = None) -> list[R]:
        assert kind is TrainingSession
        found = self.sessions.values()
        return cast("list[R]", [s for s in found if namespace in (None, s.metadata.namespace)])

    def get(self, kind: type[R], namespace: str, name: str) -> R:
        found = (self.endpoints if kind is EndpointSecret else self.sessions).get(name)
        if found is None:
            raise NotFoundError(f"there is no {name}")
        return cast(R, found)

    def end_all(self) -> None:
        for session in self.sessions.values():
            session.status.state = "Stopped"
        self.endpoints.clear()
        self.changes += 1

    def put_endpoint(self, name: str, namespace: str, spec: EndpointSecretSpec) -> None:
        """A watch may be late, but tells of an object in the order of its writes."""
        known = self.endpoints.get(name)
        if known is not None and known.spec.attempt > spec.attempt:
            return
        meta = Metadata(name=name, namespace=namespace)
        self.endpoints[name] = EndpointSecret(metadata=meta, spec=spec)
        self.changes += 1


class Gateway:
    """One replica. It keeps nothing, so that another life is as good."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.lives = 0
        self.process: Process | None = None
        self.store = SimStore(world.store.sessions)
        self._deaf_until = 0.0

    def go_deaf(self, length_s: float) -> None:
        """Its watch hears of nothing for a while: it goes on with what it knows."""
        self._deaf_until = self.world.loop.now + length_s

    def hear(self, name: str, namespace: str, spec: EndpointSecretSpec) -> None:
        """A moment after it was written."""
        deaf_s = max(0.0, self._deaf_until - self.world.loop.now)
        delay_s = deaf_s + self.world.rng.random() * 0.3
        self.world.later(delay_s, self.store.put_endpoint, name, namespace, spec)

    def start(self) -> None:
        self.lives += 1
        world = self.world
        self.store.endpoints |= world.store.endpoints  # It lists before it watches.
        self.store.changes += 1
        process = self.process = Process(world.loop, f"{self.name}.{self.lives}", self.name)
        directory = Directory(cast(Any, self.store))
        http = cast(Any, SimHttp(world.net, process))
        client, ledger = MeterClient(http), LedgerClient(http, "http://ledger")
        draining = asyncio.Event()
        context = RuntimeContext(
            store=cast(Any, self.store),
            directory=directory,
            ledger=ledger,
            meters=Meters(
                directory=directory,
                client=client,
                room=WaitingRoom(HOLD_S, draining),
                inbox=Inbox(ledger=ledger),
            ),
            metrics=cast(Any, None),
            operation_key=KEY,
            token_key=KEY,
            result_wait_s=world.plan.result_wait_s,
            draining=draining,
        )
        world.net.serve(self.name, process, Door(world, context))


class Door:
    """`/submit/<name>`, `/refuse/<name>`, `/result/<name>/<stream>/<id>` and `/stream/<name>`."""

    def __init__(self, world: "World", context: RuntimeContext) -> None:
        self.world = world
        self.context = context

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        _, verb, name, *rest = scope["path"].split("/")
        session = self.world.store.sessions[name]
        try:
            if verb == "stream":
                await self._stream(session, body, receive, send)
                return
            if verb == "result":
                answer = await self._result(session, rest, Request(scope, receive))
            elif verb == "refuse":
                refusal = msgspec.msgpack.decode(body, type=Refuse)
                answer = await self.context.meters.refuse(session, refusal)
            else:
                answer = await self._submit(session, msgspec.msgpack.decode(body, type=Submit))
        except ClientGoneError:
            return
        except GristmillError as error:
            status = STATUSES.get(error.code, 503 if error.retryable else 500)
            problem = Problem(code=error.code, message=error.message, retryable=error.retryable)
            await _reply(send, status, problem)
            return
        await _reply(send, 200, answer)

    async def _submit(self, session: TrainingSession, submit: Submit) -> str:
        accepted = await self.context.meters.submit(session, submit)
        operation = OpId(session_uid(session), accepted.stream, accepted.number)
        return make_operation_id(self.context.operation_key, operation)

    async def _result(
        self, session: TrainingSession, rest: list[str], connection: Request
    ) -> object:
        stream, operation_id = rest
        uid = session_uid(session)
        operation = read_operation_id(
            self.context.operation_key, operation_id, uid, cast(Any, stream)
        )
        work = wait_for_end(self.context, session, operation, self.context.result_wait_s)
        return await hold(connection, self.context.draining, work)

    async def _stream(self, session: TrainingSession, body: bytes, receive: Any, send: Any) -> None:
        submit = msgspec.msgpack.decode(body, type=Submit)
        leaving = asyncio.ensure_future(receive())
        moving = asyncio.ensure_future(self._move(session, submit, send))
        try:
            await asyncio.wait({leaving, moving}, return_when=asyncio.FIRST_COMPLETED)
            if moving.done():
                moving.result()
        finally:
            for task in (leaving, moving):
                task.cancel()
            await asyncio.wait({leaving, moving})

    async def _move(self, session: TrainingSession, submit: Submit, send: Any) -> None:
        begun = False
        try:
            async with AsyncExitStack() as stack:
                chunks = await self.context.meters.open_stream(session, submit, stack)
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": []})
                async for chunk in chunks:
                    content = msgspec.msgpack.encode(chunk)
                    content = struct.pack("<I", len(content)) + content
                    await send({"type": "http.response.body", "body": content, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except GristmillError:
            if begun:  # The wire breaks off, too.
                raise ConnectionAbortedError from None
            raise


async def _reply(send: Any, status: int, body: object) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": msgspec.msgpack.encode(body)})
