"""The S3 wire, through the official client: what the SageMaker SDK calls, and downloads."""

import base64
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from gristmill_contracts import limits
from gristmill_gateway.s3 import S3Caller, S3Wire
from gristmill_gateway.s3_request import S3Request
from gristmill_gateway.s3_store import LocalArtifactStore
from gristmill_testing.control_app import ACCOUNTS, SECRET, gateway_app, key_id
from gristmill_testing.loopback_server import serve


@pytest.fixture(name="served", scope="module", params=["folder", "ledger"])
def served_fixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """Over the folder itself, as on one machine, and over the ledger that keeps it, as in a cluster."""
    folder = tmp_path_factory.mktemp("s3")
    app = gateway_app(folder, [], artifacts_at_ledger=request.param == "ledger")
    with serve(app) as url:
        yield url, folder / "artifacts"


@pytest.fixture(name="root")
def root_fixture(served: tuple[str, Path]) -> Iterator[Path]:
    """The folder of all artifacts, empty before each test."""
    yield served[1]
    shutil.rmtree(served[1], ignore_errors=True)


@pytest.fixture(name="url")
def url_fixture(served: tuple[str, Path], root: Path) -> str:
    return served[0]


def client(url: str, tenant: str = "acme", kind: str = "client") -> Any:
    session = boto3.Session(
        aws_access_key_id=key_id(tenant), aws_secret_access_key=SECRET, region_name="us-west-2"
    )
    return getattr(session, kind)(
        "s3", endpoint_url=url, config=Config(retries={"max_attempts": 0}, read_timeout=20)
    )


@pytest.fixture(name="s3")
def s3_fixture(url: str) -> Iterator[Any]:
    made = client(url)
    yield made
    made.close()


def write(root: Path, path: str, content: bytes = b"x") -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def refused(call: Any, *arguments: Any, **parameters: Any) -> tuple[int, str, str]:
    with pytest.raises(ClientError) as caught:
        call(*arguments, **parameters)
    error = caught.value.response
    return (
        error["ResponseMetadata"]["HTTPStatusCode"], error["Error"]["Code"], error["Error"]["Message"],
    )  # fmt: skip


def test_the_sdks_default_bucket_is_made_once_and_then_found(url: str, s3: Any) -> None:
    bucket = client(url, kind="resource").Bucket("gristmill-1")
    assert bucket.creation_date is None
    assert refused(s3.head_bucket, Bucket="gristmill-1") == (404, "404", "Not Found")
    constraint = {"LocationConstraint": "us-west-2"}
    s3.create_bucket(Bucket="gristmill-1", CreateBucketConfiguration=constraint)
    s3.create_bucket(Bucket="gristmill-1", CreateBucketConfiguration=constraint)
    assert s3.head_bucket(Bucket="gristmill-1")["BucketRegion"] == "us-west-2"
    bucket.load()
    assert bucket.creation_date is not None


def test_a_bucket_of_another_owner_is_refused_by_the_owner_check(s3: Any) -> None:
    s3.create_bucket(Bucket="data", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    s3.head_bucket(Bucket="data", ExpectedBucketOwner=ACCOUNTS["acme"])
    found = refused(s3.head_bucket, Bucket="data", ExpectedBucketOwner=ACCOUNTS["rival"])
    assert found == (403, "403", "Forbidden")


def test_two_tenants_have_buckets_of_one_name_and_never_see_each_other(
    url: str, s3: Any, root: Path
) -> None:
    write(root, "acme/data/run/adapter.safetensors", b"ours")
    rival = client(url, "rival")
    assert (
        refused(rival.get_object, Bucket="data", Key="run/adapter.safetensors")[1] == "NoSuchBucket"
    )
    write(root, "rival/data/run/other", b"theirs")
    assert [o["Key"] for o in s3.list_objects_v2(Bucket="data")["Contents"]] == [
        "run/adapter.safetensors"
    ]
    assert refused(rival.get_object, Bucket="data", Key="run/adapter.safetensors")[1] == "NoSuchKey"
    assert [b["Name"] for b in rival.list_buckets()["Buckets"]] == ["data"]
    rival.close()


def test_objects_are_listed_in_key_order_page_by_page(s3: Any, root: Path) -> None:
    keys = ["run/a", "run/a-b/c", "run/a/b", "run/a.b", "run/zu ü&<", "run-1/x", "other/y"]
    keys.remove("run/a")  # a folder of the same name is there
    for key in keys:
        write(root, f"acme/data/{key}")
    write(root, "acme/data/run/.partial/file")
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket="data", Prefix="run/", PaginationConfig={"PageSize": 2}
    )
    found = [[entry["Key"] for entry in page["Contents"]] for page in pages]
    assert found == [["run/a-b/c", "run/a.b"], ["run/a/b", "run/zu ü&<"]]
    everything = s3.list_objects_v2(Bucket="data")
    assert [e["Key"] for e in everything["Contents"]] == sorted(keys, key=str.encode)
    assert everything["KeyCount"] == len(keys)
    assert not everything["IsTruncated"]


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_delimiter_folds_keys_into_common_prefixes_each_once(
    s3: Any, root: Path, size: int
) -> None:
    for key in ("a/1", "a/2", "a/3", "b", "c/1", "c/2", "d"):
        write(root, f"acme/data/{key}")
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket="data", Delimiter="/", PaginationConfig={"PageSize": size}
    )
    keys: list[str] = []
    folders: list[str] = []
    for page in pages:
        keys += [entry["Key"] for entry in page.get("Contents", [])]
        folders += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
    assert keys == ["b", "d"]
    assert folders == ["a/", "c/"]


