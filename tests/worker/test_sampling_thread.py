"""Samples and other work on the engine's one thread."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.http import Execute, Executed, OpenSession, StreamChunk
from gristmill_contracts.ids import TenantName
from gristmill_testing.local_runner import sample
from gristmill_testing.samples_together import FIRST
from gristmill_worker.app import _frames, _Relay
from gristmill_worker.engine import ENGINE_LOST, Engine
from gristmill_worker.runner import Runner
from gristmill_worker.settings import WorkerSettings
from gristmill_worker.stream import TokenStream


@pytest.fixture
def engine(llama_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    started = Engine(
        WorkerSettings(
            socket=tmp_path / "s", model_dir=llama_dir, artifacts_dir=tmp_path / "a",
            dtype="float32", device="cpu", threads=1,
        )
    )  # fmt: skip
    started.start()
    yield started
    started.stop(60)
    assert not started.thread.is_alive()


def eventually(true: Callable[[], bool]) -> bool:
    """Whether it becomes true within two minutes."""
    deadline = time.monotonic() + 120
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def opened(tmp_path: Path) -> Callable[[Runner], Any]:
    request = OpenSession(
        tenant=TenantName("acme"), rank=4, alpha=8, seed=0, state_dir=str(tmp_path / "state")
    )
    return lambda runner: runner.open(FIRST, request)


def test_training_does_not_wait_for_a_sample_to_end(engine: Engine, tmp_path: Path) -> None:
    """The piece of work is handed in by the sample's own first chunk, and runs before its last one."""
    assert eventually(lambda: engine.ready)
    engine.submit(opened(tmp_path)).result(60)
    sampled_first: list[bool] = []
    pieces: list[Future[None]] = []
    done: Future[Executed] | None = None

    def emit(chunk: StreamChunk) -> bool:
        if not pieces:
            pieces.append(engine.submit(lambda _: sampled_first.append(ended(done))))
        return True

    def ended(future: "Future[Executed] | None") -> bool:
        return future is not None and future.done()

    call = Execute(
        index=0, op_id=f"{FIRST}/log/1", operation=sample(max_tokens=200, top_k=50, seed=4)
    )
    done = engine.sample(FIRST, call, lambda r: TokenStream(r.base, call.operation, emit))
    answer = done.result(60)
    assert answer.error is None
    pieces[0].result(60)
    assert sampled_first == [False]


def test_a_sample_of_a_session_that_is_not_open_is_refused(engine: Engine) -> None:
    assert eventually(lambda: engine.ready)
    call = Execute(index=0, op_id=f"{FIRST}/log/1", operation=sample())
    with pytest.raises(NotFoundError):
        engine.sample(FIRST, call).result(60)


def test_a_reader_that_fails_ends_its_own_stream_alone(engine: Engine, tmp_path: Path) -> None:
    """Also at its last chunk: a stop may have closed the loop that it listens on."""
    assert eventually(lambda: engine.ready)
    engine.submit(opened(tmp_path)).result(60)

    def emit(chunk: StreamChunk) -> bool:
        raise RuntimeError("Event loop is closed")

    call = Execute(
        index=0, op_id=f"{FIRST}/log/1", operation=sample(max_tokens=40, top_k=50, stop=[])
    )
    beside = engine.sample(FIRST, call)
    lost = engine.sample(FIRST, call, lambda r: TokenStream(r.base, call.operation, emit))
    assert lost.result(60).error is not None
    assert beside.result(60).error is None
    assert engine.submit(lambda _: "here").result(60) == "here"


def test_sampling_that_fails_as_a_whole_is_answered_and_the_engine_goes_on(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert eventually(lambda: engine.ready)
    engine.submit(opened(tmp_path)).result(60)
    call = Execute(index=0, op_id=f"{FIRST}/log/1", operation=sample())
    assert engine.runner is not None

    def fails() -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.sampler, "turn", fails)
        failed = engine.sample(FIRST, call).result(60)
    assert failed.error is not None
    assert "RuntimeError: a bug" in failed.error.message
    assert engine.sample(FIRST, call).result(60).error is None


def test_an_engine_whose_loop_failed_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would answer nothing any more, and look ready."""
    settings = WorkerSettings(
        socket=tmp_path / "s", model_dir=tmp_path, artifacts_dir=tmp_path / "a"
    )
    started = Engine(settings)
    statuses: list[int] = []
    monkeypatch.setattr("os._exit", statuses.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)

    def fails() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(started, "_work", fails)
    started.start()
    started.thread.join(60)
    assert statuses == [ENGINE_LOST]


def test_a_stream_whose_loop_has_ended_is_told_that_nobody_reads() -> None:
    """As of one that outlasts a stop: its error must not keep the engine from its last snapshots."""
    loop = asyncio.new_event_loop()
    relay = _Relay(loop)
    chunk = StreamChunk(tokens=[], logprobs=[], text="", prompt_tokens=1)
    assert relay.emit(chunk)
    loop.close()
    assert not relay.emit(chunk)
    relay.close()


async def test_a_reader_that_leaves_is_told_to_the_engine_at_its_next_chunk() -> None:
    """The server cancels the answer of a client that is gone."""
    relay = _Relay(asyncio.get_running_loop())
    chunk = StreamChunk(tokens=[5], logprobs=[-1.0], text="a", prompt_tokens=1)
    began = asyncio.Event()

    async def answer() -> None:
        async for _ in _frames(relay, chunk):
            began.set()

    answering = asyncio.create_task(answer())
    await began.wait()
    assert relay.emit(chunk)
    answering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await answering
    assert not relay.emit(chunk)
