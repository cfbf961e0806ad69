"""The meter as a real process, between a worker and a ledger that speak HTTP."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest

from gristmill_contracts.http import Problem, SessionView, StreamChunk
from gristmill_contracts.usage import Counts
from gristmill_testing.meter_process import BASE, Process, served
from gristmill_testing.meter_world import UID, forward_backward, make_submit, optim_step, sample


@pytest.fixture
async def process(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Process]:
    async with served(tmp_path_factory.mktemp("m")) as process:
        yield process


async def test_a_run_goes_on_after_kill_9_and_is_billed_once(process: Process) -> None:
    await process.submit(1, forward_backward(tokens=5))
    await process.submit(2, optim_step())
    before = await process.poll("train", 2)
    assert await process.stop(signal.SIGKILL) == -signal.SIGKILL
    await process.start()
    assert await process.poll("train", 2) == before
    again = await process.submit(2, optim_step())
    assert again.duplicate
    number = (await process.submit(None, sample(prompt=4, tokens=20, samples=2))).number
    view = await process.poll("log", number)
    assert view.counts == Counts(prefill=4, cached_prefill=4, sample=40)
    await process.acknowledged(3)
    assert process.ledger.billed() == Counts(train=5, prefill=4, cached_prefill=4, sample=40)


async def test_sigterm_ends_with_status_0_and_a_snapshot(process: Process) -> None:
    await process.submit(1, forward_backward())
    await process.poll("train", 1)
    assert await process.stop(signal.SIGTERM) == 0
    assert [snapshot.applied for snapshot in process.worker.snapshots[UID]] == [1]


async def test_tokens_are_streamed_with_their_number(process: Process) -> None:
    headers = {"Authorization": "Bearer s3cret", "X-Gristmill-Attempt": "1"}
    submit = msgspec.msgpack.encode(make_submit(None, sample(prompt=3, tokens=10)))
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"http://127.0.0.1:{process.port}{BASE}/streams", data=submit, headers=headers
        ) as answer,
    ):
        content = await answer.read()
    chunks = []
    while content:
        size = int.from_bytes(content[:4], "little")
        chunks.append(msgspec.msgpack.decode(content[4 : 4 + size], type=StreamChunk))
        content = content[4 + size :]
    assert [len(chunk.tokens) for chunk in chunks] == [4, 4, 2]
    assert [chunk.final for chunk in chunks] == [None, None, "length"]
    assert {chunk.number for chunk in chunks} == {1}
    await process.acknowledged(1)
    assert process.ledger.billed() == Counts(prefill=3, sample=10)


async def test_wrong_callers_are_told_what_is_wrong(process: Process) -> None:
    async def code(path: str) -> tuple[int, str]:
        status, body = await process.call("GET", path)
        return status, msgspec.msgpack.decode(body, type=Problem).code

    assert await code("/v1/sessions/nobody") == (404, "not_found")
    assert await code(f"{BASE}/operations/train/9") == (404, "not_found")
    assert await code(f"{BASE}/operations/other/9") == (400, "invalid_request")
    assert await code(f"{BASE}/operations/train/1?wait_s=soon") == (400, "invalid_request")
    status, body = await process.call("POST", f"{BASE}/operations", {"stream": "train"})
    assert (status, msgspec.msgpack.decode(body, type=Problem).code) == (400, "invalid_request")
    process.attempt = "2"
    assert await code(BASE) == (421, "fenced")
    process.secret = "guess"
    assert await code(BASE) == (401, "unauthenticated")


async def test_the_view_and_the_metrics_show_what_was_settled(process: Process) -> None:
    await process.submit(1, forward_backward(tokens=9))
    await process.poll("train", 1)
    status, body = await process.call("GET", BASE)
    view = msgspec.msgpack.decode(body, type=SessionView)
    assert (status, view.state, view.next_number, view.counts.train) == (200, "Serving", 2, 9)
    _, metrics = await process.call("GET", "/metrics")
    assert (
        b'gristmill_meter_tokens_total{model="fake",tenant="acme",token_type="train"} 9.0'
        in metrics
    )
    assert b"gristmill_spool_unacked_events" in metrics
    assert (await process.call("GET", "/healthz"))[0] == 200


def test_help_names_every_setting() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "gristmill_meter", "--help"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "GRISTMILL_METER_WORKER_SOCKET" in shown


async def test_a_second_meter_on_the_same_folder_does_not_start(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_METER_LOCK_WAIT_S", "0.1")
    monkeypatch.setenv("GRISTMILL_METER_DATA_DIR", str(process.folder / "log"))
    second = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "gristmill_meter"], capture_output=True, text=True
    )
    assert second.returncode == 1
    assert "another meter holds" in second.stderr


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        pytest.param("GRISTMILL_METER_PROT", "1", "GRISTMILL_METER_PROT", id="misspelt"),
        pytest.param("GRISTMILL_METER_PORT", "high", "port", id="wrong"),
    ],
)
def test_a_misspelt_or_wrong_setting_is_refused(variable: str, value: str, named: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "gristmill_meter"],
        env=os.environ | {variable: value},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert named in run.stderr
    assert "Traceback" not in run.stderr
