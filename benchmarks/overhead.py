"""What gateway and meter add to an operation, over the bare worker, with an fsync probe beside it.

    PYTHONPATH=tests/support python benchmarks/overhead.py [--operations 300] [--data-dir DIR]

One `gristmill up` on a tiny model. Rounds alternate between three things, so that a busy machine
hurts them alike: a forward of one 2-token datum through the public wire (signed submit and signed
poll; the signing itself is not timed), the same forward sent to the same worker process over its
unix socket, and a 512-byte append + fsync in the data folder. Floor: overhead p50 <= 10 ms; goal 2 ms.
"""

import argparse
import http.client
import json
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gristmill_contracts.operations import Datum, Forward, tensor
from gristmill_testing.bare_worker import BareWorker
from gristmill_testing.instance import running_gristmill
from gristmill_testing.measuring import Timings
from gristmill_testing.raw_wire import create_session, datum, forward, raw_clients
from gristmill_testing.tiny_models import build_tiny_llama

TOKENS = [7, 11]
WARM_UP = 20
ROUND = 25
FLOOR_MS = 10.0
GOAL_MS = 2.0


class SignedConnection:
    """One kept-alive connection to the gateway that signs before the clock starts."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._url = environment["SAGEMAKER_TRAINING_SESSION_RUNTIME_ENDPOINT"]
        self._signer = SigV4Auth(
            Credentials(environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]),
            "sagemaker",
            environment["AWS_REGION"],
        )
        parts = urlsplit(self._url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[dict[str, Any], float]:
        """The decoded answer and the milliseconds of its round trip."""
        data = b"" if body is None else json.dumps(body).encode()
        request = AWSRequest(
            method=method,
            url=self._url + path,
            data=data,
            headers={"Content-Type": "application/json"},
        )
        self._signer.add_auth(request)
        headers = dict(request.headers.items())
        started = time.perf_counter()
        self._connection.request(method, path, body=data, headers=headers)
        answer = self._connection.getresponse().read()
        elapsed_ms = (time.perf_counter() - started) * 1000
        return json.loads(answer), elapsed_ms


def bare_forward(worker: BareWorker) -> float:
    """The same forward as through the wire. Milliseconds on the unix socket."""
    inputs = {"target_tokens": tensor("int64", TOKENS), "weights": tensor("float32", [1.0, 1.0])}
    datums = [Datum(tensor("int64", TOKENS), inputs)]
    worker.execute(Forward(loss="cross_entropy", loss_config={}, datums=datums))
    return worker.last_ms


def through_the_wire(connection: SignedConnection, session: str, number: int) -> float:
    """One forward: signed submit, signed poll until it is done. Milliseconds on the wire."""
    path = f"/v1/training-sessions/{session}/operations"
    body = {
        "sequenceNumber": number,
        "clientToken": str(uuid.uuid4()),
        "operationConfig": forward(datum(TOKENS)),
    }
    answer, total_ms = connection.call("POST", path, body)
    status = "Pending"
    while status in {"Pending", "InProgress"}:
        result, elapsed_ms = connection.call("GET", f"{path}/{answer['operationId']}", None)
        status = result["status"]
        total_ms += elapsed_ms
    if status != "Completed":
        raise SystemExit(f"the operation ended {status}: {result}")
    return total_ms


def cpu_ms(pid: int) -> float:
    """Processor time that a process has used so far: what a busy machine does not distort."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def fsync_once(file: int) -> float:
    started = time.perf_counter()
    os.write(file, b"x" * 512)
    os.fsync(file)
    return (time.perf_counter() - started) * 1000


def measure(folder: Path, operations: int) -> tuple[list[Timings], dict[str, float]]:
    """Timings of the three things, and the processor time of each part for one operation."""
    wire, bare, disk = (
        Timings("gateway + meter + worker", ROUND),
        Timings("bare worker (unix socket)", ROUND),
        Timings("512 B append + fsync", ROUND),
    )
    model = build_tiny_llama(folder / "model")
    with running_gristmill(folder / "data", model=model) as instance:
        session = create_session(raw_clients(instance.environment), instance.model)
        connection = SignedConnection(instance.environment)
        numbers = iter(range(1, 10**9))
        for _ in range(WARM_UP):
            through_the_wire(connection, session.name, next(numbers))
        worker = BareWorker(instance.worker_socket, folder / "bare")
        worker.open(rank=4, alpha=8)
        for _ in range(WARM_UP):
            bare_forward(worker)
        pids = {part: instance.pid_of(part) for part in ("gateway", "meter", "worker")}
        cpu = dict.fromkeys(pids, 0.0)
        file = os.open(folder / "data" / "fsync-probe", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        while len(wire.values_ms) < operations:
            before = {part: cpu_ms(pid) for part, pid in pids.items()}
            for _ in range(ROUND):
                wire.values_ms.append(through_the_wire(connection, session.name, next(numbers)))
            for part, pid in pids.items():
                cpu[part] += cpu_ms(pid) - before[part]
            bare.values_ms.extend(bare_forward(worker) for _ in range(ROUND))
            disk.values_ms.extend(fsync_once(file) for _ in range(ROUND))
        os.close(file)
        worker.close()
        session.stop()
    return [wire, bare, disk], {part: used / len(wire.values_ms) for part, used in cpu.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=300)
    parser.add_argument(
        "--data-dir", type=Path, help="where the log lies; default: a temporary folder"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.data_dir) as folder:
        (wire, bare, disk), cpu = measure(Path(folder), arguments.operations)
    print(f"{'milliseconds':<34} {'p50':>9} {'p90':>9} {'p99':>9} {'quietest':>9} {'n':>7}")
    for timings in (wire, bare, disk):
        print(timings.row(34))
    print(
        "processor time of one operation: "
        + ", ".join(f"{part} {used:.2f} ms" for part, used in cpu.items())
    )
    overhead = {share: wire.quantile(share) - bare.quantile(share) for share in (0.5, 0.99)}
    print(
        f"overhead of gateway + meter: p50 {overhead[0.5]:.2f} ms, p99 {overhead[0.99]:.2f} ms, "
        f"p50 of the quietest rounds {wire.quietest - bare.quietest:.2f} ms"
    )
    verdict = (
        "within the goal"
        if overhead[0.5] <= GOAL_MS
        else "within the floor"
        if overhead[0.5] <= FLOOR_MS
        else "ABOVE THE FLOOR"
    )
    print(f"floor {FLOOR_MS:.0f} ms, goal {GOAL_MS:.0f} ms at p50: {verdict}")


if __name__ == "__main__":
    main()
