"""The API server over HTTP: requests, lists and watches, with the pod's own credentials.

aiohttp and no client library: five requests are all we need, and a library would bring a second HTTP
stack, threads and a model of every kind there is.
"""

import asyncio
import json
import logging
import os
import random
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError, InvalidRequestError, UnavailableError
from gristmill_gateway.kubernetes_errors import GoneError, QuotaBusyError, api_error
from gristmill_gateway.kubernetes_objects import Json

logger = logging.getLogger(__name__)

TOKEN_KEPT_S: Final = 60.0
"""A token is a file that is renewed under us."""
JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
_LOST: Final = (aiohttp.ClientError, TimeoutError, OSError)
_RETRIED: Final = frozenset({429, 500, 502, 503, 504})
_RETRY_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAccess:
    """How to reach the API server. ca_file None = the machine's own authorities."""

    url: str
    token_file: Path
    ca_file: Path | None


def api_access(
    url: str, token_file: Path, ca_file: Path | None, environ: Mapping[str, str] = os.environ
) -> ApiAccess:
    """With `url` "" the API server of the cluster that this pod is in. Raises InvalidRequestError."""
    if not url:
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise InvalidRequestError(
                "this process is in no cluster: KUBERNETES_SERVICE_HOST is not set; name the API server "
                "with GRISTMILL_GATEWAY_API_URL"
            )
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return ApiAccess(url=url.rstrip("/"), token_file=token_file, ca_file=ca_file)


def open_api_http(access: ApiAccess) -> aiohttp.ClientSession:
    """Connections of their own: a watch for each kind, and a bounded rest."""
    context: ssl.SSLContext | bool = True
    if access.ca_file is not None and access.url.startswith("https"):
        context = ssl.create_default_context(cafile=str(access.ca_file))
    connector = aiohttp.TCPConnector(limit=limits.API_CONNECTIONS_MAX, ssl=context)
    return aiohttp.ClientSession(connector=connector)


class ApiServer:
    """To be used on one event loop. `http` belongs to the caller, who closes it.

    Every method raises what `kubernetes_errors` makes of the answer, and UnavailableError where there
    was none.
    """

    def __init__(self, http: aiohttp.ClientSession, access: ApiAccess) -> None:
        self._http = http
        self._access = access
        self._token = ""
        self._token_read_at = -TOKEN_KEPT_S

    async def get(self, path: str, query: dict[str, str] | None = None) -> Json:
        return await self._retried("GET", path, query=query)

    async def create(self, path: str, content: Json) -> Json:
        return await self._retried("POST", path, content=content)

    async def patch(self, path: str, changes: Json) -> Json:
        return await self._retried("PATCH", path, content=changes, content_type=MERGE_PATCH)

    async def delete(self, path: str, uid: str) -> Json:
        """Of the object with this uid and no other."""
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
        }
        return await self._retried("DELETE", path, content=options)

    async def watch(
        self, path: str, query: dict[str, str], opened: Callable[[], None]
    ) -> AsyncGenerator[Json, None]:
        """Events, until the API server ends the watch. Raises GoneError where it cannot go on there.

        opened: called once the API server has agreed.

        Without a byte for WATCH_SILENCE_S it is given up: a connection can be dead and not know it.
        """
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=limits.API_TIMEOUT_S, sock_read=limits.WATCH_SILENCE_S
        )
        try:
            async with self._http.get(
                self._access.url + path, params=query, headers=self._headers(), timeout=timeout
            ) as response:
                if not response.ok:
                    raise api_error(response.status, await response.read(), f"watch {path}")
                opened()
                try:
                    async for line in _lines(response.content):
                        yield _event(line)
                finally:
                    _cut(response)
        except _LOST as error:
            raise _away(path, error) from error

    async def _retried(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        content: Json | None = None,
        content_type: str = JSON,
    ) -> Json:
        """What the API server could not take just now is sent again, a few times.

        No answer at all is not retried: the write may have been done, and whoever asked can see.
        """
        for attempt in range(1, limits.API_TRIES_MAX + 1):
            status, answer, after_s = await self._once(method, path, query, content, content_type)
            if status < 400:
                return _document(answer, path)
            error = api_error(status, answer, f"{method} {path}")
            again = status in _RETRIED or isinstance(error, QuotaBusyError)
            if not again or attempt == limits.API_TRIES_MAX:
                raise error
            pause_s = min(1.0, max(after_s, _RETRY_S * 2**attempt))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
        raise UnavailableError(f"the API server did not answer {path}")

    async def _once(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None,
        content: Json | None,
        content_type: str,
    ) -> tuple[int, bytes, float]:
        """Status, body, and what Retry-After asks for in seconds."""
        try:
            async with self._http.request(
                method,
                self._access.url + path,
                params=query,
                data=None if content is None else json.dumps(content).encode(),
                headers=self._headers() | {"Content-Type": content_type},
                timeout=aiohttp.ClientTimeout(total=limits.API_TIMEOUT_S),
            ) as response:
                after = response.headers.get("Retry-After", "0")
                if response.status == 401:
                    self._token_read_at = -TOKEN_KEPT_S
                return (
                    response.status,
                    await response.read(),
                    float(after) if after.isdecimal() else 0.0,
                )
        except _LOST as error:
            raise _away(path, error) from error

    def _headers(self) -> dict[str, str]:
        now = time.monotonic()
        if now - self._token_read_at >= TOKEN_KEPT_S:
            try:
                self._token = self._access.token_file.read_text().strip()
                self._token_read_at = now
            except OSError as error:
                if not self._token:
                    raise UnavailableError(
                        f"the token {self._access.token_file} cannot be read: {error}"
                    ) from error
                logger.warning("token_unreadable", extra={"error": str(error)})
        return {"Authorization": f"Bearer {self._token}", "Accept": JSON}


def _cut(response: aiohttp.ClientResponse) -> None:
    """Close the connection of an answer that was not read to its end, here and now.

    Otherwise TLS waits for the other side to say that it closes too, up to half a minute: for a server that
    hangs, and longer than this process has when it ends.
    """
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for part in content.iter_any():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            if line:
                yield line
        if len(rest) > limits.API_OBJECT_BYTES_MAX:
            raise UnavailableError(f"a watch sent a line of more than {len(rest)} bytes")


def _event(line: bytes) -> Json:
    event = _document(line, "a watch")
    if event.get("type") != "ERROR":
        return event
    problem = event.get("object", {})
    error: GristmillError = api_error(
        int(problem.get("code", 500)), json.dumps(problem).encode(), "watch"
    )
    if isinstance(error, GoneError):
        raise error
    raise UnavailableError(f"a watch ended with an error: {error.message}")


def _document(answer: bytes, path: str) -> Json:
    try:
        document: Any = json.loads(answer)
    except ValueError as error:
        raise UnavailableError(f"the API server's answer to {path} is no JSON") from error
    if not isinstance(document, dict):
        raise UnavailableError(f"the API server's answer to {path} is no object")
    return document


def _away(path: str, error: BaseException) -> UnavailableError:
    return UnavailableError(
        f"the API server did not answer {path} ({type(error).__name__}); try again shortly"
    )
