"""Checkpoints reach the ledger before their result leaves, and a worker before it needs them."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gristmill_contracts import operations as ops
from gristmill_contracts.errors import OperationFailedError
from gristmill_contracts.http import OperationView
from gristmill_contracts.ids import CheckpointId
from gristmill_meter.shared_folder import SharedFolder
from gristmill_testing.fake_worker import write_checkpoint
from gristmill_testing.meter_world import (
    UID,
    World,
    compute_logprobs,
    forward_backward,
    load_state,
    sample,
    save_state,
    save_weights,
)

MakeWorld = Callable[..., World]


@pytest.fixture
def make_pod(make_world: MakeWorld, tmp_path: Path) -> MakeWorld:
    """Worlds whose meter and worker share a folder that the ledger does not see. Not started."""
    pods = 0

    def make() -> World:
        nonlocal pods
        pods += 1
        folder = tmp_path / f"artifacts-{pods}"
        folder.mkdir()
        world = make_world(artifacts_dir=folder)
        world.worker.artifacts = folder
        return world

    return make


@pytest.fixture
async def pod(make_pod: MakeWorld) -> World:
    return await make_pod().start()


def folder_of(world: World) -> Path:
    assert world.worker.artifacts is not None
    return world.worker.artifacts


def saved_of(view: OperationView) -> ops.SaveResult:
    assert view.state == "Completed", view.error
    assert isinstance(view.result, ops.SaveResult)
    return view.result


def ref(saved: ops.SaveResult) -> ops.CheckpointRef:
    return ops.CheckpointRef(id=saved.checkpoint_id, path=saved.path, name="mine")


def sample_from(checkpoint: ops.CheckpointRef) -> ops.Sample:
    return msgspec.structs.replace(sample(), adapter=checkpoint)


class TestUpload:
    @pytest.mark.parametrize("operation", [save_weights(), save_state()], ids=["weights", "state"])
    async def test_all_files_are_there_before_the_result_the_manifest_last(
        self, pod: World, operation: ops.Operation
    ) -> None:
        seen: list[int] = []
        pod.ledger.on_checkpoint = lambda: seen.append(len(pod.ledger.artifacts))
        saved = saved_of(await pod.train(1, operation))
        assert seen == [3]
        assert pod.ledger.sent[-1].endswith("/manifest.json")
        for path in (folder_of(pod) / saved.path).rglob("*"):
            if path.is_file():
                key = str(path.relative_to(folder_of(pod)))
                assert pod.ledger.artifacts[key] == path.read_bytes()

    async def test_a_ledger_that_is_away_is_waited_for_with_the_result(self, pod: World) -> None:
        pod.ledger.away = True
        await pod.submit(1, save_weights())
        calls = pod.ledger.calls["artifact_sha256"]
        await pod.until(lambda: pod.ledger.calls["artifact_sha256"] > calls + 2)
        assert (await pod.poll("train", 1, wait_s=0.01)).state == "InProgress"
        pod.ledger.away = False
        saved_of(await pod.poll("train", 1))

    async def test_a_crash_between_upload_and_registration_is_repeated_without_harm(
        self, pod: World
    ) -> None:
        gate = asyncio.Event()

        def stop_before_registration() -> None:
            if not gate.is_set():
                gate.set()
                pod.disk.freeze()
                raise OSError("the machine went off")

        pod.ledger.on_checkpoint = stop_before_registration
        await pod.submit(1, save_weights())
        await pod.until(gate.is_set, "all was uploaded and nothing registered")
        assert len(pod.ledger.artifacts) == 3
        before = dict(pod.ledger.artifacts)
        await pod.crash()
        saved = saved_of(await pod.poll("train", 1))
        assert pod.ledger.artifacts == before
        assert len(pod.ledger.sent) == 3, "what the ledger had was not sent again"
        assert list(pod.ledger.checkpoints) == [saved.checkpoint_id]
        await pod.settled()
        assert pod.worker.runs[f"{UID}/train/1"] == 2

    @pytest.mark.parametrize("nth", [0, 1, 2])
    async def test_a_crash_in_the_middle_of_the_upload_as_well(self, pod: World, nth: int) -> None:
        fired = asyncio.Event()
        left = nth

        def cut(key: str) -> None:
            nonlocal left
            if left == 0 and not fired.is_set():
                fired.set()
                pod.disk.freeze()
                raise OSError("the machine went off")
            left -= 1

        pod.ledger.on_artifact = cut
        await pod.submit(1, save_weights())
        await pod.until(fired.is_set)
        assert pod.ledger.checkpoints == {}
        await pod.crash()
        saved_of(await pod.poll("train", 1))
        assert len(pod.ledger.artifacts) == len(pod.ledger.sent) == 3

    async def test_a_shared_folder_is_not_copied(self, world: World) -> None:
        saved_of(await world.train(1, save_weights()))
        assert world.ledger.artifacts == {}
        assert world.ledger.calls["artifact_sha256"] == 0

    async def test_a_fenced_save_uploads_nothing_and_does_not_fail(self, pod: World) -> None:
        gate = asyncio.Event()
        pod.worker.before = lambda op_id, operation: gate.wait()
        await pod.submit(1, save_weights())
        await pod.until(lambda: pod.worker.at_once == 1)
        pod.ledger.attempts[UID] = 2
        gate.set()
        await pod.until(lambda: pod.session.fenced)
        assert pod.ledger.artifacts == {}
        assert pod.session.state.records["train", 1].state == "Pending"


class TestAWorkerIsNotBelieved:
    """It runs what tenants send, and shares the folder with us."""

    async def fails(self, pod: World, spoil: Callable[[Path], object]) -> str:
        def after(op_id: str, operation: ops.Operation) -> None:
            (manifest,) = folder_of(pod).rglob("manifest.json")
            spoil(manifest.parent)

        pod.worker.after = after
        view = await pod.train(1, save_weights())
        assert view.state == "Failed"
        assert view.error is not None
        assert pod.ledger.checkpoints == {}
        pod.worker.after = lambda op_id, operation: None
        assert (await pod.train(2, forward_backward())).state == "Completed"
        return view.error.message

    async def test_a_link_to_a_secret_is_not_sent(self, pod: World, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"the producer secret")

        def link(folder: Path) -> None:
            (folder / "weights").unlink()
            (folder / "weights").symlink_to(secret)

        assert "weights cannot be read" in await self.fails(pod, link)
        assert b"the producer secret" not in pod.ledger.artifacts.values()

    async def test_a_linked_folder_is_not_entered(self, pod: World, tmp_path: Path) -> None:
        other = tmp_path / "log"
        other.mkdir()
        (other / "model").write_bytes(b"the operation log")

        def link(folder: Path) -> None:
            (folder / "merged" / "model").unlink()
            (folder / "merged").rmdir()
            (folder / "merged").symlink_to(other)

        await self.fails(pod, link)
        assert b"the operation log" not in pod.ledger.artifacts.values()

    async def test_a_pipe_does_not_hang_us(self, pod: World) -> None:
        def pipe(folder: Path) -> None:
            (folder / "weights").unlink()
            os.mkfifo(folder / "weights")

        assert "weights" in await self.fails(pod, pipe)

    async def test_other_bytes_than_the_manifest_says_are_no_checkpoint(self, pod: World) -> None:
        message = await self.fails(pod, lambda folder: (folder / "weights").write_bytes(b"other"))
        assert "weights" in message

    async def test_a_manifest_that_changed_after_it_was_told_is_refused(self, pod: World) -> None:
        message = await self.fails(pod, lambda folder: write_checkpoint(folder, b"other"))
        assert "another manifest" in message

    async def test_a_missing_file_or_manifest_is_refused(self, pod: World) -> None:
        message = await self.fails(pod, lambda folder: (folder / "manifest.json").unlink())
        assert "no readable manifest" in message


@pytest.mark.parametrize(
    "name", ["../../../secret", "/etc/passwd", ".hidden", "a//b", "a/../b", "", "a\nb"]
)
def test_a_manifest_names_only_files_below_its_folder(tmp_path: Path, name: str) -> None:
    import hashlib

    content = json.dumps({"files": {name: {"size_bytes": 1, "sha256": "0" * 64}}}).encode()
    (tmp_path / "acme" / "c").mkdir(parents=True)
    (tmp_path / "acme" / "c" / "manifest.json").write_bytes(content)
    shared = SharedFolder(root=tmp_path)
    with pytest.raises(OperationFailedError, match="cannot be"):
        shared.manifest(["acme", "c"], hashlib.sha256(content).hexdigest())


class TestFetch:
    async def _moved(self, pod: World, make_pod: MakeWorld) -> tuple[World, ops.SaveResult]:
        """A checkpoint of one pod, and another pod of the tenant that has never seen it."""
        saved = saved_of(await pod.train(1, save_state()))
        other = make_pod()
        other.ledger.artifacts, other.worker.saved = pod.ledger.artifacts, pod.worker.saved
        await other.start()
        return other, saved

    @pytest.mark.parametrize("kind", ["load_state", "sample", "score", "choose"])
    async def test_a_checkpoint_of_elsewhere_is_there_when_it_is_needed(
        self, pod: World, make_pod: MakeWorld, kind: str
    ) -> None:
        other, saved = await self._moved(pod, make_pod)
        checkpoint = ref(saved)
        if kind == "load_state":
            view = await other.train(1, load_state(checkpoint))
        else:
            operation: ops.Operation = sample_from(checkpoint)
            if kind == "score":
                operation = msgspec.structs.replace(compute_logprobs(), adapter=checkpoint)
            if kind == "choose":
                operation = ops.LoadWeightsForSampling(adapter=checkpoint)
            view = await other.sample(operation)
        assert view.state == "Completed", view.error
        content = (folder_of(pod) / saved.path / "weights").read_bytes()
        assert other.worker.read == [content]
        assert not (folder_of(other) / saved.path / "merged").exists()
        assert [p.name for p in folder_of(other).rglob(".*")] == []

    async def test_a_stream_as_well(self, pod: World, make_pod: MakeWorld) -> None:
        other, saved = await self._moved(pod, make_pod)
        chunks = await other.read_stream(sample_from(ref(saved)))
        assert chunks[-1].final == "length"

    async def test_it_is_fetched_once(self, pod: World, make_pod: MakeWorld) -> None:
        other, saved = await self._moved(pod, make_pod)
        views = await asyncio.gather(*(other.sample(sample_from(ref(saved))) for _ in range(5)))
        assert {view.state for view in views} == {"Completed"}
        assert other.ledger.calls["read_artifact"] == 2

    async def test_a_copy_that_arrives_cut_short_is_fetched_again(
        self, pod: World, make_pod: MakeWorld
    ) -> None:
        other, saved = await self._moved(pod, make_pod)
        other.ledger.garble = 2
        assert (await other.sample(sample_from(ref(saved)))).state == "Completed"
        content = (folder_of(pod) / saved.path / "weights").read_bytes()
        assert other.worker.read == [content]

    async def test_a_ledger_that_is_away_is_waited_for(
        self, pod: World, make_pod: MakeWorld
    ) -> None:
        other, saved = await self._moved(pod, make_pod)
        await other.sample(sample())  # It brings the word that no budget applies.
        other.ledger.away = True
        number = (await other.submit(None, sample_from(ref(saved)))).number
        calls = other.ledger.calls["list_artifacts"]
        await other.until(lambda: other.ledger.calls["list_artifacts"] > calls + 2)
        assert (await other.poll("log", number, wait_s=0.01)).state == "InProgress"
        other.ledger.away = False
        assert (await other.poll("log", number)).state == "Completed"

    async def test_what_the_ledger_does_not_have_is_for_the_worker_to_say(self, pod: World) -> None:
        gone = ops.CheckpointRef(id=CheckpointId("c"), path="acme/b/run/c", name="arn:mine")
        view = await pod.sample(sample_from(gone))
        assert view.error is not None
        assert (view.state, view.error.code) == ("Failed", "not_found")
        assert "arn:mine is gone" in view.error.message

    async def test_an_upload_that_never_ended_is_no_checkpoint(
        self, pod: World, make_pod: MakeWorld
    ) -> None:
        other, saved = await self._moved(pod, make_pod)
        del other.ledger.artifacts[f"{saved.path}/manifest.json"]
        view = await other.sample(sample_from(ref(saved)))
        assert view.state == "Failed"
        assert list(folder_of(other).iterdir()) == []

    @pytest.mark.parametrize("path", ["rival/b/run/c", "acme/../rival/c", "/etc", "acme", ""])
    async def test_nothing_is_asked_for_outside_the_tenants_folder(
        self, pod: World, path: str
    ) -> None:
        checkpoint = ops.CheckpointRef(id=CheckpointId("c"), path=path, name="theirs")
        assert (await pod.sample(sample_from(checkpoint))).state == "Failed"
        assert pod.ledger.calls["list_artifacts"] == 0

    async def test_a_link_in_the_way_is_not_written_through(
        self, pod: World, make_pod: MakeWorld, tmp_path: Path
    ) -> None:
        other, saved = await self._moved(pod, make_pod)
        target = tmp_path / "the-log"
        target.mkdir()
        (folder_of(other) / "acme").symlink_to(target)
        view = await other.sample(sample_from(ref(saved)))
        assert view.state == "Failed"
        assert list(target.iterdir()) == []

    async def test_leftovers_of_a_fetch_that_died_are_no_hindrance(
        self, pod: World, make_pod: MakeWorld
    ) -> None:
        other, saved = await self._moved(pod, make_pod)
        place = folder_of(other) / saved.path
        aside = place.with_name(f".fetching-{place.name}")
        aside.mkdir(parents=True)
        (aside / "weights").write_bytes(b"half")
        assert (await other.sample(sample_from(ref(saved)))).state == "Completed"
        assert not aside.exists()

    async def test_group_and_owner_may_use_what_was_fetched(
        self, pod: World, make_pod: MakeWorld
    ) -> None:
        before = os.umask(0o077)
        try:
            other, saved = await self._moved(pod, make_pod)
            assert (await other.sample(sample_from(ref(saved)))).state == "Completed"
        finally:
            os.umask(before)
        for path in folder_of(other).rglob("*"):
            assert path.stat().st_mode & 0o777 == (0o770 if path.is_dir() else 0o660)

    async def test_a_replay_fetches_what_it_loads_again(
        self, pod: World, make_pod: MakeWorld
    ) -> None:
        other, saved = await self._moved(pod, make_pod)
        other.worker.refuse_snapshots = True
        assert (await other.train(1, load_state(ref(saved)))).state == "Completed"
        assert (await other.train(2, forward_backward())).state == "Completed"
        for path in sorted(folder_of(other).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        await other.crash(worker=True)
        assert (await other.train(3, forward_backward())).state == "Completed"
        assert other.worker.replays[f"{UID}/train/1"] >= 1
        assert len(other.worker.read) == 2
