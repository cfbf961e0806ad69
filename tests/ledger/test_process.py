"""The ledger as a real process: help, settings, health, restarts, kill -9, a clean stop."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gristmill_contracts.environment import unknown_variables
from gristmill_contracts.http import ProducerCursor, RegisterProducer
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_ledger.settings import LedgerSettings
from gristmill_testing.ledger import free_port, make_batch, make_event

START_S_MAX = 30


def environment(data_dir: Path, **settings: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GRISTMILL_")}
    settings = {"DATA_DIR": str(data_dir), **settings}
    return kept | {f"GRISTMILL_LEDGER_{name}": value for name, value in settings.items()}


class LedgerProcess:
    """`python -m gristmill_ledger` on a port of its own."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gristmill_ledger"],
            env=environment(self.data_dir, PORT=str(self.port)),
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_S_MAX
        while True:
            try:
                self.get("/readyz")
            except OSError:
                assert self.process.poll() is None, "the ledger ended at its start"
                assert time.monotonic() < deadline, "the ledger does not answer"
            else:
                return

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            body: bytes = answer.read()
            return body

    def post(self, path: str, message: object) -> ProducerCursor:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=msgspec.msgpack.encode(message)
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return msgspec.msgpack.decode(answer.read(), type=ProducerCursor)

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[LedgerProcess]:
    process = LedgerProcess(tmp_path)
    process.start()
    yield process
    if process.process.poll() is None:
        process.stop(signal.SIGKILL)


def register(ledger: LedgerProcess) -> int:
    message = RegisterProducer(
        producer="p",
        tenant=TenantName("acme"),
        session=SessionUid("s-1"),
        epoch=1,
        attempt=1,
        head_seq=0,
    )
    return ledger.post("/v1/producers", message).acked_seq


def test_sigterm_ends_the_process_with_status_0(ledger: LedgerProcess) -> None:
    assert ledger.get("/healthz") == b"ok\n"
    assert b"gristmill_ledger_commit_seconds_bucket" in ledger.get("/metrics")
    assert ledger.stop(signal.SIGTERM) == 0


def test_what_was_acknowledged_survives_kill_9(ledger: LedgerProcess) -> None:
    register(ledger)
    for round_number in range(3):
        begin = 1 + 10 * round_number
        events = [make_event(n) for n in range(begin, begin + 10)]
        batch = make_batch("p", events)
        assert ledger.post("/v1/usage/batches", batch).acked_seq == begin + 9
        ledger.stop(signal.SIGKILL)
        ledger.start()
        assert register(ledger) == begin + 9
        # The answer may have been lost: the meter sends the batch again.
        assert ledger.post("/v1/usage/batches", batch).acked_seq == begin + 9
    (row,) = msgspec.json.decode(ledger.get("/v1/usage"))["rows"]
    assert (row["operations"], row["total"]) == (30, 30 * 35)


def run(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_setting(tmp_path: Path) -> None:
    done = run("gristmill_ledger", "--help", env=environment(tmp_path))
    assert done.returncode == 0
    for name in LedgerSettings.model_fields:
        assert f"GRISTMILL_LEDGER_{name.upper()}" in done.stdout


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"PROT": "8000"}, "GRISTMILL_LEDGER_PROT"),
        ({"PORT": "99999"}, "port"),
        ({"LOG_LEVEL": "LOUD"}, "log_level"),
        ({"CHAIN_OLD_KEYS": "gristmill+12345678+AQ=="}, "chain_old_keys"),
    ],
)
def test_a_bad_setting_is_named_and_ends_the_start(
    tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    done = run("gristmill_ledger", env=environment(tmp_path, **settings))
    assert done.returncode == 2
    assert words in done.stderr


def test_a_database_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite3").write_bytes(b"this is not a database" * 100)
    done = run("gristmill_ledger", env=environment(tmp_path, PORT=str(free_port())))
    assert done.returncode == 3
    told = next(
        json.loads(line) for line in done.stderr.splitlines() if "ledger_not_opened" in line
    )
    assert "not a database" in told["reason"]
    assert told["database"].endswith("ledger.sqlite3")
    assert "can be written" in told["remedy"]


def test_the_migration_is_a_command_of_its_own(tmp_path: Path) -> None:
    assert run("gristmill_ledger.migrate", env=environment(tmp_path)).returncode == 0
    assert (tmp_path / "ledger.sqlite3").stat().st_size > 0


def test_a_misspelt_variable_is_found() -> None:
    names = {"GRISTMILL_LEDGER_PORT": "1", "GRISTMILL_LEDGER_HOTS": "x", "GRISTMILL_OTHER": "y"}
    assert unknown_variables(LedgerSettings, names) == ["GRISTMILL_LEDGER_HOTS"]
