"""Asks the ledger: accounts, checkpoint groups, checkpoints, usage. Keeps nothing."""

import json
from http import HTTPStatus
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from gristmill_contracts import secrets
from gristmill_contracts.errors import GristmillError, UnavailableError, error_from
from gristmill_contracts.http import (
    CONTENT_TYPE,
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    SERVICE_HEADER,
    Checkpoint,
    CheckpointGroup,
    CheckpointPage,
    CreateGroup,
    Empty,
    OperationView,
    Problem,
    Submitted,
    TenantAccount,
)
from gristmill_contracts.ids import OpId, SessionUid
from gristmill_contracts.inbox import CloseInbox, InboxView, PostInbox
from gristmill_contracts.usage import TOKEN_TYPES, Counts

T = TypeVar("T")

ANSWER_TIMEOUT_S = 15.0


class LedgerClient:
    """The ledger's routes for a gateway. `http_session` belongs to the caller, who closes it.

    Every method raises UnavailableError if the ledger cannot be reached or answers nonsense, and
    else what the ledger reported, from the tree in `contracts.errors`.
    """

    def __init__(
        self, http_session: aiohttp.ClientSession, base_url: str, cluster_key: bytes | None = None
    ) -> None:
        """cluster_key: of a cluster, whose ledger asks its callers for their secret."""
        self._http = http_session
        self._base_url = base_url.rstrip("/")
        self._headers = {
            "Content-Type": CONTENT_TYPE,
            PROTOCOL_HEADER: str(PROTOCOL_VERSION),
            **service_headers(cluster_key),
        }

    async def put_tenant(self, tenant: str) -> TenantAccount:
        """The tenant's account; the first call allocates its 12-digit id."""
        return await self._ask("PUT", f"/v1/tenants/{_part(tenant)}", TenantAccount)

    async def create_group(self, group: CreateGroup) -> CheckpointGroup:
        """Raises ConflictError if there is one of that name."""
        return await self._ask("POST", "/v1/checkpoint-groups", CheckpointGroup, message=group)

    async def get_group(self, tenant: str, name: str) -> CheckpointGroup:
        """Raises NotFoundError."""
        path = f"/v1/checkpoint-groups/{_part(tenant)}/{_part(name)}"
        return await self._ask("GET", path, CheckpointGroup)

    async def list_checkpoints(
        self,
        tenant: str,
        *,
        group: str | None,
        after: str | None,
        limit: int,
        order: Literal["asc", "desc"],
    ) -> CheckpointPage:
        """Checkpoints by time of creation, deleted ones left out. `group=None`: of all groups."""
        query = {"tenant": tenant, "limit": str(limit), "order": order}
        query |= {name: value for name, value in (("group", group), ("after", after)) if value}
        return await self._ask("GET", "/v1/checkpoints", CheckpointPage, query=query)

    async def get_checkpoint(self, tenant: str, group: str, version: int) -> Checkpoint:
        """Raises NotFoundError, also for a deleted one."""
        return await self._ask("GET", _checkpoint_path(tenant, group, version), Checkpoint)

    async def delete_checkpoint(self, tenant: str, group: str, version: int) -> None:
        """Raises NotFoundError, also for one that is deleted already."""
        await self._ask("DELETE", _checkpoint_path(tenant, group, version), Empty)

    async def session_usage(self, tenant: str, session_uid: str) -> Counts | None:
        """The tokens posted for a session so far; None where the ledger holds unknown usage alone."""
        query = {"tenant": tenant, "session": session_uid}
        answer = await self.exchange("GET", "/v1/usage", query=query)
        try:
            return _counts(json.loads(answer))
        except (ValueError, TypeError, KeyError) as error:
            raise _nonsense("/v1/usage", error) from error

    async def post_inbox(self, uid: SessionUid, post: PostInbox) -> Submitted:
        """Raises ServedError where the session's meter serves."""
        return await self._ask("POST", f"/v1/sessions/{_part(uid)}/inbox", Submitted, message=post)

    async def view_inbox(self, uid: SessionUid) -> InboxView:
        return await self._ask("GET", f"/v1/sessions/{_part(uid)}/inbox", InboxView)

    async def close_inbox(self, uid: SessionUid, message: CloseInbox) -> None:
        path = f"/v1/sessions/{_part(uid)}/inbox/close"
        await self._ask("POST", path, Empty, message=message)

    async def archived(self, operation: OpId) -> OperationView:
        """Raises NotFoundError."""
        uid, stream, number = operation
        path = f"/v1/sessions/{_part(uid)}/archive/{stream}/{number}"
        return await self._ask("GET", path, OperationView)

    async def _ask(
        self,
        method: str,
        path: str,
        shape: type[T],
        *,
        query: dict[str, str] | None = None,
        message: msgspec.Struct | None = None,
    ) -> T:
        data = None if message is None else msgspec.msgpack.encode(message)
        answer = await self.exchange(method, path, query=query, data=data)
        try:
            return msgspec.msgpack.decode(answer, type=shape)
        except msgspec.DecodeError as error:
            raise _nonsense(path, error) from error

    async def exchange(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        """The body of an answer. path: percent-encoded."""
        try:
            async with self._http.request(
                method,
                self._base_url + path,
                params=query,
                data=data,
                headers=self._headers | (headers or {}),
                timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S),
            ) as response:
                answer = await response.read()
                if response.ok:
                    return answer
                raise _reported(path, response.status, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(
                f"the ledger at {self._base_url} did not answer {path} ({type(error).__name__}); "
                "try again shortly"
            ) from error


def service_headers(cluster_key: bytes | None) -> dict[str, str]:
    """What a gateway shows the ledger; nothing where no cluster key is."""
    if cluster_key is None:
        return {}
    secret = secrets.service_secret(cluster_key, "gateway")
    return {"Authorization": f"Bearer {secret}", SERVICE_HEADER: "gateway"}


def _part(name: str) -> str:
    return quote(name, safe="")


def _checkpoint_path(tenant: str, group: str, version: int) -> str:
    return f"/v1/checkpoints/{_part(tenant)}/{_part(group)}/{version}"


def _reported(path: str, status: int, answer: bytes) -> GristmillError:
    try:
        # /v1/usage speaks JSON, also of its problems.
        decode = msgspec.json.decode if answer.startswith(b"{") else msgspec.msgpack.decode
        problem: Problem = decode(answer, type=Problem)
    except msgspec.DecodeError as error:
        return _nonsense(path, f"status {status}: {error}")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        # It is about us, and no client can do anything about it.
        return UnavailableError(
            f"the ledger refuses this gateway on {path}: {problem.message}; both must have one cluster key"
        )
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return UnavailableError(f"the ledger failed on {path}: {problem.message}")
    return error_from(problem.code, problem.message)


def _nonsense(path: str, reason: object) -> UnavailableError:
    return UnavailableError(f"the ledger's answer to {path} could not be read ({reason})")


def _counts(answer: dict[str, Any]) -> Counts | None:  # Any: the ledger's JSON
    rows = answer["rows"]
    if not rows:
        return Counts()
    tokens = {name: rows[0][name] for name in TOKEN_TYPES}
    return None if None in tokens.values() else Counts(**tokens)
