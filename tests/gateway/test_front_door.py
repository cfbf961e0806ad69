"""The one public port: who is let in, on which wire, and with what errors."""

import hashlib
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from gristmill_contracts import limits
from gristmill_contracts.environment import describe_settings, unknown_variables
from gristmill_contracts.errors import InvalidRequestError
from gristmill_gateway.body import decode_aws_chunked
from gristmill_gateway.sagemaker.control_operations import OPERATIONS
from gristmill_gateway.settings import GatewaySettings
from gristmill_testing.gateway_world import REGION, World, gateway_world

TARGET = {"X-Amz-Target": "SageMaker.ListTrainingSessions"}
JSON_PATH, REST_PATH = "/", "/v1/training-sessions/run-1/operations/x"


@pytest.fixture(name="running", scope="module")
def running_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with gateway_world(tmp_path_factory.mktemp("world")) as world:
        world.add_key("gone", revoked=True)
        yield world


@pytest.fixture(name="world")
def world_fixture(running: World) -> World:
    running.reset()
    return running


def send(
    world: World,
    wire: str,
    *,
    key_id: str = "",
    secret: str = "",
    service: str = "",
    later_s: float = 0,
    sign: bool = True,
    changes: dict[str, str] | None = None,
    body: bytes = b"{}",
) -> tuple[int, str, str]:
    """A request on a wire, signed wrongly if asked to; returns status, the error's name and message."""
    path = {"json": JSON_PATH, "rest": REST_PATH, "s3": "/data"}[wire]
    method = {"json": "POST", "rest": "GET", "s3": "HEAD"}[wire]
    method = "GET" if wire == "s3" else method
    headers = dict(TARGET) if wire == "json" else {}
    request = AWSRequest(method=method, url=world.url + path, data=body, headers=headers)
    key_id = key_id or world.keys["acme"]
    credentials = Credentials(key_id, secret or f"secret-of-{key_id}")
    signer_type = S3SigV4Auth if wire == "s3" else SigV4Auth
    signer = signer_type(credentials, service or ("s3" if wire == "s3" else "sagemaker"), REGION)
    if sign and later_s:
        with pytest.MonkeyPatch.context() as patch:
            moment = datetime.now(UTC) + timedelta(seconds=later_s)
            patch.setattr("botocore.auth.get_current_datetime", lambda: moment)
            signer.add_auth(request)
    elif sign:
        signer.add_auth(request)
    sent = {**dict(request.headers.items()), **(changes or {})}
    status, found, content = world.send(method, path, body, sent)
    if wire == "json":
        answer = json.loads(content)
        return status, answer.get("__type", ""), answer.get("message", "")
    if wire == "rest":
        return status, found.get("x-amzn-errortype", ""), json.loads(content)["message"]
    text = content.decode()
    assert text.startswith("<?xml")
    code = text.partition("<Code>")[2].partition("</Code>")[0]
    return status, code, text.partition("<Message>")[2].partition("</Message>")[0]


