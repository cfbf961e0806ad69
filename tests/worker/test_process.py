"""The worker as a process: its socket, its answers, its end."""

import contextlib
import http.client
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from gristmill_contracts.errors import ConflictError, OperationFailedError, UnavailableError
from gristmill_contracts.http import (
    Execute,
    Executed,
    OpenedSession,
    OpenSession,
    Problem,
    StreamChunk,
    WorkerStatus,
)
from gristmill_contracts.ids import TenantName
from gristmill_contracts.operations import Forward, ForwardBackward, ForwardResult, SampleResult
from gristmill_testing.bare_worker import BareWorker, UnixConnection
from gristmill_testing.local_runner import datum, sample, step
from gristmill_worker.__main__ import LEFT_EARLY, main
from gristmill_worker.engine import Engine
from gristmill_worker.settings import WorkerSettings

UID = "55555555-5555-5555-5555-555555555555"
LENGTH = struct.Struct("<I")


@dataclass(slots=True)
class Running:
    process: "subprocess.Popen[bytes]"
    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / "w.sock"

    def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        with contextlib.closing(UnixConnection(self.socket)) as connection:
            connection.request(method, path, body=body)
            response = connection.getresponse()
            return response.status, response.read()


def environment(folder: Path, model: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GRISTMILL_")}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "GRISTMILL_WORKER_SOCKET": str(folder / "w.sock"),
        "GRISTMILL_WORKER_MODEL_DIR": str(model),
        "GRISTMILL_WORKER_MODEL_NAME": "tiny",
        "GRISTMILL_WORKER_ARTIFACTS_DIR": str(folder / "artifacts"),
        "GRISTMILL_WORKER_DTYPE": "float32",
        "GRISTMILL_WORKER_DEVICE": "cpu",
        "GRISTMILL_WORKER_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "kernels"),
    }