def test_deleting_objects_removes_them_and_nothing_else(s3: Any, root: Path) -> None:
    for key in ("run/1", "run/2", "run/keep"):
        write(root, f"acme/data/{key}")
    write(root, "acme/outside")
    objects = [{"Key": k} for k in ("run/1", "run/2", "run/never", "../outside", "run")]
    answer = s3.delete_objects(Bucket="data", Delete={"Objects": objects, "Quiet": True})
    assert "Deleted" not in answer
    assert "Errors" not in answer
    loud = s3.delete_objects(Bucket="data", Delete={"Objects": [{"Key": "x&y"}]})
    assert [entry["Key"] for entry in loud["Deleted"]] == ["x&y"]
    assert [e["Key"] for e in s3.list_objects_v2(Bucket="data")["Contents"]] == ["run/keep"]
    assert (root / "acme/outside").exists()


def test_a_checkpoint_file_is_downloaded_whole_and_in_ranges(
    s3: Any, root: Path, tmp_path: Path
) -> None:
    content = bytes(range(256)) * 5000
    write(root, "acme/data/run/adapter.safetensors", content)
    head = s3.head_object(Bucket="data", Key="run/adapter.safetensors")
    assert head["ContentLength"] == len(content)
    s3.download_file("data", "run/adapter.safetensors", str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == content
    for asked, expected in (
        ("bytes=0-0", content[:1]), ("bytes=100-299", content[100:300]),
        ("bytes=1279990-", content[1279990:]), ("bytes=-7", content[-7:]),
        ("bytes=1279990-99999999999", content[1279990:]),
    ):  # fmt: skip
        part = s3.get_object(Bucket="data", Key="run/adapter.safetensors", Range=asked)
        assert part["Body"].read() == expected
        assert part["ResponseMetadata"]["HTTPStatusCode"] == 206
    past = refused(
        s3.get_object, Bucket="data", Key="run/adapter.safetensors", Range="bytes=1280000-"
    )
    assert past[:2] == (416, "InvalidRange")


def test_a_download_stops_when_the_object_changed_under_it(s3: Any, root: Path) -> None:
    write(root, "acme/data/a", b"one")
    etag = s3.head_object(Bucket="data", Key="a")["ETag"]
    assert s3.get_object(Bucket="data", Key="a", IfMatch=etag)["Body"].read() == b"one"
    assert refused(s3.get_object, Bucket="data", Key="a", IfNoneMatch=etag)[0] == 304
    write(root, "acme/data/a", b"another")
    assert refused(s3.get_object, Bucket="data", Key="a", IfMatch=etag)[:2] == (
        412, "PreconditionFailed",
    )  # fmt: skip


def test_links_and_folders_are_no_objects(s3: Any, root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    write(root, "acme/data/run/file")
    (root / "acme/data/link").symlink_to(tmp_path / "secret")
    (root / "acme/data/folder").symlink_to(tmp_path)
    for key in ("link", "folder/secret", "run", "run/", "run/.hidden", "..", "run/../run/file"):
        assert refused(s3.get_object, Bucket="data", Key=key)[0] == 404, key
    assert [e["Key"] for e in s3.list_objects_v2(Bucket="data")["Contents"]] == ["run/file"]
    s3.delete_objects(Bucket="data", Delete={"Objects": [{"Key": "folder/secret"}]})
    assert (tmp_path / "secret").exists()


REFUSALS: list[tuple[str, dict[str, Any], tuple[int, str]]] = [
    ("get_object", {"Bucket": "data", "Key": "none"}, (404, "NoSuchKey")),
    ("get_object", {"Bucket": "none-such", "Key": "a"}, (404, "NoSuchBucket")),
    ("list_objects_v2", {"Bucket": "none-such"}, (404, "NoSuchBucket")),
    (
        "list_objects_v2",
        {"Bucket": "data", "ContinuationToken": "forged"},
        (400, "InvalidArgument"),
    ),
    ("list_objects", {"Bucket": "data"}, (405, "MethodNotAllowed")),
    ("put_object", {"Bucket": "data", "Key": "a", "Body": b"x"}, (405, "MethodNotAllowed")),
    ("delete_object", {"Bucket": "data", "Key": "a"}, (405, "MethodNotAllowed")),
    ("delete_bucket", {"Bucket": "data"}, (405, "MethodNotAllowed")),
    ("get_bucket_location", {"Bucket": "data"}, (405, "MethodNotAllowed")),
    ("get_object", {"Bucket": "data", "Key": "a", "VersionId": "7"}, (400, "InvalidArgument")),
    ("create_bucket", {"Bucket": "a..b"}, (400, "InvalidBucketName")),
    ("delete_objects", {"Bucket": "data", "Delete": {"Objects": []}}, (400, "MalformedXML")),
]


@pytest.mark.parametrize(("call", "parameters", "expected"), REFUSALS)
def test_what_cannot_be_done_is_refused_with_the_wires_own_code(
    s3: Any, root: Path, call: str, parameters: dict[str, Any], expected: tuple[int, str]
) -> None:
    write(root, "acme/data/a")
    assert refused(getattr(s3, call), **parameters)[:2] == expected
    assert (root / "acme/data/a").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ({}, b"<Delete><Object><Key>a</Key></Object></Delete>", "InvalidRequest"),
        ({"x-amz-checksum-crc32": "AAAAAA=="}, b"<Delete/>", "BadDigest"),
        ({"x-amz-checksum-crc32": "no base64"}, b"<Delete/>", "InvalidDigest"),
        ({"x-amz-checksum-crc32c": "AAAAAA=="}, b"<Delete/>", "InvalidRequest"),
        (None, b"", "MalformedXML"),
        (None, b"<Delete>", "MalformedXML"),
        (None, b"<Other/>", "MalformedXML"),
        (None, b"<Delete><Object/></Delete>", "MalformedXML"),
        (None, b"<Delete><Object><Key>a</Key><VersionId>7</VersionId></Object></Delete>", "InvalidArgument"),
        (None, b"<Delete><Object><Key>a</Key></Object><Bypass/></Delete>", "MalformedXML"),
        (None, b"<Delete>" + b"<Object><Key>a</Key></Object>" * 1001 + b"</Delete>", "MalformedXML"),
        (None, b"<a>" * 100000, "MalformedXML"),
        (None, b'<!DOCTYPE d [<!ENTITY a "aaaa">]><Delete><Object><Key>&a;</Key></Object></Delete>', "MalformedXML"),
        (None, b'<?xml version="1.0" encoding="klingon"?><Delete/>', "MalformedXML"),
        (None, b"\xff\xfe\x00", "MalformedXML"),
        (None, b" " * (limits.S3_BODY_BYTES_MAX + 1), "InvalidRequest"),
    ],
)  # fmt: skip
async def test_a_bad_delete_is_refused_and_deletes_nothing(
    root: Path, headers: dict[str, str] | None, body: bytes, code: str
) -> None:
    write(root, "acme/data/a")
    wire = S3Wire(LocalArtifactStore(root), b"key")
    if headers is None:
        headers = {"x-amz-checksum-crc32": crc32(body)}
    response = await wire.answer(
        S3Caller(tenant="acme", account_id=ACCOUNTS["acme"], region="us-west-2"),
        S3Request(method="POST", path="/data", query={"delete": ""}, headers=headers, body=body),
        "request-1",
    )
    assert response.status == 400
    assert isinstance(response.body, bytes)
    assert f"<Code>{code}</Code>".encode() in response.body
    assert (root / "acme/data/a").exists()


def crc32(body: bytes) -> str:
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


async def test_a_continuation_token_fits_only_its_own_question(root: Path) -> None:
    for key in ("a", "b", "c"):
        write(root, f"acme/data/{key}")
    wire = S3Wire(LocalArtifactStore(root), b"key")
    caller = S3Caller(tenant="acme", account_id=ACCOUNTS["acme"], region="us-west-2")

    async def ask(**query: str) -> bytes:
        request = S3Request(
            method="GET", path="/data", query={"list-type": "2"} | query, headers={}, body=b""
        )
        response = await wire.answer(caller, request, "request-1")
        assert isinstance(response.body, bytes)
        return response.body

    first = (await ask(**{"max-keys": "1"})).decode()
    token = first.partition("<NextContinuationToken>")[2].partition("<")[0]
    assert b"<Key>b</Key>" in await ask(**{"max-keys": "1", "continuation-token": token})
    assert b"InvalidArgument" in await ask(**{"prefix": "a", "continuation-token": token})
    assert b"InvalidArgument" in await ask(**{"max-keys": "-1"})
    assert b"<KeyCount>0</KeyCount>" in await ask(**{"max-keys": "0"})
