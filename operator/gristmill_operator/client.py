"""The operator's own client of the API server: few connections, a bounded rate, typed errors."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
import msgspec

from gristmill_contracts import labels
from gristmill_contracts.errors import (
    ConflictError,
    GristmillError,
    NotFoundError,
    UnavailableError,
)
from gristmill_operator.bucket import TokenBucket
from gristmill_operator.kinds import Kind
from gristmill_operator.problems import GoneError, ThrottledError, problem_of
from gristmill_operator.seams import Json

JSON_TYPE: Final = "application/json"
APPLY_TYPE: Final = "application/apply-patch+yaml"
MERGE_TYPE: Final = "application/merge-patch+json"
PATCH_TYPE: Final = "application/json-patch+json"
NAMES_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
PAGE: Final = 500
READ_TRIES: Final = 3
"""A read that met 429 or a broken connection is sent again; a write is not: its caller looks first."""
THROTTLED_PAUSE_S: Final = 1.0

Counted = Callable[[str, str, float], None]
"""Told of each request: verb, status ("error" without one), seconds."""
Fence = Callable[[], float]
"""Seconds for which this process may write; raises NotLeaderError when it may not."""


def unfenced() -> float:
    return float("inf")


def ignore_count(verb: str, code: str, seconds: float) -> None:
    """Nobody counts."""


@dataclass(slots=True, kw_only=True)
class ApiClient:
    """One call, one request, but for reads that are tried again. Errors: `problems`."""

    http: aiohttp.ClientSession
    server: str
    bucket: TokenBucket
    timeout_s: float = 30.0
    fence: Fence = unfenced
    count: Counted = ignore_count

    # --- reads -----------------------------------------------------------------------------------

    async def get(self, kind: Kind, namespace: str, name: str) -> Json:
        return await self._read("get", kind.path(namespace, name), f"get {kind.plural} {name}")

    async def list(self, kind: Kind, namespace: str = "", *, selector: str = "") -> Sequence[Json]:
        return (await self._pages(kind, namespace, selector, JSON_TYPE))[0]

    async def list_metadata(self, kind: Kind) -> tuple[Sequence[Json], str]:
        """Metadata alone of all of a kind that are ours, and the version of the list."""
        return await self._pages(kind, "", kind.selector, NAMES_ONLY)

    async def raw(self, path: str) -> Json:
        """Any path, as /version."""
        return await self._read("get", path, f"get {path}")

    async def _pages(
        self, kind: Kind, namespace: str, selector: str, accept: str
    ) -> tuple[Sequence[Json], str]:
        """All of one version. Anew where the server stopped keeping that before the last page was read."""
        for _ in range(READ_TRIES - 1):
            try:
                return await self._pages_once(kind, namespace, selector, accept)
            except GoneError:
                continue
        return await self._pages_once(kind, namespace, selector, accept)

    async def _pages_once(
        self, kind: Kind, namespace: str, selector: str, accept: str
    ) -> tuple[Sequence[Json], str]:
        found: list[Json] = []
        parameters = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self._read(
                "list",
                kind.path(namespace),
                f"list {kind.plural}",
                parameters=parameters,
                accept=accept,
            )
            found += page.get("items") or ()
            more = page["metadata"].get("continue")
            if not more:
                return found, page["metadata"].get("resourceVersion", "")
            parameters["continue"] = more

    # --- writes ----------------------------------------------------------------------------------

    async def create(self, kind: Kind, body: Json) -> Json:
        meta = body["metadata"]
        return await self._write(
            "create",
            "POST",
            kind.path(meta.get("namespace", "")),
            f"create {kind.plural} {_named(meta)}",
            body={"apiVersion": kind.api_version, "kind": kind.kind, **body},
            parameters={"fieldManager": labels.FIELD_MANAGER},
        )

    async def review(self, kind: Kind, body: Json) -> Json:
        """Create an object that is a question (an access review): no leadership is needed."""
        return await self._send(
            "create",
            "POST",
            kind.path(body["metadata"].get("namespace", "")),
            f"ask {kind.plural}",
            body={"apiVersion": kind.api_version, "kind": kind.kind, **body},
        )

    async def apply(self, kind: Kind, body: Json, *, subresource: str = "") -> Json:
        meta = body["metadata"]
        return await self._write(
            "apply",
            "PATCH",
            kind.path(meta.get("namespace", ""), meta["name"], subresource),
            f"apply {kind.plural} {_named(meta)}",
            body={"apiVersion": kind.api_version, "kind": kind.kind, **body},
            content=APPLY_TYPE,
            parameters={"fieldManager": labels.FIELD_MANAGER, "force": "true"},
        )

    async def merge_patch(
        self, kind: Kind, namespace: str, name: str, patch: Json, *, subresource: str = ""
    ) -> Json:
        return await self._write(
            "patch",
            "PATCH",
            kind.path(namespace, name, subresource),
            f"patch {kind.plural} {namespace}/{name}",
            body=patch,
            content=MERGE_TYPE,
            parameters={"fieldManager": labels.FIELD_MANAGER},
        )

    async def json_patch(
        self, kind: Kind, namespace: str, name: str, operations: Sequence[Json]
    ) -> Json:
        return await self._write(
            "patch",
            "PATCH",
            kind.path(namespace, name),
            f"patch {kind.plural} {namespace}/{name}",
            body=list(operations),
            content=PATCH_TYPE,
            parameters={"fieldManager": labels.FIELD_MANAGER},
        )

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str,
        grace_s: int | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
    ) -> Json | None:
        """What the server answered; None if no object with this uid is there."""
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": propagation,
        }
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        what = f"delete {kind.plural} {namespace}/{name}"
        try:
            return await self._write(
                "delete", "DELETE", kind.path(namespace, name), what, body=options
            )
        except NotFoundError:
            return None
        except ConflictError as error:
            if "UID" in error.message:
                return None
            raise

    # --- the wire --------------------------------------------------------------------------------

    async def _read(
        self,
        verb: str,
        path: str,
        what: str,
        *,
        parameters: Mapping[str, str] | None = None,
        accept: str = JSON_TYPE,
    ) -> Json:
        for left in range(READ_TRIES - 1, -1, -1):
            try:
                return await self._send(
                    verb, "GET", path, what, parameters=parameters, accept=accept
                )
            except (UnavailableError, ThrottledError) as error:
                if not left:
                    raise
                await asyncio.sleep(_pause_s(error))
        raise AssertionError("the last try returns or raises")

    async def _write(
        self,
        verb: str,
        method: str,
        path: str,
        what: str,
        *,
        body: Any,  # Any: JSON
        content: str = JSON_TYPE,
        parameters: Mapping[str, str] | None = None,
    ) -> Json:
        self.fence()
        return await self._send(
            verb, method, path, what, body=body, content=content, parameters=parameters, fenced=True
        )

    async def _send(
        self,
        verb: str,
        method: str,
        path: str,
        what: str,
        *,
        body: Any = None,  # Any: JSON
        content: str = JSON_TYPE,
        accept: str = JSON_TYPE,
        parameters: Mapping[str, str] | None = None,
        fenced: bool = False,
    ) -> Json:
        await self.bucket.take()
        # A write must have ended before the Lease may go to somebody else.
        room_s = self.fence() if fenced else float("inf")
        started, code = time.monotonic(), "error"
        try:
            async with self.http.request(
                method,
                self.server + path,
                data=None if body is None else msgspec.json.encode(body),
                params=parameters,
                headers={"Content-Type": content, "Accept": accept},
                timeout=aiohttp.ClientTimeout(total=min(self.timeout_s, room_s)),
                allow_redirects=False,
            ) as response:
                answer = await response.read()
                code = str(response.status)
                if not response.ok:
                    raise problem_of(
                        what, response.status, answer, response.headers.get("Retry-After")
                    )
                parsed: Json = msgspec.json.decode(answer)
                return parsed
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise UnavailableError(
                f"the API server did not answer, or not in full, to {what} "
                f"({type(error).__name__}); it is tried again"
            ) from error
        finally:
            self.count(verb, code, time.monotonic() - started)


def _named(meta: Json) -> str:
    return f"{meta.get('namespace', '')}/{meta['name']}".lstrip("/")


def _pause_s(error: GristmillError) -> float:
    if isinstance(error, ThrottledError) and error.retry_after_s is not None:
        return error.retry_after_s
    return THROTTLED_PAUSE_S
