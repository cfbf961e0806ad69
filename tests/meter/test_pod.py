"""The meter as the sidecar of a pod: a Secret volume, an emptyDir with the socket, probes, SIGTERM."""

import asyncio
import json
import os
import signal
import stat
from pathlib import Path

import pytest
from aiohttp import web

from gristmill_meter.assignments import AssignmentsFolder
from gristmill_meter.disk import LocalDisk
from gristmill_testing.fake_worker_server import worker_app
from gristmill_testing.meter_process import Process, served
from gristmill_testing.meter_world import UID, World, forward_backward, sample


class SecretVolume:
    """A folder as the kubelet writes it: files are links through `..data`, which is swapped whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions = 0
        folder.mkdir(parents=True, exist_ok=True)

    def publish(self, files: dict[str, bytes]) -> None:
        self.versions += 1
        version = self.folder / f"..2026_11_30_{self.versions}"
        version.mkdir()
        for name, content in files.items():
            (version / name).write_bytes(content)
        fresh = self.folder / "..data_tmp"
        fresh.symlink_to(version.name)
        fresh.rename(self.folder / "..data")
        for name in files:
            link = self.folder / name
            if not link.is_symlink():
                link.symlink_to(f"..data/{name}")
        for link in self.folder.iterdir():
            if not link.name.startswith("..") and link.name not in files:
                link.unlink()
        for old in self.folder.glob("..2026*"):
            if old != version:
                for file in old.iterdir():
                    file.unlink()
                old.rmdir()


def test_assignments_are_read_through_the_links_of_a_secret_volume(tmp_path: Path) -> None:
    source = World(tmp_path / "w")
    volume = SecretVolume(tmp_path / "secret")
    folder = AssignmentsFolder(volume.folder)
    assert folder.scan() == {}
    for attempt in (1, 2):
        source.assign(attempt=attempt)
        content = (source.settings.assignments_dir / f"{UID}.json").read_bytes()
        volume.publish({f"{UID}.json": content})
        assert [a.attempt for a in folder.scan().values()] == [attempt]
    volume.publish({})
    assert folder.scan() == {}


def test_a_swap_of_the_volume_in_the_middle_of_a_scan_loses_no_session(tmp_path: Path) -> None:
    source = World(tmp_path / "w")
    source.assign()
    content = (source.settings.assignments_dir / f"{UID}.json").read_bytes()
    volume = SecretVolume(tmp_path / "secret")
    volume.publish({f"{UID}.json": content})
    folder = AssignmentsFolder(volume.folder)
    for _ in range(50):
        assert list(folder.scan()) == [UID]
        volume.publish({f"{UID}.json": content})


def test_folders_and_files_of_the_log_are_for_the_meter_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        disk = LocalDisk(tmp_path)
        disk.make_dir("uid/blobs")
        disk.open_append("uid/log").close()
    finally:
        os.umask(before)
    modes = {
        name: stat.S_IMODE((tmp_path / name).stat().st_mode)
        for name in ("uid", "uid/blobs", "uid/log")
    }
    assert modes == {"uid": 0o700, "uid/blobs": 0o700, "uid/log": 0o600}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("m")


async def test_it_is_up_and_quiet_before_the_worker_is_there_and_ready_with_it(
    folder: Path,
) -> None:
    async with served(folder, until="/healthz", worker=False, READY_WHEN="serving") as process:
        body = json.loads(await process.answers("/readyz", 503))
        assert (body["ready"], set(body["missing"]) >= {"worker", "session"}) == (False, True)
        beats = process.ledger.calls["post_heartbeats"]
        async with asyncio.timeout(20):
            while process.ledger.calls["post_heartbeats"] < beats + 3:
                await asyncio.sleep(0.01)
        levels = [
            json.loads(line)["level"] for line in (folder / "stderr").read_text().splitlines()
        ]
        assert not {"warning", "error", "WARNING", "ERROR"} & set(levels), levels
        runner = web.AppRunner(worker_app(process.worker))
        await runner.setup()
        await web.UnixSite(runner, str(folder / "w.sock")).start()
        try:
            body = json.loads(await process.answers("/readyz", 200))
            assert body == {"ready": True, "missing": []}
            await process.submit(1, forward_backward())
            assert (await process.poll("train", 1)).state == "Completed"
        finally:
            await runner.cleanup()
        await process.answers("/readyz", 503)


async def test_sigterm_with_the_worker_gone_ships_what_there_is_and_ends_with_0(
    folder: Path,
) -> None:
    async with served(folder, DRAIN_S="15") as process:
        await process.submit(1, forward_backward(5))
        await process.poll("train", 1)
        process.ledger.away = True
        for number in (2, 3):
            await process.submit(number, forward_backward(5, number))
            await process.poll("train", number)
        gate = asyncio.Event()
        process.worker.before = lambda op_id, operation: gate.wait()
        await process.submit(4, forward_backward(5, 4))
        process.worker.kill()
        process.worker.down = True
        assert process.child is not None
        process.child.send_signal(signal.SIGTERM)
        calls = process.ledger.calls["post_batch"]
        async with asyncio.timeout(20):
            while process.ledger.calls["post_batch"] < calls + 2:
                await asyncio.sleep(0.01)
        process.ledger.away = False
        assert await asyncio.to_thread(process.child.wait, 20) == 0
        assert [event.number for event in process.ledger.events] == [1, 2, 3]
        beat = process.ledger.heartbeats[UID]
        assert (beat.view.state, beat.acked_seq, beat.head_seq) == ("Draining", 3, 3)
        gate.set()


async def test_sigterm_while_the_ledger_is_away_ends_in_time_and_loses_nothing(
    folder: Path,
) -> None:
    async with served(folder, DRAIN_S="1") as process:
        await process.submit(1, forward_backward(5))
        await process.poll("train", 1)
        await process.acknowledged(1)
        process.ledger.away = True
        await process.submit(2, forward_backward(5, 2))
        await process.poll("train", 2)
        assert await process.stop(signal.SIGTERM) == 0
        process.ledger.away = False
        assert (await process.drain())[0] == 0
        assert [event.number for event in process.ledger.events] == [1, 2]
        assert process.ledger.heartbeats[UID].view.state == "Closed"


class TestDrain:
    async def test_ships_a_volume_and_says_so_in_one_line(self, folder: Path) -> None:
        async with served(folder) as process:
            await process.submit(1, forward_backward(5))
            await process.poll("train", 1)
            number = (await process.submit(None, sample())).number
            assert (await process.poll("log", number)).state == "Completed"
            await process.stop(signal.SIGKILL)
            status, logged = await process.drain()
            assert status == 0
            (line,) = [x for x in map(json.loads, logged.splitlines()) if "drain" in x["event"]]
            assert line["event"] == "drain_shipped"
            assert (line["session"], line["acked_seq"], line["head_seq"]) == (UID, 2, 2)

    async def test_ships_logs_that_lie_aside_without_an_assignment(self, folder: Path) -> None:
        async with served(folder) as process:
            await process.submit(1, forward_backward(5))
            await process.poll("train", 1)
            await process.acknowledged(1)
            process.ledger.away = True
            await process.submit(2, forward_backward(7, 2))
            await process.poll("train", 2)
            await process.stop(signal.SIGKILL)
            process.ledger.away = False
            (folder / "unflushed").mkdir()
            (folder / "log" / UID).rename(folder / "unflushed" / UID)
            process.settings |= {
                "DATA_DIR": str(folder / "unflushed"),
                "ASSIGNMENTS_DIR": str(folder / "none"),
            }
            status, logged = await process.drain()
            assert status == 0, logged
            assert [event.number for event in process.ledger.events] == [1, 2]

    async def test_says_what_it_waits_for_and_gives_up_in_time(self, folder: Path) -> None:
        async with served(folder) as process:
            await process.submit(1, forward_backward(5))
            await process.poll("train", 1)
            await process.stop(signal.SIGKILL)
            process.ledger.away = True
            status, logged = await process.drain("--timeout-s", "1")
            assert status == 5
            assert "drain_waits_for_the_ledger" in logged
            assert "drain again when it answers" in logged

    async def test_waits_for_a_meter_that_still_runs_then_refuses(self, folder: Path) -> None:
        async with served(folder, LOCK_WAIT_S="0.1") as process:
            status, logged = await process.drain()
            assert status == 1
            assert "another meter holds" in logged

    async def test_finds_nothing_where_there_is_nothing(self, folder: Path) -> None:
        process = Process(folder=folder, port=0, ledger_port=1)
        status, logged = await process.drain()
        assert (status, "drain_found_nothing" in logged) == (0, True)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--timeout-s", "0"), "0 is no time above 0"),
            (("--timeout-s", "soon"), "soon"),
            (("--all",), "--all"),
        ],
    )
    async def test_bad_arguments_are_2(
        self, folder: Path, arguments: tuple[str, ...], words: str
    ) -> None:
        process = Process(folder=folder, port=0, ledger_port=1)
        status, logged = await process.drain(*arguments)
        assert status == 2
        assert words in logged

    @pytest.mark.parametrize("content", [None, "", " \n"])
    async def test_a_missing_or_empty_secret_is_2(self, folder: Path, content: str | None) -> None:
        path = folder / "secret"
        if content is not None:
            path.write_text(content)
        settings = {"PRODUCER_SECRET_FILE": str(path)}
        process = Process(folder=folder, port=0, ledger_port=1, settings=settings)
        status, logged = await process.drain()
        assert status == 2
        assert "mount the attempt's Secret" in logged
