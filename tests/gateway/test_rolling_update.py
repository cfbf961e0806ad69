"""Gateways as processes that are replaced one by one under load: no call of any client fails.

The balancer is what a Service and its endpoints are: it sends new connections to whoever was ready when
it last looked, and leaves connections that are open where they are.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from gristmill_testing.fake_meter import FakeMeter
from gristmill_testing.gateway_world import REGION, RUNTIME, FakeLedger, World, gateway_world
from gristmill_testing.loopback_server import serve

LEAVE_S = 2.0
LOOK_S = 0.3
"""How late the balancer learns of a change, at most. Below LEAVE_S, as a cluster's is."""
CLIENTS = 6
START_S_MAX = 30.0


@dataclass(slots=True)
class Replica:
    process: subprocess.Popen[str]
    port: int

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/readyz", timeout=2
            ) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def start(world: World, folder: Path, ledger_url: str) -> Replica:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    values = {
        "PORT": str(port),
        "STORE_PATH": str(folder / "store.sqlite3"),
        "ARTIFACTS_DIR": str(folder / "artifacts"),
        "OPERATION_KEY_FILE": str(folder / "operation.key"),
        "LEDGER_URL": ledger_url,
        "LEAVE_S": str(LEAVE_S),
        "SHUTDOWN_S": "5",
        "LOG_LEVEL": "WARNING",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRISTMILL")}
    process = subprocess.Popen(
        [sys.executable, "-m", "gristmill_gateway"],
        env=kept | {f"GRISTMILL_GATEWAY_{name}": value for name, value in values.items()},
        stderr=subprocess.PIPE,
        text=True,
    )
    replica = Replica(process, port)
    deadline = time.monotonic() + START_S_MAX
    while not replica.is_ready():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return replica


class Balancer:
    """Shares out connections, never requests."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self._ready = list(replicas)
        self._turn = 0
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._look, self._accept)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        self._listener.close()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._ready = [each for each in list(self.replicas) if each.is_ready()]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._turn += 1
            ready = self._ready
            server = socket.create_connection(("127.0.0.1", ready[self._turn % len(ready)].port))
            threading.Thread(target=relay, args=(client, server), daemon=True).start()


def relay(client: socket.socket, server: socket.socket) -> None:
    """Both directions, until both sides have ended."""
    with client, server:
        back = threading.Thread(target=pump, args=(server, client))
        back.start()
        pump(client, server)
        back.join()


def pump(source: socket.socket, target: socket.socket) -> None:
    """Bytes until the end of one side, which then ends the other's."""
    with contextlib.suppress(OSError):
        while content := source.recv(65536):
            target.sendall(content)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@dataclass(slots=True)
class Tally:
    calls: int = 0
    failures: list[str] = field(default_factory=list)
    statuses: set[str] = field(default_factory=set)


def work(world: World, url: str, number: int, ended: threading.Event, tally: Tally) -> None:
    """Describe, submit, fetch, on one kept connection each, without a single retry."""
    key = world.keys["acme"]
    session = boto3.Session(
        aws_access_key_id=key, aws_secret_access_key=f"secret-of-{key}", region_name=REGION
    )
    config = Config(retries={"max_attempts": 0}, read_timeout=30)
    control = session.client("sagemaker", endpoint_url=url, config=config)
    runtime = session.client(RUNTIME, endpoint_url=url, config=config)
    sequence = 1 + number * 100_000
    while not ended.is_set():
        sequence += 1
        step: Any = {"optimizerStep": {"adamParamsConfig": {"learningRate": 0.001}}}
        try:
            control.describe_training_session(TrainingSessionName="run-1")
            submitted = runtime.execute_training_operation(
                trainingSessionName="run-1", sequenceNumber=sequence, operationConfig=step
            )
            answer = runtime.get_training_operation_result(
                trainingSessionName="run-1", operationId=submitted["operationId"]
            )
            tally.statuses.add(answer["status"])
            tally.calls += 3
        except Exception as error:  # noqa: BLE001 # Whatever it is, it is a failed call.
            tally.failures.append(repr(error))
    control.close()
    runtime.close()


@pytest.fixture(name="world")
def world_fixture(tmp_path: Path) -> Iterator[World]:
    with gateway_world(tmp_path) as made:
        yield made


def test_a_rolling_update_fails_no_call(world: World, tmp_path: Path) -> None:
    ledger = FakeLedger()
    with serve(ledger.app()) as ledger_url, contextlib.ExitStack() as stack:
        replicas = [start(world, tmp_path, ledger_url) for _ in range(2)]
        stack.callback(lambda: [each.process.kill() for each in replicas])
        balancer = Balancer(replicas)
        stack.callback(balancer.close)
        ended = threading.Event()
        tallies = [Tally() for _ in range(CLIENTS)]
        threads = [
            threading.Thread(target=work, args=(world, balancer.url, number, ended, tally))
            for number, tally in enumerate(tallies)
        ]
        for thread in threads:
            thread.start()
        for _ in range(2):
            fresh = start(world, tmp_path, ledger_url)
            replicas.append(fresh)
            before = sum(tally.calls for tally in tallies)
            old = replicas[0]
            old.process.send_signal(signal.SIGTERM)
            _, err = old.process.communicate(timeout=LEAVE_S + 15)
            assert old.process.returncode == 0, err
            replicas.remove(old)
            assert sum(tally.calls for tally in tallies) > before + CLIENTS
        ended.set()
        for thread in threads:
            thread.join(40)
        failures = [failure for tally in tallies for failure in tally.failures]
        assert failures == []
        assert {status for tally in tallies for status in tally.statuses} == {"Completed"}
        for each in replicas:
            each.process.send_signal(signal.SIGTERM)
        for each in replicas:
            each.process.communicate(timeout=LEAVE_S + 15)


def test_a_gateway_that_leaves_is_not_ready_and_answers_on(world: World, tmp_path: Path) -> None:
    with serve(FakeLedger().app()) as ledger_url:
        replica = start(world, tmp_path, ledger_url)
        url = f"http://127.0.0.1:{replica.port}"
        replica.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while replica.is_ready():
            assert time.monotonic() < deadline
        with urllib.request.urlopen(f"{url}/healthz", timeout=5) as answer:
            assert answer.headers["connection"] == "close"
            assert json.loads(answer.read()) == {"status": "ok"}
        _, err = replica.process.communicate(timeout=LEAVE_S + 15)
        assert replica.process.returncode == 0, err


def test_a_held_poll_is_answered_in_progress_when_its_gateway_goes(
    world: World, tmp_path: Path
) -> None:
    with serve(FakeLedger().app()) as ledger_url:
        replica = start(world, tmp_path, ledger_url)
        tally = Tally()
        ended = threading.Event()
        meter: FakeMeter = world.meter
        meter.hold_polls = True
        url = f"http://127.0.0.1:{replica.port}"
        thread = threading.Thread(target=work, args=(world, url, 0, ended, tally))
        thread.start()
        deadline = time.monotonic() + 20
        while not meter.polls_held:
            assert time.monotonic() < deadline, tally.failures
            time.sleep(0.02)
        ended.set()
        replica.process.send_signal(signal.SIGTERM)
        _, err = replica.process.communicate(timeout=LEAVE_S + 15)
        thread.join(20)
        assert replica.process.returncode == 0, err
        assert (tally.statuses, tally.failures) == ({"InProgress"}, [])
