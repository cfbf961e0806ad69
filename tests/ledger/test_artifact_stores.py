"""A folder and a bucket are the same artifact store; the bucket is one of a real S3 service."""

import hashlib
import io
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill_contracts import limits
from gristmill_contracts.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from gristmill_contracts.http import SHA256_HEADER
from gristmill_ledger.artifact_port import ArtifactStore, get_bytes, put_bytes
from gristmill_ledger.artifacts import LocalArtifactStore
from gristmill_ledger.artifacts_s3 import S3ArtifactStore, s3_client
from gristmill_ledger.settings import LedgerSettings
from gristmill_testing.ledger import running_ledger
from gristmill_testing.s3_server import S3Server, running_s3

MIB = 2**20


@pytest.fixture(scope="module")
def service() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def bucket(service: S3Server) -> S3ArtifactStore:
    at = service.make_bucket(f"b-{uuid.uuid4().hex}")
    return S3ArtifactStore(client=s3_client(at), bucket=at.bucket, prefix="gristmill/")


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    made: ArtifactStore = LocalArtifactStore(root=tmp_path / "store", free_bytes_min=0)
    if request.param == "bucket":
        made = request.getfixturevalue("bucket")
    made.open()
    return made


def put(store: ArtifactStore, key: str, content: bytes = b"x", tenant: str = "acme") -> None:
    put_bytes(store, tenant, key, content, hashlib.sha256(content).hexdigest())


def listed(store: ArtifactStore, **asked: object) -> tuple[list[str], list[str], str | None]:
    given = {"prefix": "", "after": "", "limit": 1000, "delimiter": False} | asked
    page = store.list("acme", **given)  # type: ignore[arg-type]
    return [each.path for each in page.artifacts], page.folders, page.next_after


