"""Clients that behave as the SDK does: numbers of their own, pipelined submits, retries until an answer comes."""

import asyncio
import random
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from gristmill_contracts import operations as ops
from gristmill_contracts.http import TERMINAL_STATES, OperationView, Problem, Refuse, StreamChunk
from gristmill_contracts.ids import CheckpointId, SessionUid
from gristmill_testing.meter_world import (
    compute_logprobs,
    forward,
    forward_backward,
    load_state,
    make_submit,
    optim_step,
    sample,
    save_state,
)
from gristmill_testing.simulation.loop import Process
from gristmill_testing.simulation.network import SimHttp

if TYPE_CHECKING:
    from gristmill_testing.simulation.world import World

PATIENCE_S = 60.0
LOST = (aiohttp.ClientError, TimeoutError, EOFError)


class GivenUpError(Exception):
    """The session is over, and the client stops."""


@dataclass(slots=True, eq=False)
class ClientOp:
    """One operation as its client knows it."""

    uid: SessionUid
    stream: str
    number: int | None
    operation: ops.Operation
    token: str | None = None
    operation_id: str = ""
    view: OperationView | None = None
    """Its end, as it was told."""
    refusal: Problem | None = None
    gone: bool = False
    """It was told that the result is kept no longer."""
    streamed: bool = False
    tokens: list[int] = field(default_factory=list)
    """Of a stream: what the client holds."""
    final: bool = False
    """Of a stream: the last chunk came."""
    abandoned: bool = False
    refused_number: bool = False


