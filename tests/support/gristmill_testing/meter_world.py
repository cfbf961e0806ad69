"""A meter between a fake worker and a fake ledger, on a fake disk: started, crashed and asked by tests."""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from gristmill_contracts import operations as ops
from gristmill_contracts.errors import UnavailableError
from gristmill_contracts.http import (
    Assignment,
    OperationView,
    Refuse,
    StreamChunk,
    Submit,
    Submitted,
)
from gristmill_contracts.ids import CheckpointId, SessionUid, Stream, TenantName
from gristmill_contracts.units import now_us
from gristmill_meter.clocks import boottime_us
from gristmill_meter.driver import Driver
from gristmill_meter.intake import refuse_number, submit_operation
from gristmill_meter.meter import Meter
from gristmill_meter.release import poll_operation
from gristmill_meter.session import Session
from gristmill_meter.settings import MeterSettings
from gristmill_testing.fake_disk import FakeDisk
from gristmill_testing.fake_ledger import FakeLedger
from gristmill_testing.fake_worker import FakeWorker

UID = SessionUid("11111111-2222-4333-8444-555555555555")
WAIT_S = 30.0
"""No test waits this long; it only turns a hang into a failure."""

DEFAULTS: dict[str, Any] = {  # Any: keyword arguments of the settings
    "heartbeat_s": 0.05,
    "scan_s": 0.02,
    "retry_first_s": 0.002,
    "retry_last_s": 0.02,
    "drain_s": 2.0,
    "stop_wait_s": 0.5,
    "log_free_bytes_min": 0,
}