FAULTS: list[tuple[str, dict[str, Any], dict[str, tuple[int, str]]]] = [
    ("no signature", {"sign": False}, {
        "json": (400, "MissingAuthenticationTokenException"),
        "rest": (403, "MissingAuthenticationTokenException"),
    }),
    ("unknown key", {"key_id": "AKIAUNKNOWN000000000"}, {
        "json": (400, "UnrecognizedClientException"),
        "rest": (403, "UnrecognizedClientException"),
        "s3": (403, "InvalidAccessKeyId"),
    }),
    ("wrong secret", {"secret": "wrong"}, {
        "json": (400, "InvalidSignatureException"),
        "rest": (403, "InvalidSignatureException"),
        "s3": (403, "SignatureDoesNotMatch"),
    }),
    ("a session token", {"changes": {"X-Amz-Security-Token": "abc"}}, {
        "json": (400, "IncompleteSignatureException"),
        "rest": (403, "IncompleteSignatureException"),
        "s3": (400, "AuthorizationHeaderMalformed"),
    }),
    ("old clock", {"later_s": -400}, {
        "json": (400, "InvalidSignatureException"),
        "rest": (403, "InvalidSignatureException"),
        "s3": (403, "RequestTimeTooSkewed"),
    }),
    ("early clock", {"later_s": 400}, {
        "json": (400, "InvalidSignatureException"),
        "rest": (403, "InvalidSignatureException"),
        "s3": (403, "RequestTimeTooSkewed"),
    }),
    ("other service", {"service": "bedrock"}, {
        "json": (400, "InvalidSignatureException"),
        "rest": (403, "InvalidSignatureException"),
    }),
    ("nonsense", {"changes": {"Authorization": "AWS4-HMAC-SHA256 x"}}, {
        "json": (400, "IncompleteSignatureException"),
        "rest": (403, "IncompleteSignatureException"),
    }),
    ("other body", {"changes": {"X-Amz-Content-SHA256": hashlib.sha256(b"x").hexdigest()}}, {
        "s3": (403, "SignatureDoesNotMatch"),
    }),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how", "wires"), FAULTS, ids=[row[0] for row in FAULTS])
def test_who_is_not_let_in_hears_it_in_the_words_of_the_wire(
    world: World, name: str, how: dict[str, Any], wires: dict[str, tuple[int, str]]
) -> None:
    for wire, expected in wires.items():
        status, code, message = send(world, wire, **how)
        assert (status, code) == expected, (wire, message)
        assert message


def test_a_revoked_key_is_told_so(world: World) -> None:
    status, code, message = send(world, "json", key_id=world.keys["gone"])
    assert (status, code) == (400, "UnrecognizedClientException")
    assert "was revoked" in message


def test_a_key_works_from_the_moment_it_is_made_until_it_is_revoked(world: World) -> None:
    key_id = world.add_key("fresh")
    assert send(world, "json", key_id=key_id)[0] == 200
    from gristmill_contracts.credentials import AccessKey

    key = world.store.get(AccessKey, "fresh", key_id.lower())
    spec = key.spec.model_copy(update={"revoked_us": 5})
    world.store.update(key.model_copy(update={"spec": spec}))
    assert send(world, "json", key_id=key_id)[0] == 400
    world.store.delete(AccessKey, "fresh", key_id.lower())
    del world.keys["fresh"]


def test_a_signed_session_token_is_refused_with_the_remedy(world: World) -> None:
    request = AWSRequest(method="POST", url=world.url + "/", data=b"{}", headers=dict(TARGET))
    key_id = world.keys["acme"]
    SigV4Auth(Credentials(key_id, f"secret-of-{key_id}", "token"), "sagemaker", REGION).add_auth(
        request
    )
    status, _, body = world.send("POST", "/", b"{}", dict(request.headers.items()))
    assert status == 400
    assert "unset AWS_SESSION_TOKEN" in json.loads(body)["message"]


def test_the_region_of_the_credential_is_that_of_the_arns(world: World) -> None:
    for region in ("eu-central-1", "us-west-2"):
        request = AWSRequest(
            method="POST",
            url=world.url + "/",
            data=b'{"TrainingSessionName": "run-1"}',
            headers={"X-Amz-Target": "SageMaker.DescribeTrainingSession"},
        )
        key_id = world.keys["acme"]
        credentials = Credentials(key_id, f"secret-of-{key_id}")
        SigV4Auth(credentials, "sagemaker", region).add_auth(request)
        _, _, body = world.send("POST", "/", request.data, dict(request.headers.items()))
        arn = json.loads(body)["TrainingSessionDetail"]["TrainingSessionArn"]
        assert arn == f"arn:aws:sagemaker:{region}:100000000001:training-session/run-1"


# --- which wire ----------------------------------------------------------------------------------


def test_all_three_wires_answer_on_one_port(world: World) -> None:
    control = world.client("sagemaker")
    assert len(control.list_training_sessions()["TrainingSessionSummaries"]) == 1
    s3 = world.client("s3")
    s3.create_bucket(Bucket="healthz", CreateBucketConfiguration={"LocationConstraint": REGION})
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["healthz"]
    assert s3.list_objects_v2(Bucket="healthz")["KeyCount"] == 0
    assert world.send("GET", "/healthz")[2] == b'{"status":"ok"}'


def test_an_object_is_read_and_deleted_through_the_port(world: World) -> None:
    root = world.gateway.settings.artifacts_dir / "acme" / "models" / "run 1"
    root.mkdir(parents=True)
    (root / "a+b=ü.bin").write_bytes(b"x" * 1000)
    s3 = world.client("s3")
    key = "run 1/a+b=ü.bin"
    assert s3.head_object(Bucket="models", Key=key)["ContentLength"] == 1000
    assert s3.get_object(Bucket="models", Key=key)["Body"].read() == b"x" * 1000
    s3.delete_objects(Bucket="models", Delete={"Objects": [{"Key": key}], "Quiet": True})
    with pytest.raises(ClientError) as caught:
        s3.head_object(Bucket="models", Key=key)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404


def test_an_unknown_control_operation_says_what_there_is(world: World) -> None:
    for headers in (
        {"X-Amz-Target": "SageMaker.ListTrainingJobs"},
        {"X-Amz-Target": "Other.Thing"},
        {},
    ):
        status, _, body = world.call("POST", "/", {}, headers)
        answer = json.loads(body)
        assert (status, answer["__type"]) == (400, "UnknownOperationException")
        for name in OPERATIONS:
            assert name in answer["message"]
    assert json.loads(world.call("GET", "/")[2])["__type"] == "UnknownOperationException"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "not JSON"),
        (b"[]", "not an object"),
        (b'{"TrainingSessionName": 5}', "TrainingSessionName = 5"),
        (b'{"TrainingSessionName": "\\ud800"}', "surrogate"),
        (b'{"x": NaN}', "x is not a member"),
    ],
)
def test_a_wrong_control_body_is_refused(world: World, body: bytes, text: str) -> None:
    headers = {"X-Amz-Target": "SageMaker.DescribeTrainingSession"}
    status, found, content = world.call("POST", "/", body, headers)
    answer = json.loads(content)
    assert (status, answer["__type"]) == (400, "ValidationException")
    assert found["content-type"] == "application/x-amz-json-1.1"
    assert text in answer["message"]


