"""The artifact store: files whole or not there, of their tenant alone, listed in one order."""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from yarl import URL

from gristmill_contracts import limits
from gristmill_contracts.cluster_http import ArtifactPage
from gristmill_contracts.errors import ConflictError, InvalidRequestError
from gristmill_contracts.http import (
    SHA256_HEADER,
    Checkpoint,
    Empty,
    Problem,
    RegisterCheckpoint,
    RegisterSession,
)
from gristmill_contracts.ids import CheckpointId, SessionUid, TenantName
from gristmill_ledger.artifacts import LocalArtifactStore, check_key
from gristmill_testing.ledger import START_US, LedgerClient, running_ledger

KEY = bytes(range(32))
KIB = 1024


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Files:
    """Calls the artifact routes of one tenant."""

    def __init__(self, client: LedgerClient, tenant: str = "acme") -> None:
        self.client = client
        self.base = f"{client.url}/v1/artifacts/{tenant}"

    async def ask(
        self, method: str, path: str, content: object = None, **headers: str
    ) -> tuple[int, bytes, Mapping[str, str]]:
        url = URL(f"{self.base}/{path}" if path else self.base, encoded=True)
        async with self.client.http.request(
            method, url, data=content, headers=self.client.headers | headers
        ) as answer:
            return answer.status, await answer.read(), answer.headers

    async def put(self, path: str, content: bytes, *, told: str | None = None) -> str:
        """`ok`, or the code of the refusal."""
        headers = {SHA256_HEADER: sha256(content) if told is None else told}
        status, body, _ = await self.ask("PUT", path, content, **headers)
        return "ok" if status == 200 else msgspec.msgpack.decode(body, type=Problem).code

    async def get(self, path: str) -> bytes | None:
        status, body, headers = await self.ask("GET", path)
        if status == 404:
            return None
        assert status == 200
        assert headers[SHA256_HEADER] == sha256(body)
        return body

    async def list(self, **parameters: str | int) -> ArtifactPage:
        tenant = self.base.rpartition("/")[2]
        path = f"/v1/artifacts/{tenant}"
        return await self.client.ask(ArtifactPage, "GET", path, **parameters)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[LedgerClient]:
    async with running_ledger(tmp_path / "data", artifacts_dir=tmp_path / "store") as client:
        yield client


@pytest.fixture
async def files(client: LedgerClient) -> Files:
    return Files(client)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".upload-*")]


async def test_a_file_comes_back_as_it_was_sent(files: Files) -> None:
    content = os.urandom(3 * limits.ARTIFACT_CHUNK_BYTES + 17)
    assert await files.put("bucket/run/c-1/adapter.safetensors", content) == "ok"
    assert await files.get("bucket/run/c-1/adapter.safetensors") == content
    status, body, headers = await files.ask("HEAD", "bucket/run/c-1/adapter.safetensors")
    assert (status, body, headers["Content-Length"]) == (200, b"", str(len(content)))
    assert headers[SHA256_HEADER] == sha256(content)
    assert await files.put("bucket/empty", b"") == "ok"
    assert await files.get("bucket/empty") == b""


async def test_the_same_file_again_is_fine_and_another_takes_its_place(files: Files) -> None:
    for content in (b"one", b"one", b"two"):
        assert await files.put("b/f", content) == "ok"
        assert await files.get("b/f") == content
    (listed,) = (await files.list()).artifacts
    assert (listed.path, listed.size_bytes, listed.sha256) == ("b/f", 3, sha256(b"two"))


async def test_bytes_that_are_not_what_was_told_are_refused_and_the_old_file_stays(
    files: Files, tmp_path: Path
) -> None:
    assert await files.put("b/f", b"good") == "ok"
    assert await files.put("b/f", b"bad", told=sha256(b"good")) == "invalid_request"
    assert await files.put("b/f", b"bad", told="") == "invalid_request"
    assert await files.put("b/f", b"bad", told=sha256(b"bad").upper()) == "invalid_request"
    assert await files.get("b/f") == b"good"
    assert leftovers(tmp_path) == []


