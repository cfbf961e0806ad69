"""SigV4 against botocore's own signers: what they sign is let in, and nothing else is."""

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_gateway import sigv4
from gristmill_gateway.sigv4 import SignatureError, SignedRequest

KEY_ID = "AKIAEXAMPLE000000001"
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
HOST = "http://127.0.0.1:8450"


def signed(
    method: str = "POST",
    url: str = "/",
    body: bytes = b"{}",
    headers: dict[str, str] | None = None,
    service: str = "sagemaker",
) -> SignedRequest:
    """A request as botocore signs and sends it."""
    request = AWSRequest(method=method, url=HOST + url, data=body, headers=headers or {})
    signer = S3SigV4Auth if service == "s3" else SigV4Auth
    signer(Credentials(KEY_ID, SECRET), service, "us-west-2").add_auth(request)
    parts = urlsplit(request.url)
    sent = {"host": parts.netloc} | {k.lower(): v for k, v in request.headers.items()}
    return SignedRequest(
        method=method, path=parts.path, query=parts.query, headers=list(sent.items())
    )


def verify(request: SignedRequest, body: bytes = b"{}", secret: str = SECRET) -> sigv4.Claim:
    claim = sigv4.read_claim(request)
    sigv4.check_clock(claim, datetime.now(UTC))
    key = sigv4.signing_key(secret, claim.date, claim.region, claim.service)
    sigv4.check_signature(request, claim, key, hashlib.sha256(body).hexdigest())
    return claim


