"""A session in a running worker process, driven over its unix socket without meter and gateway."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec

from gristmill_contracts.errors import error_from
from gristmill_contracts.http import (
    CONTENT_TYPE,
    Execute,
    Executed,
    OpenedSession,
    OpenSession,
    Problem,
    Snapshotted,
    WorkerStatus,
)
from gristmill_contracts.ids import TenantName
from gristmill_contracts.operations import (
    ComputeLogprobs,
    LoadWeightsForSampling,
    Operation,
    Result,
    Sample,
)


class UnixConnection(http.client.HTTPConnection):
    """HTTP/1.1 over a unix socket."""

    def __init__(self, path: Path, timeout_s: float = 300.0) -> None:
        super().__init__("worker", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class BareWorker:
    """One session. `last_ms` is the round trip of the newest call, encoding not included."""

    def __init__(self, socket_path: Path, state_dir: Path, pid: int = 0) -> None:
        self.last_ms = 0.0
        self.pid = pid
        self._connection = UnixConnection(socket_path)
        self._uid = str(uuid.uuid4())
        self._state_dir = state_dir
        self._index = 0

    @property
    def applied(self) -> int:
        """How many train operations the session holds."""
        return self._index

    def hang_up(self) -> None:
        """Close the connection; the worker keeps the session."""
        self._connection.close()

    def status(self) -> WorkerStatus:
        return msgspec.msgpack.decode(self._send("GET", "/v1/status", b""), type=WorkerStatus)

    def open(self, rank: int, alpha: int) -> None:
        message = OpenSession(
            tenant=TenantName("bench"),
            rank=rank,
            alpha=alpha,
            seed=1,
            state_dir=str(self._state_dir),
        )
        answer = self._send("PUT", f"/v1/sessions/{self._uid}", msgspec.msgpack.encode(message))
        self._index = msgspec.msgpack.decode(answer, type=OpenedSession).applied

    def close(self) -> None:
        self._send("DELETE", f"/v1/sessions/{self._uid}", b"")
        self._connection.close()

    def execute(self, operation: Operation) -> Result:
        """Run one operation. Raises the error that the worker reports."""
        executed = self.executed(operation)
        if executed.error is not None:
            raise error_from(executed.error.code, executed.error.message)
        assert executed.result is not None
        return executed.result

    def executed(
        self,
        operation: Operation,
        *,
        replay: bool = False,
        expected_checksum: int | None = None,
        expected_fingerprint: str | None = None,
    ) -> Executed:
        """The worker's whole answer."""
        sampling = isinstance(operation, Sample | ComputeLogprobs | LoadWeightsForSampling)
        self._index += 0 if sampling else 1
        index = 0 if sampling else self._index
        stream = "log" if sampling else "train"
        message = Execute(
            index=index, op_id=f"{self._uid}/{stream}/{self._index}", operation=operation,
            replay=replay, expected_checksum=expected_checksum,
            expected_fingerprint=expected_fingerprint,
        )  # fmt: skip
        body = msgspec.msgpack.encode(message)
        answer = self._send("POST", f"/v1/sessions/{self._uid}/execute", body)
        return msgspec.msgpack.decode(answer, type=Executed)

    def snapshot(self) -> Snapshotted:
        """Returns once it is durable."""
        answer = self._send("POST", f"/v1/sessions/{self._uid}/snapshot", b"")
        return msgspec.msgpack.decode(answer, type=Snapshotted)

    def _send(self, method: str, path: str, body: bytes) -> bytes:
        started = time.perf_counter()
        try:
            self._connection.request(
                method, path, body=body, headers={"Content-Type": CONTENT_TYPE}
            )
            response = self._connection.getresponse()
            answer = response.read()
        except OSError:
            self._connection.close()
            raise
        self.last_ms = (time.perf_counter() - started) * 1000
        if response.status >= 400:
            problem = msgspec.msgpack.decode(answer, type=Problem)
            raise error_from(problem.code, problem.message)
        return answer


@contextmanager
def running_worker(
    folder: Path, model: Path, *, dtype: str, threads: int,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[BareWorker]:  # fmt: skip
    """A worker process of its own on a prepared model; no session is open yet."""
    path = folder / "worker.sock"
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GRISTMILL_")},
        "GRISTMILL_WORKER_SOCKET": str(path),
        "GRISTMILL_WORKER_MODEL_DIR": str(model),
        "GRISTMILL_WORKER_ARTIFACTS_DIR": str(folder / "artifacts"),
        "GRISTMILL_WORKER_DTYPE": dtype,
        "GRISTMILL_WORKER_THREADS": str(threads),
        "GRISTMILL_WORKER_LOG_LEVEL": "WARNING",
        **environment,
    }
    process = subprocess.Popen([sys.executable, "-m", "gristmill_worker"], env=variables)
    try:
        worker = BareWorker(path, folder / "state", process.pid)
        _wait_until_ready(process, worker)
        yield worker
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", worker: BareWorker, timeout_s: float = 120.0
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the worker ended with exit code {process.returncode}")
        try:
            if worker.status().ready:
                return
        except OSError:
            pass  # not listening yet
        time.sleep(0.1)
    raise RuntimeError(f"the worker was not ready within {timeout_s:.0f} s")