def start(folder: Path, model: Path) -> Running:
    """Started, and ready unless it ended."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gristmill_worker"],
            env=environment(folder, model),
            stderr=log,
        )
    running = Running(process, folder)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            status, _ = running.call("GET", "/readyz")
        except OSError:
            status = 0
        if status == 200:
            return running
        time.sleep(0.02)
    raise RuntimeError((folder / "log").read_text())


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, llama_dir: Path) -> Iterator[Running]:
    running = start(tmp_path_factory.mktemp("w"), llama_dir)
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(30) == 0
    assert not running.socket.exists()


@pytest.fixture
def session(worker: Running, tmp_path: Path) -> Iterator[BareWorker]:
    opened = BareWorker(worker.socket, tmp_path / "state")
    opened.open(rank=4, alpha=8)
    yield opened
    opened.close()


def encoded_sample(**options: object) -> bytes:
    call = Execute(index=0, op_id=f"{UID}/log/1", operation=sample(**options))  # type: ignore[arg-type]
    return msgspec.msgpack.encode(call)


def open_session(worker: Running, state_dir: Path) -> OpenedSession:
    request = OpenSession(
        tenant=TenantName("acme"), rank=4, alpha=8, seed=0, state_dir=str(state_dir)
    )
    status, body = worker.call("PUT", f"/v1/sessions/{UID}", msgspec.msgpack.encode(request))
    assert status == 200
    return msgspec.msgpack.decode(body, type=OpenedSession)


def test_compiled_kernels_have_a_private_folder_where_torch_was_told_to_keep_them(
    worker: Running,
) -> None:
    (folder,) = (worker.folder / "kernels").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_server_says_what_it_holds(worker: Running) -> None:
    assert worker.call("GET", "/healthz")[0] == 200
    status = msgspec.msgpack.decode(worker.call("GET", "/v1/status")[1], type=WorkerStatus)
    assert (status.model, status.ready) == ("tiny", True)
    assert (status.vocabulary_size, status.context_length) == (512, 1024)
    assert "dtype=float32" in status.fingerprint
    assert "threads=1" in status.fingerprint


def test_the_socket_is_private(worker: Running) -> None:
    assert stat.S_IMODE(worker.socket.stat().st_mode) == 0o600


def test_a_session_trains_and_samples_over_the_socket(session: BareWorker) -> None:
    operation = ForwardBackward(
        loss="cross_entropy", loss_config={}, datums=[datum([5, 6, 7]), datum([8, 9])]
    )
    losses = []
    for _ in range(3):
        result = session.execute(operation)
        assert isinstance(result, ForwardResult)
        losses.append(result.metrics["loss_sum"])
        session.execute(step())
    assert losses[0] > losses[1] > losses[2]
    sampled = session.execute(sample(num_samples=2, max_tokens=5))
    assert isinstance(sampled, SampleResult)
    assert [s.tokens.size for s in sampled.sequences] == [5, 5]


def test_an_error_of_an_operation_reaches_the_caller(session: BareWorker) -> None:
    with pytest.raises(OperationFailedError, match="without a forward_backward"):
        session.execute(step())
    session.execute(Forward(loss="cross_entropy", loss_config={}, datums=[datum([5, 6])]))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", f"/v1/sessions/{UID}/execute", b"\xc1", 400, "invalid_request"),
        ("POST", f"/v1/sessions/{UID}/execute", b"", 400, "invalid_request"),
        ("PUT", f"/v1/sessions/{UID}", b"\x80", 400, "invalid_request"),
        ("POST", "/v1/sessions/nobody/snapshot", b"", 404, "not_found"),
        ("POST", "/v1/sessions/nobody/execute", encoded_sample(), 404, "not_found"),
        ("POST", "/v1/sessions/nobody/stream", encoded_sample(), 404, "not_found"),
    ],
)
def test_requests_that_reach_no_session_are_problems(  # noqa: PLR0917
    worker: Running, method: str, path: str, body: bytes, status: int, code: str
) -> None:
    found, answer = worker.call(method, path, body)
    assert found == status
    assert msgspec.msgpack.decode(answer, type=Problem).code == code


def test_an_index_out_of_turn_is_a_409(session: BareWorker) -> None:
    session._index = 7
    with pytest.raises(ConflictError, match="index 8 was sent but 1 is next"):
        session.execute(step())


def chunks_of(response: http.client.HTTPResponse) -> Iterator[StreamChunk]:
    while head := response.read(LENGTH.size):
        yield msgspec.msgpack.decode(response.read(*LENGTH.unpack(head)), type=StreamChunk)


def stream(worker: Running, **options: object) -> tuple[UnixConnection, http.client.HTTPResponse]:
    connection = UnixConnection(worker.socket)
    connection.request("POST", f"/v1/sessions/{UID}/stream", body=encoded_sample(**options))
    return connection, connection.getresponse()


def test_a_stream_is_the_sample_in_chunks(worker: Running, tmp_path: Path) -> None:
    open_session(worker, tmp_path)
    connection, response = stream(worker, max_tokens=20, include_text=True)
    chunks = list(chunks_of(response))
    connection.close()
    body = encoded_sample(max_tokens=20, include_text=True)
    _, answer = worker.call("POST", f"/v1/sessions/{UID}/execute", body)
    whole = msgspec.msgpack.decode(answer, type=Executed).result
    assert isinstance(whole, SampleResult)
    (sequence,) = whole.sequences
    assert [t for chunk in chunks for t in chunk.tokens] == sequence.tokens.tolist()
    logprobs = [p for chunk in chunks for p in chunk.logprobs]
    assert logprobs == pytest.approx(sequence.logprobs.tolist(), abs=1e-6)
    assert "".join(chunk.text for chunk in chunks) == sequence.text
    assert [len(chunk.tokens) for chunk in chunks[:-1]] == [8] * (len(chunks) - 1)
    assert [chunk.final for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].final == sequence.stop_reason
    assert {chunk.prompt_tokens for chunk in chunks} == {4}


def test_a_stream_that_cannot_run_ends_with_its_error(worker: Running, tmp_path: Path) -> None:
    open_session(worker, tmp_path)
    connection, response = stream(worker, prompt=[5, 600])
    (chunk,) = chunks_of(response)
    connection.close()
    assert chunk.error is not None
    assert chunk.error.code == "invalid_request"
    connection, response = stream(worker, num_samples=2)
    assert response.status == 400
    assert msgspec.msgpack.decode(response.read(), type=Problem).code == "invalid_request"
    connection.close()


def test_a_reader_that_leaves_ends_the_sampling(worker: Running, tmp_path: Path) -> None:
    """A thousand tokens were asked for; the metrics show that far fewer were drawn."""
    open_session(worker, tmp_path)

    def sampled() -> float:
        text = worker.call("GET", "/metrics")[1].decode()
        name = 'gristmill_worker_tokens_total{replay="false",token_type="sample"}'
        return sum(float(x.split()[-1]) for x in text.splitlines() if x.startswith(name))

    before = sampled()
    connection, response = stream(worker, max_tokens=1000, top_k=40)
    assert next(chunks_of(response)).tokens
    response.close()
    connection.close()
    assert eventually(lambda: sampled() > before)  # it is counted once it has ended
    assert 8 <= sampled() - before < 900


def test_a_killed_worker_comes_back_from_its_snapshot(
    worker: Running, llama_dir: Path, tmp_path: Path
) -> None:
    """The new one takes over the socket file of the killed one."""
    session = BareWorker(worker.socket, tmp_path / "state")
    session.open(rank=4, alpha=8)
    operation = ForwardBackward(loss="cross_entropy", loss_config={}, datums=[datum([5, 6, 7])])
    session.execute(operation)
    path = f"/v1/sessions/{session._uid}"
    assert worker.call("POST", f"{path}/snapshot")[0] == 200
    worker.process.kill()
    worker.process.wait()
    session._connection.close()

    worker.process = start(worker.folder, llama_dir).process
    request = OpenSession(
        tenant=TenantName("bench"), rank=4, alpha=8, seed=1, state_dir=str(tmp_path / "state")
    )
    _, body = worker.call("PUT", path, msgspec.msgpack.encode(request))
    assert msgspec.msgpack.decode(body, type=OpenedSession).applied == 1


def test_a_stopped_worker_loses_nothing_and_needs_no_replay(
    worker: Running, llama_dir: Path, tmp_path: Path
) -> None:
    """SIGTERM: what runs ends, then every session has its snapshot."""
    session = BareWorker(worker.socket, tmp_path / "state")
    session.open(rank=4, alpha=8)
    operation = ForwardBackward(loss="cross_entropy", loss_config={}, datums=[datum([5, 6, 7])])
    session.execute(operation)
    session.execute(step())
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(30) == 0
    session.hang_up()
    worker.process = start(worker.folder, llama_dir).process
    session.open(rank=4, alpha=8)
    assert session.applied == 2
    session.close()


def test_a_worker_that_is_stopped_while_it_loads_torch_ends_at_once(
    tmp_path: Path, llama_dir: Path
) -> None:
    """With its own exit status, so not by a default action, which process 1 of a container lacks."""
    command = [sys.executable, "-X", "importtime", "-m", "gristmill_worker"]
    process = subprocess.Popen(
        command, env=environment(tmp_path, llama_dir), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "torch" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == LEFT_EARLY


def test_a_serving_worker_has_no_network(worker: Running) -> None:
    """Every thread of the real process is under a seccomp filter (mode 2); see test_sandbox."""
    threads = Path(f"/proc/{worker.process.pid}/task").iterdir()
    assert all("Seccomp:\t2" in (each / "status").read_text() for each in threads)


def test_a_model_that_cannot_be_loaded_is_told_and_tried_again(
    tmp_path: Path, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_worker.engine.LOAD_RETRY_S", 0.01)
    folder = tmp_path / "model"
    engine = Engine(
        WorkerSettings(
            socket=tmp_path / "s",
            model_dir=folder,
            artifacts_dir=tmp_path / "a",
            dtype="float32",
            device="cpu",
            threads=1,
        )
    )
    with pytest.raises(UnavailableError, match="still loading"):
        engine.submit(lambda runner: runner.applied())
    engine.start()
    assert eventually(lambda: engine.failure != "")
    with pytest.raises(UnavailableError, match="not a prepared model"):
        engine.submit(lambda runner: runner.applied())
    assert not engine.ready
    assert not engine.status().ready
    folder.symlink_to(llama_dir)
    assert eventually(lambda: engine.ready)
    assert engine.submit(lambda runner: runner.applied()).result(30) == {}
    engine.stop(30)
    assert not engine.thread.is_alive()


def eventually(true: Callable[[], bool]) -> bool:
    """Whether it becomes true within a minute."""
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_bad_settings_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("GRISTMILL_WORKER_SOKET", "x")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "GRISTMILL_WORKER_SOKET" in capsys.readouterr().err
    monkeypatch.delenv("GRISTMILL_WORKER_SOKET")
    monkeypatch.setenv("GRISTMILL_WORKER_SOCKET", str(tmp_path / ("s" * 100)))
    monkeypatch.setenv("GRISTMILL_WORKER_MODEL_DIR", str(tmp_path))
    with pytest.raises(SystemExit):
        main([])
    assert "longer than 107" in capsys.readouterr().err


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in ("SOCKET", "MODEL_DIR", "ARTIFACTS_DIR", "DTYPE", "THREADS", "TOKEN_BUDGET"):
        assert f"GRISTMILL_WORKER_{name}" in text
