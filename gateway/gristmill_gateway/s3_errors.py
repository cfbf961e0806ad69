"""The errors of the S3 wire and their statuses. The only such table for this wire."""

from typing import Final

from gristmill_contracts.errors import GristmillError
from gristmill_gateway import s3_xml

STATUSES: Final[dict[str, int]] = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "BadDigest": 400,
    "EntityTooLarge": 400,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidBucketName": 400,
    "InvalidDigest": 400,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "MalformedXML": 400,
    "MethodNotAllowed": 405,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "TooManyBuckets": 400,
    "XAmzContentSHA256Mismatch": 400,
}
_CODES: Final[dict[str, str]] = {
    "access_denied": "AccessDenied",
    "conflict": "InvalidRequest",
    "forbidden": "AccessDenied",
    "invalid_request": "InvalidArgument",
    "not_found": "NoSuchKey",
    "unauthenticated": "AccessDenied",
}
"""Codes of our own tree; anything else is ServiceUnavailable, which clients try again."""


class S3RefusalError(GristmillError):
    """A request refused with a code of this wire."""

    code = "s3_refused"

    def __init__(self, s3_code: str, message: str) -> None:
        super().__init__(message)
        self.s3_code = s3_code


def s3_code_of(error: GristmillError) -> str:
    if isinstance(error, S3RefusalError):
        return error.s3_code
    return _CODES.get(error.code, "ServiceUnavailable")


def error_body(code: str, message: str, resource: str, request_id: str) -> bytes:
    """The XML of an error. It has no namespace on this wire."""
    content: list[tuple[str, object]] = [
        ("Code", code), ("Message", message), ("Resource", resource), ("RequestId", request_id),
    ]  # fmt: skip
    return s3_xml.render("Error", content, namespace="")
