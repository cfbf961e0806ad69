"""The control plane and the S3 wire as the network sees them: no input ends in a 5xx or in silence.

GRISTMILL_FUZZ_CASES sets the cases for each operation; a quarter of them is sent here, where each is
a signed request over a socket.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill_gateway.sagemaker.control_operations import OPERATIONS
from gristmill_testing.control_app import SECRET, gateway_app, key_id
from gristmill_testing.control_plane import FakeContext, create_body, model_arn
from gristmill_testing.loopback_server import serve
from gristmill_testing.shape_strategies import inputs
from gristmill_testing.signed_http import Answer, SignedClient
from gristmill_testing.wire_shapes import operation, output_problems

CASES = max(1, int(os.environ.get("GRISTMILL_FUZZ_CASES", "200")) // 4)
SEEDS: dict[str, list[Any]] = {
    "TrainingSessionName": ["run-1"],
    "BaseModelArn": [model_arn("tiny")],
    "RoleArn": [create_body()["RoleArn"]],
    "Path": ["s3://data/x"],
    "LoraConfig": [{"Rank": 8, "Alpha": 16}],
    "HubName": ["SageMakerPublicHub"],
    "HubContentType": ["Model"],
}
quick = settings(
    max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(name="plane", scope="module")
def plane_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SignedClient, Path]]:
    """A client of a gateway that holds no create, and the folder of its artifacts."""
    folder = tmp_path_factory.mktemp("fuzz")
    contexts: list[FakeContext] = []
    with pytest.MonkeyPatch.context() as patch, serve(gateway_app(folder, contexts)) as url:
        patch.setattr("gristmill_contracts.limits.CREATE_WAIT_S_MAX", 0.0)
        yield SignedClient(url=url, key_id=key_id("acme"), secret=SECRET), folder / "artifacts"


@pytest.fixture(name="client", scope="module")
def client_fixture(plane: tuple[SignedClient, Path]) -> SignedClient:
    return plane[0]


def call(client: SignedClient, name: str, body: bytes) -> Answer:
    headers = {"X-Amz-Target": f"SageMaker.{name}", "Content-Type": "application/x-amz-json-1.1"}
    return client.send("sagemaker", "POST", headers=headers, body=body)


def check_refusal(answer: Answer) -> None:
    assert 400 <= answer.status < 500, answer
    refusal = json.loads(answer.body)
    assert refusal["__type"]
    assert refusal["message"]


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_no_document_gets_more_than_an_answer_or_a_refusal(client: SignedClient, name: str) -> None:
    @quick
    @given(inputs(operation("sagemaker", name).input_shape, SEEDS))
    def check(body: dict[str, Any]) -> None:
        answer = call(client, name, json.dumps(body).encode())
        if answer.status == 200:
            assert output_problems("sagemaker", name, json.loads(answer.body)) == []
        else:
            check_refusal(answer)

    check()


BYTES = st.binary(max_size=200) | st.sampled_from(
    [
        b"", b"[]", b"null", b"5", b'"x"', b"{", b'{"a":1}}', b'{"MaxResults":' + b"9" * 5000 + b"}",
        b'{"MaxResults":1e999}', b'{"MaxResults":-1}', b"[" * 100_000, b'{"a":' * 50_000,
        b'{"NameContains":"\\ud800"}', b'\xef\xbb\xbf{}', b'{"MaxResults":NaN}',
        b'{"MaxResults":1,"MaxResults":2}', b"\x00" * 100, "{}".encode("utf-16"),
    ]
)  # fmt: skip


def test_no_bytes_get_more_than_an_answer_or_a_refusal(client: SignedClient) -> None:
    @quick
    @given(st.sampled_from([*sorted(OPERATIONS), "DeleteEverything", "", "é"]), BYTES)
    def check(name: str, body: bytes) -> None:
        answer = call(client, name, body)
        if answer.status != 200:
            check_refusal(answer)

    check()


def test_an_unknown_operation_is_told_what_there_is(client: SignedClient) -> None:
    answer = call(client, "CreateTrainingJob", b"{}")
    refusal = json.loads(answer.body)
    assert refusal["__type"] == "UnknownOperationException"
    assert "CreateTrainingSession" in refusal["message"]


S3_METHODS = ["GET", "HEAD", "PUT", "POST", "DELETE"]
S3_TEXT = st.text(max_size=12) | st.sampled_from(
    ["data", "..", ".", "a" * 300, "run/1", "../../rival/data/x", "%2e%2e", "\x00", "data/", "//"]
)
S3_QUERY = st.dictionaries(
    st.sampled_from(
        [
            "list-type", "delete", "prefix", "delimiter", "max-keys", "continuation-token", "acl",
            "start-after", "encoding-type", "uploads", "versionId", "max-buckets",
        ]
    ),
    S3_TEXT | st.sampled_from(["2", "url", "0", "1", "-1", "/"]),
    max_size=4,
)  # fmt: skip
S3_HEADERS = st.dictionaries(
    st.sampled_from(
        ["Range", "If-Match", "If-None-Match", "x-amz-expected-bucket-owner", "x-amz-checksum-crc32"]
    ),
    st.text(alphabet="0123456789-=bytes*,\"", max_size=20),
    max_size=2,
)  # fmt: skip
S3_BODY = BYTES | st.sampled_from(
    [b"<Delete><Object><Key>run/1</Key></Object></Delete>", b"<a>" * 9999, b"<!DOCTYPE a>"]
)


def test_no_s3_request_gets_more_than_an_answer_or_a_refusal(
    plane: tuple[SignedClient, Path],
) -> None:
    client, artifacts = plane
    kept = artifacts / "rival/data/run/1"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"theirs")
    (artifacts / "acme/data").mkdir(parents=True, exist_ok=True)

    @settings(quick, max_examples=CASES * 8)
    @given(
        st.sampled_from(S3_METHODS), st.lists(S3_TEXT, max_size=3), S3_QUERY, S3_HEADERS, S3_BODY
    )
    def check(
        method: str, parts: list[str], query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> None:
        path = "/" + "/".join(parts)
        answer = client.send("s3", method, path, query=query, headers=headers, body=body)
        assert answer.status < 500, answer
        assert b"theirs" not in answer.body
        if answer.status >= 400 and method != "HEAD":
            assert b"<Code>" in answer.body

    check()
    assert kept.read_bytes() == b"theirs"
    outside = {p.relative_to(artifacts).parts[0] for p in artifacts.iterdir()}
    assert outside <= {"acme", "rival"}
