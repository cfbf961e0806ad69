"""Checkpoint locations: what the runtime plane, the registry and the S3 wire agree on."""

import pytest

from gristmill_contracts.errors import InvalidRequestError
from gristmill_gateway import locations
from gristmill_gateway.locations import S3Location


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://data/run-1/output", S3Location("data", "run-1/output")),
        ("s3://data/run-1/output//", S3Location("data", "run-1/output")),
        ("s3://data", S3Location("data", "")),
        ("s3://data/", S3Location("data", "")),
        ("s3://a.b-c/x y/ü", S3Location("a.b-c", "x y/ü")),
    ],
)
def test_an_s3_uri_is_read_into_bucket_and_prefix(text: str, expected: S3Location) -> None:
    assert locations.parse_s3_uri(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "s3://", "s3:///x", "https://data/x", "S3://data/x", "s3://Data/x", "s3://da/../x",
        "s3://data/../other", "s3://data/a/./b", "s3://data/a//b", "s3://../x", "s3://..", "s3://a",
        "s3://a..b/x", "s3://data/a\x00b", "s3://data/a\nb", "s3://data/" + "x" * 256,
        "s3://data/" + "/".join(["y" * 200] * 6), "s3://data/\ud800",
        "s3://data/.hidden", "s3://data/a/.hidden/b",
    ],
)  # fmt: skip
def test_a_uri_that_is_no_folder_below_a_bucket_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        locations.parse_s3_uri(text)


def test_a_session_without_an_output_path_writes_to_the_tenants_default_bucket() -> None:
    output = locations.session_output("", "run-1", "123456789012")
    assert output.uri == "s3://gristmill-123456789012/run-1/output"
    named = locations.session_output("", "run-1", "123456789012", bucket="ours")
    assert named.uri == "s3://ours/run-1/output"


def test_a_checkpoint_path_and_its_uri_name_the_same_folder() -> None:
    output = locations.session_output("s3://data/run-1/", "run-1", "123456789012")
    folder = locations.artifact_folder("acme", output)
    assert folder == "acme/data/run-1"
    assert locations.checkpoint_uri("acme", f"{folder}/some-id") == "s3://data/run-1/some-id/"


def test_the_checkpoint_path_of_another_tenant_has_no_uri() -> None:
    with pytest.raises(InvalidRequestError, match="'acme'"):
        locations.checkpoint_uri("acme", "rival/data/some-id")