async def test_an_upload_that_breaks_off_leaves_nothing(files: Files, tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def part_of_it() -> AsyncIterator[bytes]:
        yield b"x" * limits.ARTIFACT_CHUNK_BYTES
        begun.set()
        await asyncio.Event().wait()

    sending = asyncio.create_task(
        files.ask("PUT", "b/f", part_of_it(), **{SHA256_HEADER: sha256(b"whole")})
    )
    async with asyncio.timeout(20):
        await begun.wait()
        while not leftovers(tmp_path):
            await asyncio.sleep(0.01)
        sending.cancel()
        await asyncio.wait([sending])
        while leftovers(tmp_path):
            await asyncio.sleep(0.01)
    assert await files.get("b/f") is None
    assert files.client.ledger.uploads == 0


@pytest.mark.parametrize(
    ("asked", "status", "first", "last"),
    [
        ("bytes=0-3", 206, 0, 3),
        ("bytes=5-5", 206, 5, 5),
        ("bytes=90-", 206, 90, 99),
        ("bytes=90-900", 206, 90, 99),
        ("bytes=-7", 206, 93, 99),
        ("bytes=-900", 206, 0, 99),
        ("bytes=100-", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
        ("bytes=-", 200, 0, 99),
        ("bytes=0-1,5-6", 200, 0, 99),
        ("lines=0-1", 200, 0, 99),
    ],
)
async def test_ranges(files: Files, asked: str, status: int, first: int, last: int) -> None:
    content = bytes(range(100))
    await files.put("b/f", content)
    found, body, headers = await files.ask("GET", "b/f", Range=asked)
    assert found == status
    if status == 416:
        assert headers["Content-Range"] == "bytes */100"
        return
    assert body == content[first : last + 1]
    if status == 206:
        assert headers["Content-Range"] == f"bytes {first}-{last}/100"


async def test_deleting_is_for_ever_and_twice_is_once(files: Files) -> None:
    await files.put("b/f", b"x")
    for _ in range(2):
        assert (await files.ask("DELETE", "b/f"))[0] == 200
        assert await files.get("b/f") is None
    assert (await files.list()).artifacts == []


PATHS = ["a.txt", "a/b", "a/b.c/d", "a/c", "aa", "b/é", "b/z", "b/日本", "c"]


class TestLists:
    @pytest.fixture
    async def filled(self, files: Files) -> Files:
        for path in PATHS:
            assert await files.put(quote(path), path.encode()) == "ok"
        return files

    async def test_all_paths_come_in_utf8_order(self, filled: Files) -> None:
        found = [a.path for a in (await filled.list()).artifacts]
        assert found == sorted(PATHS, key=lambda path: path.encode())

    @pytest.mark.parametrize("limit", [1, 2, 3, 9])
    async def test_pages_hold_every_path_once(self, filled: Files, limit: int) -> None:
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            page = await filled.list(after=after, limit=limit)
            assert len(page.artifacts) <= limit
            found += [a.path for a in page.artifacts]
            after = page.next_after
        assert found == sorted(PATHS, key=lambda path: path.encode())

    @pytest.mark.parametrize("prefix", ["a", "a/", "a/b", "a/b.", "b/", "é", "zz", "a.txt"])
    async def test_a_prefix_is_any_beginning(self, filled: Files, prefix: str) -> None:
        found = [a.path for a in (await filled.list(prefix=prefix)).artifacts]
        assert sorted(found) == sorted(path for path in PATHS if path.startswith(prefix))

    @pytest.mark.parametrize(
        ("prefix", "files_there", "folders"),
        [
            ("", ["a.txt", "aa", "c"], ["a/", "b/"]),
            ("a", ["a.txt", "aa"], ["a/"]),
            ("a/", ["a/b", "a/c"], ["a/b.c/"]),
            ("a/b.c", [], ["a/b.c/"]),
            ("a/b.c/", ["a/b.c/d"], []),
            ("x", [], []),
        ],
    )
    async def test_a_delimiter_shows_one_level(
        self, filled: Files, prefix: str, files_there: list[str], folders: list[str]
    ) -> None:
        page = await filled.list(prefix=prefix, delimiter="/")
        assert [a.path for a in page.artifacts] == files_there
        assert page.folders == folders
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            page = await filled.list(prefix=prefix, delimiter="/", after=after, limit=1)
            found += [a.path for a in page.artifacts] + page.folders
            after = page.next_after
        assert sorted(found) == sorted(files_there + folders)

    async def test_a_tenant_without_a_file_has_an_empty_list(self, files: Files) -> None:
        assert (await files.list()).artifacts == []

    @pytest.mark.parametrize(
        "parameters",
        [{"limit": 0}, {"limit": limits.OBJECTS_PAGE_MAX + 1}, {"delimiter": "-"}, {"order": "x"}],
    )
    async def test_bad_questions_are_refused(
        self, files: Files, parameters: dict[str, str]
    ) -> None:
        with pytest.raises(InvalidRequestError):
            await files.list(**parameters)


async def test_folders_are_made_listed_and_removed_when_empty(files: Files) -> None:
    for _ in range(2):
        assert (await files.ask("PUT", "bucket/"))[0] == 200
    assert (await files.list(delimiter="/")).folders == ["bucket/"]
    await files.put("bucket/f", b"x")
    assert (await files.ask("DELETE", "bucket/"))[0] == 409
    await files.ask("DELETE", "bucket/f")
    for _ in range(2):
        assert (await files.ask("DELETE", "bucket/"))[0] == 200
    assert (await files.list(delimiter="/")).folders == []


async def test_a_name_is_a_file_or_a_folder_and_stays_so(files: Files) -> None:
    await files.put("b/f", b"x")
    assert await files.put("b/f/below", b"x") == "conflict"
    assert await files.put("b", b"x") == "conflict"
    assert (await files.ask("PUT", "b/f/"))[0] == 409
    assert await files.get("b") is None
    assert await files.get("b/f") == b"x"


ESCAPES = [
    "../rival/f", "%2e%2e/rival/f", "b/%2e%2e/%2e%2e/rival/f", "b/..%2f..%2frival%2ff", "..", ".",
    "b//f", "%2fetc/passwd", "b/./f", ".hidden", "b/.sha256/f", "b/.upload-1", "b/a%00b", "b/a%0ab",
    "b/" + "n" * 256, "/".join(["n" * 200] * 6),
]  # fmt: skip


@pytest.mark.parametrize("path", ESCAPES)
async def test_no_path_leads_out_of_the_tenants_folder(
    files: Files, tmp_path: Path, path: str
) -> None:
    (tmp_path / "store" / "rival").mkdir()
    (tmp_path / "store" / "rival" / "f").write_bytes(b"secret")
    before = sorted(path for path in tmp_path.rglob("*") if "data" not in path.parts)
    for method in ("PUT", "GET", "HEAD", "DELETE"):
        status, body, _ = await files.ask(method, path, b"x", **{SHA256_HEADER: sha256(b"x")})
        assert status in (400, 404, 405), (method, status)
        assert b"secret" not in body
    assert sorted(path for path in tmp_path.rglob("*") if "data" not in path.parts) == before


@pytest.mark.parametrize("key", ["", "a/", "/a", "a/../b", "a\\\0b", "\ud800"])
def test_a_key_that_names_nothing_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequestError):
        check_key(key)


async def test_links_are_not_followed(files: Files, tmp_path: Path) -> None:
    await files.put("b/f", b"x")
    folder = tmp_path / "store" / "acme" / "b"
    (tmp_path / "outside").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "out").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    assert await files.get("b/link") is None
    assert await files.get("b/pipe") is None
    assert [a.path for a in (await files.list()).artifacts] == ["b/f"]
    for method in ("GET", "DELETE"):
        assert (await files.ask(method, "b/out/outside"))[0] == 409
    assert await files.put("b/out/x", b"x") == "conflict"
    assert await files.put("b/link", b"mine") == "ok"
    assert (tmp_path / "outside").read_bytes() == b"secret"