def test_control_errors_have_the_names_of_the_service(world: World) -> None:
    control = world.client("sagemaker")
    for call, code in (
        (lambda: control.describe_training_session(TrainingSessionName="none"), "ResourceNotFound"),
        (
            lambda: control.delete_training_session(TrainingSessionName="run-1"),
            "ValidationException",
        ),
    ):
        with pytest.raises(ClientError) as caught:
            call()  # type: ignore[no-untyped-call]
        assert caught.value.response["Error"]["Code"] == code
    world.ledger.down = True
    with pytest.raises(ClientError) as caught:
        control.describe_model_package(ModelPackageName="runs/1")
    assert caught.value.response["Error"]["Code"] == "ServiceUnavailable"
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503


# --- bounds --------------------------------------------------------------------------------------


def test_a_body_over_its_bound_is_refused_on_every_wire(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = b'{"x": "' + b"y" * limits.CONTROL_BODY_BYTES_MAX + b'"}'
    status, _, body = world.call("POST", "/", control, dict(TARGET))
    assert (status, json.loads(body)["__type"]) == (413, "RequestEntityTooLargeException")
    chat = b" " * (limits.CHAT_BODY_BYTES_MAX + 1)
    status, headers, _ = world.call("POST", "/training-sessions/run-1/sample", chat)
    assert (status, headers["x-amzn-errortype"]) == (413, "RequestEntityTooLargeException")
    assert world.call("POST", "/", {}, dict(TARGET))[0] == 200
    assert world.gateway.front.bodies.held_bytes == 0


def test_a_body_without_an_announced_length_is_bounded_too(world: World) -> None:
    import http.client
    from urllib.parse import urlsplit

    parts = urlsplit(world.url)
    request = AWSRequest(method="POST", url=world.url + "/", data=b"", headers=dict(TARGET))
    key_id = world.keys["acme"]
    SigV4Auth(Credentials(key_id, f"secret-of-{key_id}"), "sagemaker", REGION).add_auth(request)
    headers = {k: v for k, v in request.headers.items() if k.lower() != "content-length"}
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
    chunks = iter([b"x" * 65536] * (limits.CONTROL_BODY_BYTES_MAX // 65536 + 1))
    connection.request("POST", "/", body=chunks, headers=headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert world.gateway.front.bodies.held_bytes == 0


def test_bodies_and_requests_have_a_bound_in_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/v1/training-sessions/run-1/operations"
    with monkeypatch.context() as patch:
        patch.setattr(limits, "HELD_BODY_BYTES_MAX", 10)
        status, headers, _ = world.call("POST", path, b"x" * 11)
        assert (status, headers["x-amzn-errortype"]) == (429, "ThrottlingException")
        assert headers["retry-after"] == "1"
    with monkeypatch.context() as patch:
        patch.setattr(limits, "OPEN_REQUESTS_MAX", 0)
        assert world.call("POST", path, b"{}")[0] == 429
        status, _, body = world.call("POST", "/", {}, dict(TARGET))
        assert (status, json.loads(body)["__type"]) == (400, "ThrottlingException")
    assert world.gateway.front.bodies.held_bytes == 0
    assert world.gateway.front.open_requests == 0


def test_a_large_request_passes_whole(world: World) -> None:
    """A chunk as the SDK makes them: 1024 datums, some megabytes."""
    row = [7, 11] * 16
    datum = {
        "modelInput": {"chunks": [{"tokens": row, "type": "encoded_text"}]},
        "lossFnInputs": {
            "target_tokens": {"data": row, "dtype": "int64", "shape": [32]},
            "weights": {"data": [0.1234567890123] * 32, "dtype": "float32", "shape": [32]},
        },
    }
    config = {"forwardBackward": {"lossFnName": "cross_entropy", "datumList": [datum] * 1024}}
    body = {"sequenceNumber": 1, "operationConfig": config}
    status, _, content = world.call("POST", "/v1/training-sessions/run-1/operations", body)
    assert status == 200, content
    path = f"/v1/training-sessions/run-1/operations/{json.loads(content)['operationId']}"
    result = json.loads(world.call("GET", path)[2])
    assert result["tokenUsage"]["trainingTokens"] == 1024 * 32


def test_many_requests_at_once_are_answered(world: World) -> None:
    found: list[int] = []

    def ask() -> None:
        found.extend(world.call("POST", "/", {}, dict(TARGET))[0] for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [200] * 40


def test_an_unforeseen_error_is_a_500_that_tells_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crash(*_: Any) -> Any:
        raise RuntimeError("secret detail")

    monkeypatch.setitem(OPERATIONS, "ListTrainingSessions", crash)
    status, _, body = world.call("POST", "/", {}, dict(TARGET))
    assert (status, json.loads(body)["__type"]) == (500, "InternalFailure")
    assert b"secret detail" not in body
    monkeypatch.setattr("gristmill_gateway.sagemaker.runtime.execute_training_operation", crash)
    status, headers, body = world.call("POST", "/v1/training-sessions/run-1/operations", b"{}")
    assert (status, headers["x-amzn-errortype"]) == (500, "InternalServerException")
    assert b"secret detail" not in body


# --- probes and settings -------------------------------------------------------------------------


def test_probes_tell_what_is_missing(world: World) -> None:
    status, _, body = world.send("GET", "/readyz")
    assert (status, json.loads(body)) == (200, {"ready": True, "missing": []})
    world.call("POST", "/", {}, dict(TARGET))
    status, _, body = world.send("GET", "/metrics")
    assert status == 200
    assert (
        b'gristmill_gateway_requests_total{operation="ListTrainingSessions",status="200"}' in body
    )
    assert b"gristmill_gateway_request_seconds" in body
    assert b"run-1" not in body
    assert b"acme" not in body


def test_without_a_ledger_it_is_ready_and_names_it(tmp_path: Path) -> None:
    with gateway_world(tmp_path) as world:
        settings = world.gateway.settings.model_copy(update={"ledger_url": "http://127.0.0.1:9"})
        world.gateway.settings = settings
        status, _, body = world.send("GET", "/readyz")
        assert (status, json.loads(body)) == (200, {"ready": True, "missing": ["ledger"]})


def test_a_misspelt_setting_is_found() -> None:
    names = {"GRISTMILL_GATEWAY_PROT": "1", "GRISTMILL_GATEWAY_PORT": "1", "GRISTMILL_METER_X": ""}
    assert unknown_variables(GatewaySettings, names) == ["GRISTMILL_GATEWAY_PROT"]
    for name in GatewaySettings.model_fields:
        assert f"GRISTMILL_GATEWAY_{name.upper()}" in describe_settings(GatewaySettings)


# --- aws-chunked ---------------------------------------------------------------------------------


def test_an_aws_chunked_body_is_joined() -> None:
    trailer = b"0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"
    assert decode_aws_chunked(b"3\r\nabc\r\n2;chunk-signature=ff\r\nde\r\n" + trailer) == b"abcde"
    assert decode_aws_chunked(trailer) == b""
    for broken in (b"", b"3\r\nab", b"3\r\nabcd\r\n0\r\n", b"x\r\n", b"3\r\nabc\r\n"):
        with pytest.raises(InvalidRequestError, match="aws-chunked"):
            decode_aws_chunked(broken)
