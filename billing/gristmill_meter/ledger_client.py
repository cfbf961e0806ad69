"""The ledger over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Final, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from gristmill_contracts import limits
from gristmill_contracts.body_crc import CRC_HEADER, crc_of
from gristmill_contracts.budgets import (
    Lease,
    LeaseAnswer,
    OpenLease,
    Renewed,
    ReturnLease,
    TakeLease,
)
from gristmill_contracts.cluster_http import ArtifactInfo, ArtifactPage, HeartbeatAnswer
from gristmill_contracts.errors import InvalidRequestError, NotFoundError, error_from
from gristmill_contracts.http import (
    ATTEMPT_HEADER,
    CONTENT_TYPE,
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    SESSION_HEADER,
    SHA256_HEADER,
    Checkpoint,
    Empty,
    Heartbeat,
    Problem,
    ProducerCursor,
    RegisterCheckpoint,
    RegisterProducer,
    UsageBatch,
)
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.inbox import AckInbox, ArchiveOperations, ClaimInbox, InboxPage
from gristmill_meter.ports import LedgerAwayError, Owner, SequenceGapError

T = TypeVar("T")

TIMEOUT_S: Final = 15.0
ARTIFACT_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=60.0)
"""A file takes as long as it takes; silence does not. The ledger syncs a file before it answers."""
_lease_answers: Final = msgspec.msgpack.Decoder(LeaseAnswer)
NO_ROUTE: Final = "is not a route"
"""What a ledger of the release before says to questions about budgets: it knows none."""
UNBOUNDED: Final = Lease(id="", expires_in_s=limits.BUDGET_ASK_S, prices={}, holds=[], version=0)
_AWAY_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


def read_secret(path: Path) -> str:
    """The secret in a file. Raises InvalidRequestError where there is none."""
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise InvalidRequestError(
            f"producer_secret_file {path} cannot be read: {error.strerror}; mount the attempt's Secret"
        ) from error
    if not secret:
        raise InvalidRequestError(
            f"producer_secret_file {path} is empty; mount the attempt's Secret"
        )
    return secret


class LedgerClient:
    """Implements `ports.Ledger`. Call `open` in the event loop, and `close` at the end.

    `secret`: what the ledger of a cluster asks for; it is of one attempt of one session.
    """

    def __init__(self, base_url: str, secret: str = "") -> None:
        self.base_url = base_url.rstrip("/")
        self.secret = secret
        self.http: aiohttp.ClientSession | None = None

    def open(self) -> None:
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))

    async def close(self) -> None:
        if self.http is not None:
            await self.http.close()

    async def register_producer(self, request: RegisterProducer) -> ProducerCursor:
        headers = self.headers(request.session, request.attempt)
        return await self._post("/v1/producers", request, ProducerCursor, headers)

    async def post_batch(self, batch: UsageBatch, attempt: int) -> ProducerCursor:
        content = msgspec.msgpack.encode(batch)
        headers = self.headers(batch.producer, attempt) | {CRC_HEADER: crc_of(content)}
        read = await self._call("POST", "/v1/usage/batches", content, headers)
        return msgspec.msgpack.decode(read, type=ProducerCursor)

    async def register_checkpoint(self, request: RegisterCheckpoint, attempt: int) -> Checkpoint:
        headers = self.headers(request.session, attempt)
        return await self._post("/v1/checkpoints", request, Checkpoint, headers)

    async def post_heartbeats(self, heartbeats: list[Heartbeat]) -> HeartbeatAnswer:
        first = heartbeats[0].view
        headers = self.headers(first.uid, first.attempt)
        return await self._post("/v1/heartbeats", heartbeats, HeartbeatAnswer, headers)

    async def claim_inbox(self, uid: SessionUid, request: ClaimInbox) -> InboxPage:
        headers = self.headers(uid, request.attempt)
        return await self._post(_session_path(uid, "inbox/claim"), request, InboxPage, headers)

    async def ack_inbox(self, uid: SessionUid, request: AckInbox) -> None:
        headers = self.headers(uid, request.attempt)
        await self._post(_session_path(uid, "inbox/ack"), request, Empty, headers)

    async def archive(self, uid: SessionUid, request: ArchiveOperations) -> None:
        headers = self.headers(uid, request.attempt)
        await self._post(_session_path(uid, "archive"), request, Empty, headers)

    async def take_lease(self, request: TakeLease) -> LeaseAnswer:
        headers = self.headers(request.session, request.attempt)
        try:
            content = msgspec.msgpack.encode(request)
            return _lease_answers.decode(await self._call("POST", "/v1/leases", content, headers))
        except NotFoundError as error:
            if NO_ROUTE not in error.message:
                raise
            return UNBOUNDED

    async def return_lease(self, lease: str, request: ReturnLease) -> None:
        headers = self.headers(request.session, request.attempt)
        await self._post(f"/v1/leases/{quote(lease, safe='')}/return", request, Renewed, headers)

    async def open_leases(self, uid: SessionUid, attempt: int) -> list[OpenLease]:
        path = f"/v1/leases?session={quote(uid, safe='')}"
        try:
            read = await self._call("GET", path, None, self.headers(uid, attempt))
            return msgspec.msgpack.decode(read, type=list[OpenLease])
        except NotFoundError as error:
            if NO_ROUTE not in error.message:
                raise
            return []

    async def artifact_sha256(self, owner: Owner, key: str) -> str | None:
        async with self._artifact("HEAD", owner, key) as response:
            if response.status == 404:
                return None
            if response.status >= 400:
                raise LedgerAwayError(
                    f"the ledger at {self.base_url} answered {response.status} about artifact {key}"
                )
            return response.headers.get(SHA256_HEADER)

    async def put_artifact(self, owner: Owner, key: str, file: BinaryIO, sha256: str) -> None:
        async with self._artifact("PUT", owner, key, file, {SHA256_HEADER: sha256}) as response:
            await self._check(response)

    async def list_artifacts(self, owner: Owner, prefix: str) -> list[ArtifactInfo]:
        found: list[ArtifactInfo] = []
        after: str | None = ""
        while after is not None and len(found) <= limits.ARTIFACT_FILES_MAX:
            query = f"?prefix={quote(prefix, safe='')}&after={quote(after, safe='')}"
            async with self._artifact("GET", owner, query) as response:
                await self._check(response)
                page = msgspec.msgpack.decode(await response.read(), type=ArtifactPage)
            found += page.artifacts
            after = page.next_after
        return found

    async def read_artifact(self, owner: Owner, key: str) -> AsyncIterator[bytes]:
        async with self._artifact("GET", owner, key) as response:
            await self._check(response)
            async for chunk in response.content.iter_chunked(limits.ARTIFACT_CHUNK_BYTES):
                yield chunk

    @asynccontextmanager
    async def _artifact(
        self,
        method: str,
        owner: Owner,
        key: str,
        file: BinaryIO | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A call about one file, or about a list where `key` is a query string."""
        path = key if key.startswith("?") else "/" + quote(key, safe="/")
        url = URL(f"{self.base_url}/v1/artifacts/{owner.tenant}{path}", encoded=True)
        own = self.headers(owner.session, owner.attempt) | (headers or {})
        try:
            async with self._http.request(
                method, url, data=file, headers=own, timeout=ARTIFACT_TIMEOUT
            ) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise away(self.base_url, error) from error

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status >= 400:
            raise error_of(await response.read(), response.status, self.base_url)

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self.http is None:
            raise RuntimeError("the ledger client was used before open()")
        return self.http

    def headers(self, uid: str, attempt: int) -> dict[str, str]:
        """Who speaks, for which attempt, and in which version."""
        headers = {
            "Content-Type": CONTENT_TYPE,
            PROTOCOL_HEADER: str(PROTOCOL_VERSION),
            SESSION_HEADER: uid,
            ATTEMPT_HEADER: str(attempt),
        }
        return headers | ({"Authorization": f"Bearer {self.secret}"} if self.secret else {})

    async def _post(self, path: str, body: object, answer: type[T], headers: dict[str, str]) -> T:
        read = await self._call("POST", path, msgspec.msgpack.encode(body), headers)
        return msgspec.msgpack.decode(read, type=answer)

    async def _call(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str]
    ) -> bytes:
        """The body of a good answer. Raises what the ledger reported, or LedgerAwayError."""
        try:
            async with self._http.request(
                method, self.base_url + path, data=content, headers=headers
            ) as response:
                read = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise away(self.base_url, error) from error
        if status >= 400:
            raise error_of(read, status, self.base_url)
        return read


def _session_path(uid: SessionUid, what: str) -> str:
    return f"/v1/sessions/{quote(uid, safe='')}/{what}"


def away(base_url: str, error: Exception) -> LedgerAwayError:
    return LedgerAwayError(f"the ledger at {base_url} is away: {type(error).__name__}: {error}")


def error_of(body: bytes, status: int, base_url: str) -> Exception:
    try:
        problem = msgspec.msgpack.decode(body, type=Problem)
    except msgspec.MsgspecError:
        problem = Problem(code="internal", message=f"answered {status} without a problem body")
    if problem.expected_seq is not None:
        return SequenceGapError(problem.message, problem.expected_seq)
    if problem.retryable or status in _AWAY_STATUSES:
        return LedgerAwayError(f"the ledger at {base_url} cannot answer now: {problem.message}")
    return error_from(problem.code, problem.message)