def test_a_file_comes_back_as_it_was_put(store: ArtifactStore) -> None:
    content = os.urandom(300_001)
    put(store, "b/run/weights.safetensors", content)
    put(store, "b/empty", b"")
    assert get_bytes(store, "acme", "b/run/weights.safetensors") == content
    assert get_bytes(store, "acme", "b/empty") == b""
    info, file = store.read("acme", "b/run/weights.safetensors")
    assert (info.size_bytes, info.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    file.seek(300_000)
    assert (file.read(100), file.read(100)) == (content[300_000:], b"")
    file.close()
    assert store.sha256_of("acme", "b/run/weights.safetensors") == info.sha256


def test_a_file_of_several_parts_comes_back_as_it_was_put(store: ArtifactStore) -> None:
    content = os.urandom(MIB) * 17
    upload = store.begin("acme", "b/big", hashlib.sha256(content).hexdigest())
    for at in range(0, len(content), 3 * MIB):
        upload.write(content[at : at + 3 * MIB])
    with pytest.raises(NotFoundError):
        store.read("acme", "b/big")
    upload.finish()
    upload.abandon()
    assert len(content) > limits.ARTIFACT_PART_BYTES
    assert get_bytes(store, "acme", "b/big") == content
    assert store.sha256_of("acme", "b/big") == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("size", [5, 9 * MIB], ids=["small", "in parts"])
def test_other_bytes_than_were_told_leave_what_was_there(store: ArtifactStore, size: int) -> None:
    put(store, "b/f", b"good")
    upload = store.begin("acme", "b/f", hashlib.sha256(b"told").hexdigest())
    upload.write(b"x" * size)
    with pytest.raises(InvalidRequestError, match="SHA-256"):
        upload.finish()
    upload.abandon()
    assert get_bytes(store, "acme", "b/f") == b"good"
    assert listed(store) == (["b/f"], [], None)


def test_an_upload_that_breaks_off_is_aborted(service: S3Server, bucket: S3ArtifactStore) -> None:
    upload = bucket.begin("acme", "b/f", "0" * 64)
    upload.write(b"x" * 9 * MIB)
    client = service.client()
    assert len(client.list_multipart_uploads(Bucket=bucket.bucket)["Uploads"]) == 1
    upload.abandon()
    assert client.list_multipart_uploads(Bucket=bucket.bucket).get("Uploads", []) == []
    assert service.keys(bucket.bucket) == []


def test_lists_are_in_one_order_with_and_without_folders(store: ArtifactStore) -> None:
    names = ["b/a", "b/a-1/x", "b/c/x", "b/c/y", "b/d", "b/\u00e9", "z/1"]
    for name in reversed(names):
        put(store, name)
    put(store, "b/a", tenant="other")
    everything = sorted(names, key=str.encode)
    assert listed(store) == (everything, [], None)
    assert listed(store, prefix="b/c") == (["b/c/x", "b/c/y"], [], None)
    assert listed(store, prefix="b/", delimiter=True) == (
        ["b/a", "b/d", "b/\u00e9"], ["b/a-1/", "b/c/"], None,
    )  # fmt: skip
    assert listed(store, delimiter=True) == ([], ["b/", "z/"], None)
    assert listed(store, prefix="nothing") == ([], [], None)


@pytest.mark.parametrize("delimiter", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_pages_joined_are_the_whole_list(store: ArtifactStore, limit: int, delimiter: bool) -> None:
    for name in ("b/a", "b/c/x", "b/c/y", "b/d/z", "b/e", "b/f/1/2"):
        put(store, name)
    asked = {"prefix": "b/", "delimiter": delimiter}
    whole = listed(store, **asked)
    files: list[str] = []
    folders: list[str] = []
    after: str | None = ""
    while after is not None:
        some, more, after = listed(store, **asked, limit=limit, after=after)
        assert len(some) + len(more) <= limit
        files += some
        folders += more
    assert (files, folders) == whole[:2]


def test_a_file_is_no_folder_and_a_folder_no_file(store: ArtifactStore) -> None:
    put(store, "b/f/x")
    with pytest.raises(ConflictError, match="folder"):
        store.begin("acme", "b/f", "0" * 64)
    with pytest.raises(ConflictError, match="is a file"):
        store.begin("acme", "b/f/x/y", "0" * 64)
    with pytest.raises(ConflictError, match="is a file"):
        store.make_folder("acme", "b/f/x/")
    with pytest.raises(ConflictError, match="not empty"):
        store.delete("acme", "b/f/")


def test_what_is_deleted_is_gone_and_may_be_deleted_again(store: ArtifactStore) -> None:
    put(store, "b/f/x")
    store.make_folder("acme", "b/g/")
    store.make_folder("acme", "b/g/")
    assert listed(store, prefix="b/", delimiter=True)[1] == ["b/f/", "b/g/"]
    for key in ("b/f/x", "b/f/x", "b/f/", "b/f/", "b/g/", "b/nothing", "b/nothing/"):
        store.delete("acme", key)
    assert listed(store) == ([], [], None)
    assert store.sha256_of("acme", "b/f/x") is None
    with pytest.raises(NotFoundError):
        store.read("acme", "b/f/x")


@pytest.mark.parametrize("key", ["", "/a", "a//b", "a/", ".hidden", "a/../b", "a\nb", "x" * 2000])
def test_a_path_that_cannot_be_is_refused(store: ArtifactStore, key: str) -> None:
    with pytest.raises(InvalidRequestError):
        store.begin("acme", key, "0" * 64)
    with pytest.raises(InvalidRequestError):
        store.read("acme", key)


def test_an_object_that_somebody_else_put_has_a_checksum_all_the_same(
    service: S3Server, bucket: S3ArtifactStore
) -> None:
    service.client().put_object(Bucket=bucket.bucket, Key="gristmill/acme/b/f", Body=b"theirs")
    assert bucket.sha256_of("acme", "b/f") == hashlib.sha256(b"theirs").hexdigest()


def test_a_service_that_is_away_is_unavailable_and_says_what_to_do(service: S3Server) -> None:
    at = service.location("no-such-bucket")
    missing = S3ArtifactStore(client=s3_client(at), bucket=at.bucket)
    with pytest.raises(UnavailableError, match="bucket"):
        missing.open()
    with pytest.raises(UnavailableError, match="NoSuchBucket"):
        put(missing, "b/f")


async def test_a_ledger_keeps_its_artifacts_in_a_bucket(service: S3Server, tmp_path: Path) -> None:
    at = service.make_bucket("checkpoints")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "access-key-id").write_text(at.access_key + "\n")
    (secrets / "secret-access-key").write_text(at.secret_key + "\n")
    asked = {
        "artifacts_url": "s3://checkpoints/ours",
        "artifacts_endpoint": at.endpoint,
        "artifacts_credentials_dir": secrets,
    }
    content = os.urandom(9 * MIB)
    told = {SHA256_HEADER: hashlib.sha256(content).hexdigest()}
    async with running_ledger(tmp_path / "data", **asked) as client:
        url = f"{client.url}/v1/artifacts/acme/b/f"
        async with client.http.put(url, data=io.BytesIO(content), headers=told) as answer:
            assert answer.status == 200
        async with client.http.get(url, headers={"Range": "bytes=5-9"}) as answer:
            assert (answer.status, await answer.read()) == (206, content[5:10])
        async with client.http.get(url) as answer:
            assert (await answer.read(), answer.headers[SHA256_HEADER]) == (content, *told.values())
    assert service.keys("checkpoints") == ["ours/acme/b/f"]


def test_settings_name_one_store(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="both set"):
        LedgerSettings(artifacts_url="s3://checkpoints", artifacts_dir=tmp_path)
    with pytest.raises(ValueError, match="without artifacts_url"):
        LedgerSettings(artifacts_endpoint="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="artifacts_url"):
        LedgerSettings(artifacts_url="https://example.com/bucket")