async def test_a_checksum_that_was_lost_or_is_of_another_file_is_taken_again(
    files: Files, tmp_path: Path
) -> None:
    await files.put("b/f", b"one")
    folder = tmp_path / "store" / "acme" / "b"
    for spoil in (
        (folder / ".sha256" / "f").unlink,
        lambda: (folder / ".sha256" / "f").write_bytes(b"garbage"),
        lambda: (folder / "f").write_bytes(b"another"),
    ):
        spoil()
        await files.get("b/f")
        (listed,) = (await files.list()).artifacts
        assert listed.sha256 == sha256((folder / "f").read_bytes())


async def test_a_volume_without_room_takes_nothing_and_says_so(tmp_path: Path) -> None:
    async with running_ledger(
        tmp_path / "data", artifacts_dir=tmp_path / "store", artifacts_free_bytes_min=2**62
    ) as client:
        assert await Files(client).put("b/f", b"x") == "unavailable"


async def test_too_many_and_too_large_uploads_are_refused(
    files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(limits, "ARTIFACT_BYTES_MAX", 10 * KIB)
    assert await files.put("b/f", b"x" * 10 * KIB) == "ok"
    assert await files.put("b/g", b"x" * (10 * KIB + 1)) == "too_large"
    monkeypatch.setattr(limits, "ARTIFACT_UPLOADS_MAX", 0)
    assert await files.put("b/g", b"x") == "overloaded"
    assert await files.get("b/g") is None
    assert leftovers(tmp_path) == []


async def test_a_ledger_without_a_store_says_what_to_set(tmp_path: Path) -> None:
    async with running_ledger(tmp_path) as client:
        status, body, _ = await Files(client).ask("GET", "b/f")
        assert status == 404
        assert b"ARTIFACTS_DIR" in body


def test_what_dead_processes_left_is_removed_at_the_start(tmp_path: Path) -> None:
    old, young = tmp_path / "acme" / ".upload-old", tmp_path / "acme" / ".upload-young"
    old.parent.mkdir()
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 2 * 86_400,) * 2)
    LocalArtifactStore(root=tmp_path, free_bytes_min=0).open()
    assert leftovers(tmp_path) == [".upload-young"]