class Client:
    """Trains and samples in one session, from one process that is never killed."""

    def __init__(self, world: "World", index: int, uid: SessionUid, name: str) -> None:
        self.world = world
        self.uid = uid
        self.name = name
        self.rng = random.Random(world.rng.random())
        self.process = Process(world.loop, f"client-{index}", f"client-{index}")
        self.http = SimHttp(world.net, self.process, timeout_s=PATIENCE_S)
        self.operations: list[ClientOp] = []
        self.next_number = 1
        self.saved: list[ops.CheckpointRef] = []
        self.stop = False
        self._pending: set[asyncio.Task[Any]] = set()

    async def run(self, steps: int) -> None:
        try:
            for _ in range(steps):
                await self._step()
            if self._pending:
                await asyncio.wait(self._pending)
            for task in self._pending:
                task.result()
        except GivenUpError:
            return

    async def _step(self) -> None:
        roll = self.rng.random()
        if roll < 0.43:
            await self._train()
        elif roll < 0.57:
            await self._follow(self._sample(), wait=self.rng.random() < 0.5)
        elif roll < 0.66:
            await self._follow(self._keyless(compute_logprobs(self.rng.randint(1, 9))), wait=True)
        elif roll < 0.76:
            await self._follow(self._stream(), wait=self.rng.random() < 0.7)
        elif roll < 0.81:
            await self._save()
        elif roll < 0.85 and self.saved:
            await self._numbered([load_state(self.rng.choice(self.saved))])
        elif roll < 0.89:
            await self._refuse()
        elif roll < 0.95:
            await self._fetch_older()
        else:
            await asyncio.sleep(self.rng.random() * 4)

    async def _follow(self, work: Any, *, wait: bool) -> None:
        task = asyncio.create_task(work)
        self._pending.add(task)
        if wait:
            await task

    # --- kinds of work ---------------------------------------------------------------------------

    async def _train(self) -> None:
        batch: list[ops.Operation] = []
        for _ in range(self.rng.randint(1, 3)):
            size = 1500 if self.rng.random() < 0.1 else self.rng.randint(1, 20)
            batch.append(forward_backward(size, self.rng.randint(0, 900)))
        batch.append(optim_step())
        if self.rng.random() < 0.3:
            batch.append(forward(self.rng.randint(1, 9)))
        await self._numbered(batch)

    async def _numbered(self, batch: list[ops.Operation]) -> list[ClientOp]:
        """Submit in a pipeline, then fetch all results."""
        made = []
        for operation in batch:
            token = f"t{self.next_number}" if self.rng.random() < 0.5 else None
            made.append(ClientOp(self.uid, "train", self.next_number, operation, token))
            self.next_number += 1
        self.operations += made
        if self.rng.random() < 0.5:
            await asyncio.gather(*(self._submit(op) for op in made))
        else:
            for op in made:
                await self._submit(op)
        await asyncio.gather(*(self._fetch(op) for op in made))
        return made

    async def _save(self) -> None:
        (op,) = await self._numbered([save_state()])
        if op.view is not None and isinstance(op.view.result, ops.SaveResult):
            found = op.view.result
            self.saved.append(
                ops.CheckpointRef(
                    id=CheckpointId(found.checkpoint_id), path=found.path, name=found.path
                )
            )

    async def _sample(self) -> None:
        size = self.rng.choice([2, 8, 30])
        await self._keyless(
            sample(
                self.rng.randint(1, 9), size, self.rng.randint(1, 2), seed=self.rng.randint(0, 99)
            )
        )

    async def _keyless(self, operation: ops.Operation) -> None:
        op = ClientOp(self.uid, "log", None, operation)
        self.operations.append(op)
        await self._submit(op)
        chance = self.rng.random()
        if chance < 0.1:
            op.abandoned = True
        elif chance < 0.25:
            await asyncio.gather(self._fetch(op), self._fetch(op))
        else:
            if chance > 0.9:
                await asyncio.sleep(self.rng.random() * 20)
            await self._fetch(op)
            if chance < 0.4:
                await self._fetch(op)

    async def _fetch_older(self) -> None:
        """Results that it has: they come again, and are the same."""
        older = [op for op in self.operations if op.view is not None and op.operation_id]
        for _ in range(6):
            for op in older[-3:]:
                await self._fetch(op)
            await asyncio.sleep(self.rng.random())

    async def _refuse(self) -> None:
        """A request that the gateway refuses: its number is closed."""
        number, self.next_number = self.next_number, self.next_number + 1
        op = ClientOp(self.uid, "train", number, forward(1), refused_number=True)
        self.operations.append(op)
        message = Refuse(number=number, client_token=None, message="bad", breaks_accumulation=False)
        await self._patiently(op, "POST", f"refuse/{self.name}", msgspec.msgpack.encode(message))

    async def _stream(self) -> None:
        """Not sent again once it began: whoever streams keeps what came."""
        operation = sample(
            self.rng.randint(1, 9), self.rng.choice([3, 9, 40]), 1, seed=self.rng.randint(0, 99)
        )
        op = ClientOp(self.uid, "log", None, operation, streamed=True)
        self.operations.append(op)
        leaves_after = self.rng.randint(1, 3) if self.rng.random() < 0.2 else 1000
        body = msgspec.msgpack.encode(make_submit(None, operation))
        url = f"http://{self._gateway()}/stream/{self.name}"
        try:
            async with self.http.request(
                "POST", url, data=body, timeout=aiohttp.ClientTimeout()
            ) as answer:
                if not answer.ok:
                    return
                while leaves_after > 0 and not op.final:
                    (size,) = struct.unpack("<I", await answer.content.readexactly(4))
                    chunk = msgspec.msgpack.decode(
                        await answer.content.readexactly(size), type=StreamChunk
                    )
                    leaves_after -= 1
                    self.world.audit.chunk(op, chunk)
                    if chunk.error is not None:
                        return
        except LOST:
            return

    # --- calls -----------------------------------------------------------------------------------

    async def _submit(self, op: ClientOp) -> None:
        submit = make_submit(op.number, op.operation, token=op.token)
        answer = await self._patiently(
            op, "POST", f"submit/{self.name}", msgspec.msgpack.encode(submit)
        )
        if answer is not None:
            op.operation_id = msgspec.msgpack.decode(answer, type=str)
            self.world.audit.accepted(op)

    async def _fetch(self, op: ClientOp) -> None:
        while op.operation_id:
            path = f"result/{self.name}/{op.stream}/{op.operation_id}"
            answer = await self._patiently(op, "GET", path, b"")
            if answer is None:
                return
            view = msgspec.msgpack.decode(answer, type=OperationView | None)
            if view is not None and view.state in TERMINAL_STATES:
                self.world.audit.held(op, view)
                return
            await asyncio.sleep(0.05 if self.world.loop.now < 100 else 0.5)

    async def fetch_again(self, op: ClientOp) -> None:
        """At the end: what was fetched once can be fetched again."""
        await self._fetch(op)

    async def _patiently(self, op: ClientOp, method: str, path: str, body: bytes) -> bytes | None:
        """Until an answer comes. None where it is a refusal, which is noted."""
        pause_s = 0.1
        while True:
            if self.stop:
                raise GivenUpError
            try:
                url = f"http://{self._gateway()}/{path}"
                async with self.http.request(method, url, data=body) as answer:
                    content = await answer.read()
                if answer.ok:
                    return content
                problem = msgspec.msgpack.decode(content, type=Problem)
                if answer.status < 500 and answer.status != 429:
                    self.world.audit.refused(op, problem)
                    return None
                if answer.status == 500:
                    self.world.audit.broken(op, problem)
            except LOST:
                pass
            await asyncio.sleep(pause_s * (0.5 + self.rng.random()))
            pause_s = min(2.0, pause_s * 2)

    def _gateway(self) -> str:
        return self.rng.choice(self.world.gateways).name