class World:
    """`start` it; `crash` it as often as you like; `close` it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = MeterSettings(
            assignments_dir=folder / "assignments", **(DEFAULTS | settings)
        )
        self.disk = FakeDisk()
        self.worker = FakeWorker()
        self.ledger = FakeLedger()
        self.meter: Meter | None = None
        self.registers_first = False
        self.boottime_us: Callable[[], int] = boottime_us
        self.clock_us: Callable[[], int] = now_us
        self.life = 0
        """Counts starts."""
        self.settings.assignments_dir.mkdir(parents=True, exist_ok=True)

    # --- life ------------------------------------------------------------------------------------

    async def start(self, **changes: Any) -> "World":
        if not (self.settings.assignments_dir / f"{UID}.json").exists():
            self.assign(**changes)
        self.meter = Meter(
            settings=self.settings,
            disk=self.disk,
            worker=self.worker,
            ledger=self.ledger,
            registers_first=self.registers_first,
            boottime_us=self.boottime_us,
            clock=self.clock_us,
        )
        await self.meter.start()
        await self.until(self._takes_calls, "the inbox was emptied")
        self.life += 1
        return self

    def _takes_calls(self) -> bool:
        """Or nothing will make it so soon."""
        if self.meter is None or UID not in self.meter.drivers:
            return True
        session = self.meter.drivers[UID].session
        waits = getattr(self.ledger, "away", False) or not session.admitted
        return session.serves or session.over or waits

    async def next_life(self, life: int) -> None:
        """Wait for a start after the given one."""
        await self.until(lambda: self.life > life, f"a start after number {life}")

    async def crash(
        self, torn: random.Random | None = None, *, worker: bool = False, process_only: bool = False
    ) -> None:
        """Lose the meter with every unsynced byte (and the worker's memory with `worker`); start again."""
        disk = self.disk.killed() if process_only else self.disk.crash(torn)
        await self.power_off()
        self.disk = disk
        if worker:
            self.worker.kill()
        await self.start()

    async def power_off(self) -> None:
        assert self.meter is not None
        self.disk.freeze()
        await self.meter.abandon()
        self.meter = None

    async def close(self) -> None:
        if self.meter is not None:
            await self.meter.abandon()
            self.meter = None

    def assign(self, uid: SessionUid = UID, **changes: Any) -> Assignment:
        fields: dict[str, Any] = {
            "uid": uid,
            "tenant": TenantName("acme"),
            "project": "",
            "name": "run",
            "model": "fake",
            "attempt": 1,
            "secret": "s3cret",
            "rank": 8,
            "alpha": 16,
            "seed": 1,
            "checkpoint_group": "checkpoints",
            "desired": "serve",
        }
        assignment = Assignment(**(fields | changes))
        path = self.settings.assignments_dir / f"{uid}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(assignment))
        temporary.rename(path)
        return assignment

    # --- looking ---------------------------------------------------------------------------------

    @property
    def driver(self) -> Driver:
        assert self.meter is not None
        if UID not in self.meter.drivers:
            raise UnavailableError(f"session {UID} is not open yet")
        return self.meter.drivers[UID]

    @property
    def session(self) -> Session:
        return self.driver.session

    async def until(self, seen: Callable[[], bool], what: str = "") -> None:
        """Wait for something that the meter does by itself."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not seen():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"never happened: {what or seen}") from None

    async def settled(self) -> None:
        """Wait until everything has ended and every usage event was acknowledged."""
        await self.until(lambda: not self.session.state.open_keys, "all operations ended")
        await self.until(
            lambda: self.session.acked_seq == self.session.state.head_seq, "all usage acknowledged"
        )

    # --- asking ----------------------------------------------------------------------------------

    async def submit(
        self,
        number: int | None,
        operation: ops.Operation,
        *,
        token: str | None = None,
        body_hash: bytes | None = None,
    ) -> Submitted:
        submit = make_submit(number, operation, token=token, body_hash=body_hash)
        async with asyncio.timeout(WAIT_S):
            return await submit_operation(self.session, submit, msgspec.msgpack.encode(operation))

    async def refuse(
        self, number: int, *, token: str | None = None, breaks_accumulation: bool = False
    ) -> Submitted:
        refusal = Refuse(
            number=number,
            client_token=token,
            message="datum 0: tokens is empty",
            breaks_accumulation=breaks_accumulation,
        )
        async with asyncio.timeout(WAIT_S):
            return await refuse_number(self.session, refusal)

    async def poll(self, stream: Stream, number: int, wait_s: float = WAIT_S) -> OperationView:
        async with asyncio.timeout(WAIT_S + 1):
            view = await poll_operation(self.session, (stream, number), wait_s)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=OperationView)

    async def train(self, number: int, operation: ops.Operation) -> OperationView:
        await self.submit(number, operation)
        return await self.poll("train", number)

    async def sample(self, operation: ops.Operation) -> OperationView:
        return await self.poll("log", (await self.submit(None, operation)).number)

    async def read_stream(
        self, operation: ops.Sample, on_chunk: Callable[[int], Awaitable[None]] | None = None
    ) -> list[StreamChunk]:
        chunks: list[StreamChunk] = []
        submit = make_submit(None, operation)
        source = await self.driver.stream(submit, msgspec.msgpack.encode(operation))
        async for chunk in source:
            chunks.append(chunk)
            if on_chunk is not None:
                await on_chunk(len(chunks))
        return chunks


def make_submit(
    number: int | None,
    operation: ops.Operation,
    *,
    token: str | None = None,
    body_hash: bytes | None = None,
) -> Submit:
    encoded = msgspec.msgpack.encode(operation)
    return Submit(
        stream="log" if number is None else "train",
        number=number,
        client_token=token,
        body_hash=body_hash or hashlib.sha256(encoded).digest(),
        operation=operation,
    )


def datum(tokens: int, first: int = 0) -> ops.Datum:
    values = [(first + at) % 1000 for at in range(tokens)]
    return ops.Datum(ops.tensor("int64", values), {"target_tokens": ops.tensor("int64", values)})


def forward_backward(tokens: int = 5, first: int = 0) -> ops.ForwardBackward:
    return ops.ForwardBackward(loss="cross_entropy", loss_config={}, datums=[datum(tokens, first)])


def forward(tokens: int = 5, first: int = 0) -> ops.Forward:
    return ops.Forward(loss="cross_entropy", loss_config={}, datums=[datum(tokens, first)])


def optim_step() -> ops.OptimStep:
    return ops.OptimStep(
        learning_rate=1e-4,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.0,
        grad_clip_norm=0.0,
        lora_plus_lr_ratio=1.0,
    )


def sample(
    prompt: int = 6, tokens: int = 8, samples: int = 1, seed: int = 3, adapter: str | None = None
) -> ops.Sample:
    return ops.Sample(
        prompt=ops.tensor("int64", list(range(prompt))),
        messages=None,
        num_samples=samples,
        params=ops.SamplingParams(
            max_tokens=tokens, temperature=1.0, top_k=-1, top_p=1.0, seed=seed, stop=None
        ),
        include_prompt_logprobs=False,
        topk_prompt_logprobs=0,
        include_text=False,
        adapter=checkpoint(adapter) if adapter else None,
    )


def compute_logprobs(prompt: int = 6) -> ops.ComputeLogprobs:
    return ops.ComputeLogprobs(
        prompt=ops.tensor("int64", list(range(prompt))), topk=0, adapter=None
    )


def checkpoint(name: str) -> ops.CheckpointRef:
    return ops.CheckpointRef(id=CheckpointId(name), path=f"somewhere/{name}", name=name)


def save_weights() -> ops.SaveWeights:
    return ops.SaveWeights(location="acme/bucket/run", merge=False, description="mine")


def save_state() -> ops.SaveState:
    return ops.SaveState(location="acme/bucket/run", description="mine")


def load_state(ref: ops.CheckpointRef) -> ops.LoadState:
    return ops.LoadState(checkpoint=ref, with_optimizer=True)
