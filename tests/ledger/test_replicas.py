"""Replicas of a ledger on one database: updates by and by, a secret file for the URL, an orderly end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pydantic import ValidationError
from sqlalchemy import text

from gristmill_contracts.http import Heartbeat, HeartbeatPage
from gristmill_ledger.database import open_engine
from gristmill_ledger.migrate import ADVISORY_LOCK, migrate
from gristmill_ledger.settings import LedgerSettings
from gristmill_testing.ledger import (
    LedgerClient,
    free_port,
    make_event,
    make_heartbeat,
    running_ledger,
)


def is_sqlite(url: str) -> bool:
    return url.startswith("sqlite")


async def two_replicas(stack: AsyncExitStack, url: str, folder: Path) -> list[LedgerClient]:
    return [
        await stack.enter_async_context(running_ledger(folder / name, database_url=url))
        for name in ("a", "b")
    ]


async def test_a_batch_may_go_to_any_replica(migrated_url: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        replicas = await two_replicas(stack, migrated_url, tmp_path)
        await replicas[0].register("s-1")
        for number in range(1, 9):
            cursor = await replicas[number % 2].post("s-1", [make_event(number)])
            assert cursor.acked_seq == number
        batch = [make_event(n) for n in range(9, 12)]
        cursors = await asyncio.gather(*(replica.post("s-1", batch) for replica in replicas * 3))
        assert {cursor.acked_seq for cursor in cursors} == {11}
        for replica in replicas:
            (row,) = (await replica.usage())["rows"]
            assert row["operations"] == 11


async def test_a_held_poll_at_one_replica_hears_of_a_heartbeat_at_the_other(
    migrated_url: str, tmp_path: Path
) -> None:
    if is_sqlite(migrated_url):
        pytest.skip("SQLite has one ledger")
    async with AsyncExitStack() as stack:
        one, other = await two_replicas(stack, migrated_url, tmp_path)
        held = asyncio.create_task(
            one.ask(HeartbeatPage, "GET", "/v1/heartbeats", after=0, wait_s="25")
        )
        async with asyncio.timeout(20):
            while not one.ledger.polls_held:
                await asyncio.sleep(0)
            await other.call("POST", "/v1/heartbeats", [make_heartbeat("s-1")])
            beats: list[Heartbeat] = (await held).heartbeats
        assert [beat.view.uid for beat in beats] == ["s-1"]


def test_a_start_waits_for_whoever_migrates_longer_than_for_other_locks(database_url: str) -> None:
    if is_sqlite(database_url):
        pytest.skip("SQLite's lock is waited for by busy_timeout_s")
    holder = open_engine(database_url, busy_timeout_s=30, connections=1)
    starter = open_engine(database_url, busy_timeout_s=0.05, connections=1)
    done = threading.Event()

    def start() -> None:
        migrate(starter)
        done.set()

    thread = threading.Thread(target=start)
    try:
        with holder.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
            thread.start()
            assert not done.wait(0.5), "it waits past its lock_timeout of 50 ms"
        assert done.wait(30)
    finally:
        thread.join(30)
        holder.dispose()
        starter.dispose()


def test_the_url_may_come_from_a_secret_file(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("postgresql://ledger:secret@db/ledger\n")
    settings = LedgerSettings(database_url_file=path)
    assert settings.url == "postgresql://ledger:secret@db/ledger"
    assert "secret" not in repr(settings)
    with pytest.raises(ValidationError, match="keep one"):
        LedgerSettings(database_url_file=path, database_url="sqlite:////x")


@pytest.mark.parametrize(
    ("name", "words"),
    [("CLUSTER_KEY_FILE", "has 5 bytes, not 32"), ("DATABASE_URL_FILE", "Could not parse")],
)
def test_a_secret_file_that_is_not_one_ends_the_start(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "secret").write_bytes(b"mysql")
    done = subprocess.run(
        [sys.executable, "-m", "gristmill_ledger"],
        env=environment(tmp_path, **{name: str(tmp_path / "secret")}),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (2, 3)
    assert words in done.stderr


def environment(data_dir: Path, **settings: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GRISTMILL_")}
    settings = {"DATA_DIR": str(data_dir), "PORT": str(free_port()), **settings}
    return kept | {f"GRISTMILL_LEDGER_{name}": value for name, value in settings.items()}


def status_of(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_after_sigterm_it_is_not_ready_and_serves_on_for_the_delay(tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "gristmill_ledger"],
            env=environment(tmp_path, PORT=str(port), SHUTDOWN_DELAY_S="2"),
            stderr=stderr,
        )
    try:
        deadline = time.monotonic() + 30
        while status_of(port, "/readyz") != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        while status_of(port, "/readyz") != 503:
            assert time.monotonic() < deadline
        assert status_of(port, "/healthz") == 200
        assert status_of(port, "/v1/usage") == 200
        assert process.wait(30) == 0
        assert status_of(port, "/healthz") == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert "ledger_closed" in events


def test_a_second_sigterm_ends_the_delay(tmp_path: Path) -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "gristmill_ledger"],
        env=environment(tmp_path, PORT=str(port), SHUTDOWN_DELAY_S="600"),
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while status_of(port, "/readyz") != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        while status_of(port, "/readyz") != 503:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
