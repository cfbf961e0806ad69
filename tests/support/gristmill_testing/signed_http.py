"""Any request at all, with a valid signature: for what official clients would never send."""

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode, urlsplit

from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedClient:
    """One connection for each request. `timeout_s` bounds connecting and every read."""

    url: str
    key_id: str
    secret: str
    region: str = "us-west-2"
    timeout_s: float = 10.0

    def send(
        self,
        service: str,
        method: str,
        path: str = "/",
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Answer:
        """`path` and `query` are not encoded yet. Raises TimeoutError if no answer comes in time."""
        encoded = quote(path.encode("utf-8", "surrogatepass"), safe="/~")
        asked = urlencode(query or {}, errors="surrogatepass", quote_via=quote)
        target = f"{encoded}?{asked}" if asked else encoded
        request = AWSRequest(method, self.url + target, dict(headers or {}), body)
        signer = S3SigV4Auth if service == "s3" else SigV4Auth
        signer(Credentials(self.key_id, self.secret), service, self.region).add_auth(request)
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            str(parts.hostname), parts.port, timeout=self.timeout_s
        )
        try:
            connection.request(method, target, body, dict(request.headers.items()))
            response = connection.getresponse()
            return Answer(status=response.status, headers=response.headers, body=response.read())
        finally:
            connection.close()