def changed(request: SignedRequest, **headers: str | None) -> SignedRequest:
    """The same request with headers replaced, added or (None) taken away."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    kept = [(k, v) for k, v in request.headers if k not in names]
    added = [(k, v) for k, v in names.items() if v is not None]
    return SignedRequest(
        method=request.method, path=request.path, query=request.query, headers=kept + added
    )


GOOD: list[tuple[str, dict[str, Any]]] = [
    ("json target", {"headers": {"X-Amz-Target": "SageMaker.ListHubContents"}}),
    ("empty body", {"method": "GET", "url": "/v1/training-sessions/a/operations/b", "body": b""}),
    ("path to be encoded twice", {"url": "/v1/training-sessions/a%20b%2Fc/operations"}),
    ("path with tilde and colon", {"url": "/a:b~c/%C3%BC"}),
    ("dots and slashes", {"url": "/a/./b//c/../d/"}),
    ("query out of order", {"method": "GET", "url": "/?b=2&a=1&a=0&c&d=", "body": b""}),
    ("query with reserved signs", {"method": "GET", "url": "/?k=a%2Fb%20c%3D&~x=-._", "body": b""}),
    ("header with spaces", {"headers": {"X-Thing": "  a   b  "}}),
    ("date header", {"headers": {"Date": "Mon, 30 Nov 2026 00:00:00 GMT"}}),
    ("large body", {"body": b"x" * 300_000}),
    ("s3 list", {"method": "GET", "url": "/", "body": b"", "service": "s3"}),
    ("s3 key encoded once", {"method": "GET", "url": "/data/a%20b/./c//d", "body": b"", "service": "s3"}),
    ("s3 query", {"method": "POST", "url": "/data?delete", "body": b"<x/>", "service": "s3"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parts"), GOOD, ids=[name for name, _ in GOOD])
def test_what_botocore_signs_is_let_in(name: str, parts: dict[str, Any]) -> None:
    claim = verify(signed(**parts), parts.get("body", b"{}"))
    assert (claim.access_key_id, claim.region) == (KEY_ID, "us-west-2")
    assert claim.service == parts.get("service", "sagemaker")


@settings(max_examples=60, deadline=None)
@given(
    path=st.lists(st.text(alphabet="aZ9-._~%20ü /:+=&", max_size=6), max_size=4),
    query=st.dictionaries(
        st.text(alphabet="ab~", min_size=1, max_size=3), st.text(max_size=5), max_size=3
    ),
    body=st.binary(max_size=50),
    service=st.sampled_from(["sagemaker", "s3"]),
)
def test_any_path_and_query_that_botocore_signs_is_let_in(
    path: list[str], query: dict[str, str], body: bytes, service: str
) -> None:
    from urllib.parse import quote

    encoded = "/".join(quote(part, safe="~") for part in path)
    text = "&".join(f"{k}={quote(v, safe='-_.~')}" for k, v in query.items())
    url = f"/{encoded}" + (f"?{text}" if text else "")
    verify(signed(url=url, body=body, service=service), body)


def test_a_body_that_the_client_does_not_sign_is_let_in_unseen() -> None:
    for word in ("UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"):
        request = signed(headers={"X-Amz-Content-SHA256": word})
        verify(request, b"whatever")


def sign_again(request: SignedRequest, key: bytes) -> SignedRequest:
    """Sign what botocore would never send."""
    claim = sigv4.read_claim(request)
    payload = request.value("x-amz-content-sha256") or hashlib.sha256(b"{}").hexdigest()
    canonical = sigv4.canonical_request(request, claim, payload)
    signature = sigv4.sign(key, sigv4.string_to_sign(claim, canonical))
    header = (request.value("authorization") or "").replace(claim.signature, signature)
    return changed(request, authorization=header)


def key_of(request: SignedRequest) -> bytes:
    claim = sigv4.read_claim(request)
    return sigv4.signing_key(SECRET, claim.date, claim.region, claim.service)


def fault_of(request: SignedRequest, body: bytes = b"{}", secret: str = SECRET) -> str:
    with pytest.raises(SignatureError) as caught:
        verify(request, body, secret)
    assert caught.value.message
    assert SECRET not in caught.value.message
    return caught.value.fault


def test_what_was_changed_after_it_was_signed_is_refused() -> None:
    request = signed(url="/a?x=1", headers={"X-Amz-Target": "SageMaker.A"})
    moved = {"method": request.method, "path": request.path, "query": request.query}
    for part, value in (("method", "PUT"), ("path", "/b"), ("query", "x=2"), ("query", "")):
        other = SignedRequest(**{**moved, part: value}, headers=request.headers)  # type: ignore[arg-type]
        assert fault_of(other) == "signature", part
    assert fault_of(request, b"{ }") == "signature"
    assert fault_of(changed(request, host="elsewhere")) == "signature"
    assert fault_of(changed(request, x_amz_target="SageMaker.B")) == "signature"
    assert fault_of(request, secret=SECRET + "x") == "signature"
    other_body = signed(headers={"X-Amz-Content-SHA256": hashlib.sha256(b"other").hexdigest()})
    assert fault_of(other_body) == "body_hash"


def test_the_signature_does_not_depend_on_the_order_or_the_count_of_headers() -> None:
    request = signed(headers={"X-Thing": "a"})
    verify(changed(request, connection="close", user_agent="x"))
    turned = SignedRequest(
        method=request.method,
        path=request.path,
        query=request.query,
        headers=list(reversed(request.headers)),
    )
    verify(turned)
    twice = SignedRequest(
        method=request.method,
        path=request.path,
        query=request.query,
        headers=[*request.headers, ("x-thing", "b")],
    )
    assert fault_of(twice) == "signature"
    verify(sign_again(twice, key_of(twice)))


HEADER = (
    f"AWS4-HMAC-SHA256 Credential={KEY_ID}/20261130/us-west-2/sagemaker/aws4_request, "
    f"SignedHeaders=host;x-amz-date, Signature={'0' * 64}"
)


@pytest.mark.parametrize(
    ("authorization", "fault"),
    [
        (None, "missing"),
        ("", "missing"),
        ("Bearer sagemaker-api-key-abc", "missing"),
        (HEADER.replace("SHA256", "SHA1"), "missing"),
        ("AWS4-HMAC-SHA256", "malformed"),
        (HEADER.replace("aws4_request", "aws3_request"), "malformed"),
        (HEADER.replace("/us-west-2", ""), "malformed"),
        (HEADER.replace("0" * 64, "0" * 63), "malformed"),
        (HEADER.replace("0" * 64, "G" * 64), "malformed"),
        (HEADER.replace(KEY_ID, ""), "malformed"),
        (HEADER.replace("host;", ""), "malformed"),
        (HEADER.replace("host;", "host;x-gone;"), "malformed"),
        (HEADER.replace("host;x-amz-date", "HOST;x-amz-date"), "malformed"),
        (HEADER.replace(";x-amz-date", ""), "malformed"),
        (HEADER.replace("20261130", "20261129"), "malformed"),
        ("AWS4-HMAC-SHA256 " + "," * 5000, "malformed"),
    ],
)
def test_a_header_that_is_not_as_it_must_be_is_refused(
    authorization: str | None, fault: str
) -> None:
    request = changed(signed(), authorization=authorization, x_amz_date="20261130T070000Z")
    assert fault_of(request) == fault


@pytest.mark.parametrize("date", ["", "yesterday", "20261399T070000Z", "2026-11-30T07:00:00Z"])
def test_a_date_that_cannot_be_read_is_refused(date: str) -> None:
    assert fault_of(changed(signed(), x_amz_date=date)) == "malformed"
    assert fault_of(changed(signed(), x_amz_date=None, date=date)) == "malformed"


def test_every_amz_header_must_be_signed() -> None:
    assert (
        fault_of(changed(signed(), x_amz_target="SageMaker.DeleteTrainingSession")) == "malformed"
    )


def test_a_clock_may_be_off_by_five_minutes_either_way() -> None:
    claim = sigv4.read_claim(signed())
    at = datetime.strptime(claim.timestamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    for seconds in (-299, 0, 299):
        sigv4.check_clock(claim, at + timedelta(seconds=seconds))
    for seconds in (-301, 301, 86_400):
        with pytest.raises(SignatureError, match="set the client's clock") as caught:
            sigv4.check_clock(claim, at + timedelta(seconds=seconds))
        assert caught.value.fault == "skew"
