"""A worker in memory: a deterministic state machine whose weights are integers.

Every train operation changes the numbers in a way that depends on all before, so that a lost, doubled
or reordered operation shows in every later result. Snapshots survive `kill`, live state does not.
"""

import asyncio
import hashlib
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from gristmill_contracts import operations as ops
from gristmill_contracts.errors import ConflictError, NotFoundError
from gristmill_contracts.http import (
    Execute,
    Executed,
    OpenedSession,
    OpenSession,
    Problem,
    Snapshotted,
    StreamChunk,
    WorkerStatus,
)
from gristmill_contracts.ids import checkpoint_id, parse_op_id
from gristmill_meter.artifacts import checkpoint_of
from gristmill_meter.ports import ExecuteCall, WorkerLostError
from gristmill_worker.tallies import Book

PRIME = 2_147_483_647
_operations = msgspec.msgpack.Decoder(ops.Operation)


@dataclass(slots=True, frozen=True)
class Weights:
    """The whole state: what was stepped, what is accumulated, and the count of operations applied."""

    weights: int = 7
    gradient: int = 0
    steps: int = 0
    applied: int = 0

    @property
    def checksum(self) -> int:
        return (self.weights * 31 + self.steps) % PRIME


@dataclass(slots=True)
class Live:
    state: Weights
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class FakeWorker:
    """Implements `gristmill_meter.ports.Worker`.

    `fail[op_id]`: problems to answer with, one a run. `before` and `after` run around every execution:
    a test waits, kills or crashes there. `runs` counts executions that were no replay, by op_id.
    """

    boot: int = 1
    down: bool = False
    sessions: dict[str, Live] = field(default_factory=dict)
    snapshots: dict[str, list[Weights]] = field(default_factory=dict)
    book: Book = field(default_factory=Book)
    saved: dict[str, Weights] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)
    fail: dict[str, list[Problem]] = field(default_factory=dict)
    before: Callable[[str, ops.Operation], object] = lambda op_id, operation: None
    after: Callable[[str, ops.Operation], object] = lambda op_id, operation: None
    before_chunk: Callable[[int], object] = lambda number: None
    at_once: int = 0
    at_once_max: int = 0
    chunk_tokens: int = 4
    cached_tokens: int = 0
    """Of every stream's prompt: found in the prefix cache."""
    streams_closed: int = 0
    fingerprint: str = "fake-1"
    replay_noise: int = 0
    on_replay: Callable[[str], None] = lambda op_id: None
    on_snapshot: Callable[[], object] = lambda: None
    refuse_snapshots: bool = False
    artifacts: Path | None = None
    """Folder where checkpoints are written and read; None = they are only in memory."""
    read: list[bytes] = field(default_factory=list)
    """The weights of checkpoints, as they were found in that folder."""

    # --- the port --------------------------------------------------------------------------------

    async def status(self) -> WorkerStatus:
        self._alive("status")
        return WorkerStatus(
            boot_id=f"boot-{self.boot}",
            model="fake",
            ready=True,
            fingerprint=self.fingerprint,
            vocabulary_size=1000,
            context_length=4096,
            sessions={uid: live.state.applied for uid, live in self.sessions.items()},
            tallies=self.book.told(),
        )

    async def open_session(self, uid: str, request: OpenSession) -> OpenedSession:
        self._alive("open_session")
        live = self.sessions.get(uid)
        limit = request.applied_max
        if live is not None:
            async with live.lock:
                ahead = limit is not None and live.state.applied > limit
        if live is None or ahead:
            kept = [s for s in self.snapshots.get(uid, []) if limit is None or s.applied <= limit]
            live = self.sessions[uid] = Live(kept[-1] if kept else Weights())
        return OpenedSession(
            applied=live.state.applied,
            rank=request.rank,
            alpha=request.alpha,
            fingerprint=self.fingerprint,
            boot_id=f"boot-{self.boot}",
            checksum=live.state.checksum,
            opening=self.book.opened(uid),
        )

    async def execute(self, uid: str, call: ExecuteCall) -> Executed:
        self._alive("execute")
        boot = self.boot
        live = self._live(uid)
        if call.index == 0:
            return await self._execute(uid, live, call, boot)
        async with live.lock:
            if call.index != live.state.applied + 1:
                raise ConflictError(f"index {call.index} where {live.state.applied + 1} is next")
            return await self._execute(uid, live, call, boot)

    async def stream(self, uid: str, call: ExecuteCall) -> AsyncGenerator[StreamChunk, None]:
        self._alive("stream")
        boot = self.boot
        self._live(uid)
        operation = _operations.decode(call.operation)
        assert isinstance(operation, ops.Sample)
        self._read(operation.adapter)
        self.runs[call.op_id] += 1
        tokens = sample_tokens(operation, 0)
        prompt = prompt_tokens(operation)
        try:
            for at in range(0, len(tokens), self.chunk_tokens):
                await _maybe(self.before_chunk(at // self.chunk_tokens))
                self._same_boot(boot)
                part = tokens[at : at + self.chunk_tokens]
                last = at + self.chunk_tokens >= len(tokens)
                if last:
                    self.book.ran(
                        uid, _counted(call, operation), _sampled(operation), 1000, stream=True
                    )
                yield StreamChunk(
                    tokens=part,
                    logprobs=[-1.0] * len(part),
                    text="x" * len(part),
                    prompt_tokens=prompt,
                    cached_tokens=self.cached_tokens,
                    final="length" if last else None,
                )
        finally:
            self.streams_closed += 1

    async def snapshot(self, uid: str) -> Snapshotted:
        self._alive("snapshot")
        if self.refuse_snapshots:
            raise NotFoundError("snapshots are refused")
        live = self._live(uid)
        boot = self.boot
        async with live.lock:
            await _maybe(self.on_snapshot())
            self._same_boot(boot)
            self.snapshots[uid] = [*self.snapshots.get(uid, []), live.state][-2:]
            return Snapshotted(applied=live.state.applied, size_bytes=32)

    async def close_session(self, uid: str) -> None:
        self._alive("close_session")
        self.book.closed(uid)
        self.sessions.pop(uid, None)

    # --- faults ----------------------------------------------------------------------------------

    def kill(self) -> None:
        """kill -9 and restart: live state is gone, and so are the answers under way."""
        self.sessions.clear()
        self.book = Book()
        self.boot += 1

    def _alive(self, call: str) -> None:
        self.calls[call] += 1
        if self.down:
            raise WorkerLostError("the fake worker is down")

    def _same_boot(self, boot: int) -> None:
        if self.down or boot != self.boot:
            raise WorkerLostError("the fake worker died")

    def _live(self, uid: str) -> Live:
        if uid not in self.sessions:
            raise NotFoundError(f"session {uid} is not open")
        return self.sessions[uid]

    # --- running ---------------------------------------------------------------------------------

    async def _execute(self, uid: str, live: Live, call: ExecuteCall, boot: int) -> Executed:
        # The real worker reads the whole message before it looks at `skip`.
        operation = _operations.decode(call.operation)
        if call.skip:
            live.state = replace(live.state, applied=call.index)
            self.replays[call.op_id] += 1
            self.on_replay(call.op_id)
            self._same_boot(boot)
            return self._executed(None, None, live.state)
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        try:
            if call.replay:
                self.replays[call.op_id] += 1
                self.on_replay(call.op_id)
            else:
                await _maybe(self.before(call.op_id, operation))
            self._same_boot(boot)
            executed = self._apply(live, call, operation)
            self.book.ran(uid, _counted(call, operation), executed.result, executed.wall_us)
            if not call.replay:
                await _maybe(self.after(call.op_id, operation))
            self._same_boot(boot)
        finally:
            self.at_once -= 1
        return executed

    def _apply(self, live: Live, call: ExecuteCall, operation: ops.Operation) -> Executed:
        if not call.replay:
            self.runs[call.op_id] += 1
            self.order.append(call.op_id)
        problems = self.fail.get(call.op_id)
        if problems and not call.replay:
            if call.index:
                live.state = replace(live.state, applied=call.index)
            return self._executed(None, problems.pop(0), live.state)
        try:
            self._read(checkpoint_of(operation))
        except NotFoundError as error:
            problem = Problem(code=error.code, message=error.message)
            if call.index:
                live.state = replace(live.state, applied=call.index)
            return self._executed(None, problem, live.state)
        state, result = self._compute(live.state, call, operation)
        if call.index:
            live.state = replace(state, applied=call.index)
        stepped = isinstance(operation, ops.OptimStep | ops.LoadState)
        return self._executed(result, None, live.state, checksum=stepped)

    def _read(self, ref: ops.CheckpointRef | None) -> None:
        """With a folder of artifacts a checkpoint must be there, and whole."""
        if self.artifacts is None or ref is None:
            return
        folder = self.artifacts / ref.path
        if not (folder / "manifest.json").is_file():
            raise NotFoundError(f"checkpoint {ref.name} is gone; save it again")
        self.read.append((folder / "weights").read_bytes())

    def _compute(  # noqa: PLR0911 - one return for each kind
        self, state: Weights, call: ExecuteCall, operation: ops.Operation
    ) -> tuple[Weights, ops.Result]:
        match operation:
            case ops.Forward() | ops.ForwardBackward():
                seed = sum(zlib.crc32(datum.tokens.data) for datum in operation.datums)
                loss = (state.weights * 13 + seed) % PRIME
                if isinstance(operation, ops.ForwardBackward):
                    noise = self.replay_noise if call.replay else 0
                    gradient = (state.gradient * 5 + loss + noise) % PRIME
                    state = replace(state, gradient=gradient)
                outputs = [
                    {"logprobs": ops.tensor("float32", [-1.0] * datum.tokens.size)}
                    for datum in operation.datums
                ]
                return state, ops.ForwardResult(outputs=outputs, metrics={"loss_sum": float(loss)})
            case ops.OptimStep():
                weights = (state.weights * 3 + state.gradient + 1) % PRIME
                state = replace(state, weights=weights, gradient=0, steps=state.steps + 1)
                metrics = {"step": float(state.steps), "weights": float(weights)}
                return state, ops.OptimStepResult(metrics=metrics)
            case ops.SaveWeights() | ops.SaveState():
                return state, self._save(state, call, operation)
            case ops.LoadState():
                loaded = self.saved[operation.checkpoint.id]
                return replace(loaded, gradient=0), ops.LoadStateResult(rank=8, alpha=16)
            case ops.LoadWeightsForSampling():
                return state, ops.Empty()
            case ops.ComputeLogprobs():
                logprobs = ops.tensor("float32", [-1.0] * operation.prompt.size)
                return state, ops.ComputeLogprobsResult(logprobs=logprobs, topk=None)
        return state, _sampled(operation)

    def _save(
        self, state: Weights, call: ExecuteCall, operation: ops.SaveWeights | ops.SaveState
    ) -> ops.SaveResult:
        identity = checkpoint_id(parse_op_id(call.op_id))
        digest = f"{state.checksum:064x}"
        if not call.replay:
            self.saved[identity] = state
            if self.artifacts is not None:
                folder = self.artifacts / operation.location / identity
                digest = write_checkpoint(folder, f"{state.checksum:064x}".encode())
        return ops.SaveResult(
            checkpoint_id=identity,
            kind="weights" if isinstance(operation, ops.SaveWeights) else "state",
            path=f"{operation.location}/{identity}",
            rank=8,
            alpha=16,
            size_bytes=64,
            manifest_sha256=digest,
        )

    def _executed(
        self,
        result: ops.Result | None,
        error: Problem | None,
        state: Weights,
        *,
        checksum: bool = False,
    ) -> Executed:
        return Executed(
            result=result,
            error=error,
            checksum=state.checksum if checksum else None,
            fingerprint=self.fingerprint,
            wall_us=1000,
        )


def _sampled(operation: ops.Sample) -> ops.SampleResult:
    sequences = [
        ops.SampledSequence(
            tokens=ops.tensor("int64", sample_tokens(operation, i)),
            logprobs=ops.tensor("float32", [-1.0] * operation.params.max_tokens),
            stop_reason="length",
            text=None,
        )
        for i in range(operation.num_samples)
    ]
    return ops.SampleResult(
        sequences=sequences,
        prompt_logprobs=None,
        topk_prompt_logprobs=None,
        prompt_tokens=prompt_tokens(operation),
    )


def _counted(call: ExecuteCall, operation: ops.Operation) -> Execute:
    """The call as the real worker reads it."""
    return Execute(
        index=call.index,
        op_id=call.op_id,
        operation=operation,
        replay=call.replay,
        opening=call.opening,
    )


def write_checkpoint(folder: Path, weights: bytes) -> str:
    """A checkpoint as the worker writes it. Returns the SHA-256 of its manifest."""
    contents = {"weights": weights, "merged/model": weights * 2}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    facts = {
        name: {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    manifest = msgspec.json.encode({"format": 1, "kind": "weights", "files": facts})
    (folder / "manifest.json").write_bytes(manifest)
    return hashlib.sha256(manifest).hexdigest()


def sample_tokens(operation: ops.Sample, i: int) -> list[int]:
    """The tokens of sample i: a pure function of request and seed, as many as allowed."""
    base = operation.params.seed * 31 + i * 7
    return [(base + step) % 1000 for step in range(operation.params.max_tokens)]


def prompt_tokens(operation: ops.Sample) -> int:
    if operation.prompt is not None:
        return operation.prompt.size
    return sum(len(message.content) for message in operation.messages or [])


async def _maybe(value: object) -> None:
    if asyncio.iscoroutine(value) or isinstance(value, asyncio.Future):
        await value