class TestInACluster:
    @pytest.fixture
    async def cluster(self, tmp_path: Path) -> AsyncIterator[LedgerClient]:
        (tmp_path / "key").write_bytes(KEY)
        async with running_ledger(
            tmp_path / "data",
            artifacts_dir=tmp_path / "store",
            cluster_key_file=tmp_path / "key",
        ) as client:
            operator = client.as_service(KEY, "operator")
            for uid, tenant in (("s-1", "acme"), ("s-2", "rival")):
                session = RegisterSession(
                    uid=SessionUid(uid), tenant=TenantName(tenant), project="", name=uid,
                    model="tiny", rank=8, created_us=START_US,
                )  # fmt: skip
                await operator.ask(Empty, "POST", "/v1/sessions", session)
            yield client

    async def test_a_meter_reaches_its_own_tenants_files_alone(self, cluster: LedgerClient) -> None:
        own = Files(cluster.as_meter(KEY, "s-1"))
        assert await own.put("b/f", b"x") == "ok"
        assert await own.get("b/f") == b"x"
        assert len((await own.list()).artifacts) == 1
        for stranger in (cluster.as_meter(KEY, "s-2"), cluster.as_meter(KEY, "unknown")):
            others = Files(stranger)
            assert await others.put("b/f", b"y") == "forbidden"
            for method in ("GET", "HEAD", "DELETE"):
                assert (await others.ask(method, "b/f"))[0] == 403
            assert (await others.ask("GET", ""))[0] == 403
        assert (await own.ask("DELETE", "b/f"))[0] == 403
        assert (await Files(cluster.as_service(KEY, "gateway")).ask("DELETE", "b/f"))[0] == 200

    async def test_a_fenced_meter_writes_nothing(self, cluster: LedgerClient) -> None:
        await cluster.as_meter(KEY, "s-1", 2).register("s-1", attempt=2)
        assert await Files(cluster.as_meter(KEY, "s-1", 1)).put("b/f", b"x") == "fenced"
        assert await Files(cluster.as_meter(KEY, "s-1", 2)).put("b/f", b"x") == "ok"

    async def test_a_registered_checkpoint_never_changes(self, cluster: LedgerClient) -> None:
        meter = cluster.as_meter(KEY, "s-1")
        files = Files(meter)
        assert await files.put("b/run/c-1/adapter", b"one") == "ok"
        assert await files.put("b/run/c-1/adapter", b"a run again before it was known") == "ok"
        assert await files.put("b/run/c-1/adapter", b"one") == "ok"
        request = RegisterCheckpoint(
            id=CheckpointId("c-1"), tenant=TenantName("acme"), session=SessionUid("s-1"), group="g",
            kind="weights", path="acme/b/run/c-1", model="tiny", rank=8, alpha=16, size_bytes=3,
            manifest_sha256="0" * 64, description="", created_us=START_US,
        )  # fmt: skip
        await meter.ask(Checkpoint, "POST", "/v1/checkpoints", request)
        assert await files.put("b/run/c-1/adapter", b"two") == "conflict"
        assert await files.put("b/run/c-1/adapter", b"one") == "ok"
        assert await files.put("b/run/c-1x/adapter", b"two") == "ok"
        gateway = Files(cluster.as_service(KEY, "gateway"))
        assert await gateway.put("b/run/c-1/adapter", b"two") == "conflict"
        assert await files.get("b/run/c-1/adapter") == b"one"

    async def test_a_stranger_is_answered_before_a_byte_of_the_body_is_kept(
        self, cluster: LedgerClient, tmp_path: Path
    ) -> None:
        with suppress(
            aiohttp.ClientError
        ):  # The connection may close while the rest is being sent.
            assert await Files(cluster).put("b/f", b"x" * KIB * KIB) == "unauthenticated"
        assert [each for each in (tmp_path / "store").rglob("*") if each.is_file()] == []


def test_a_folder_in_the_way_of_a_finished_upload_is_a_conflict(tmp_path: Path) -> None:
    store = LocalArtifactStore(root=tmp_path, free_bytes_min=0)
    store.open()
    upload = store.begin("acme", "b/f", sha256(b"x"))
    upload.write(b"x")
    store.make_folder("acme", "b/f/")
    with pytest.raises(ConflictError):
        upload.finish()
    upload.abandon()
    assert leftovers(tmp_path) == []
