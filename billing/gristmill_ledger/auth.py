"""Who calls: in a cluster every call shows a secret that derives from the cluster key.

A meter's secret binds it to one attempt of one session; a service's to its name. Without a key (one
machine, loopback) everybody is trusted. Nothing here knows a route but which of them meters may use.
"""

import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from starlette.datastructures import Headers
from starlette.requests import Request

from gristmill_contracts import limits
from gristmill_contracts.errors import ForbiddenError, GristmillError, UnauthenticatedError
from gristmill_contracts.http import (
    ATTEMPT_HEADER,
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    SERVICE_HEADER,
    SESSION_HEADER,
)  # fmt: skip
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.protocol import check_protocol
from gristmill_contracts.secrets import (
    CLUSTER_KEY_BYTES,
    Service,
    producer_secret,
    service_secret,
)  # fmt: skip
from gristmill_ledger.wire import JSON_PATHS, problem

Scope = MutableMapping[str, Any]  # Any: ASGI
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics"})
METER_POSTS: Final = frozenset(
    {
        "/v1/producers",
        "/v1/usage/batches",
        "/v1/cloudevents",
        "/v1/checkpoints",
        "/v1/heartbeats",
    }
)
METER_SESSION_POSTS: Final = re.compile(r"/v1/sessions/[^/]+/(inbox/claim|inbox/ack|archive)")
"""The route sees to it that the session is the meter's own."""
METER_PATHS: Final = ("/v1/artifacts/", "/v1/leases")
"""Where everything is for meters too; as above."""
SERVICES: Final[tuple[Service, ...]] = get_args(Service)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`session` is set for a meter of a cluster, `service` for a service of one; neither: trusted."""

    service: str = ""
    session: str = ""
    attempt: int | None = None
    """Of the meter that calls; None = not told."""

    def check_session(self, uid: str, attempt: int | None = None) -> None:
        """Raise ForbiddenError where a meter speaks for another session or attempt than its own."""
        if self.session and self.session != uid:
            raise ForbiddenError(
                f"the meter of session {self.session} may not speak for session {uid}"
            )
        if self.session and attempt is not None and attempt != self.attempt:
            raise ForbiddenError(
                f"the meter of attempt {self.attempt} of session {uid} may not speak for attempt "
                f"{attempt}"
            )


def caller_of(request: Request) -> Caller:
    """Who sent a request that has passed the gate."""
    caller: Caller = request.scope["gristmill.caller"]
    return caller


def read_cluster_key(path: Path) -> bytes:
    """The key in a file. Raises ValueError for one of another size, OSError if it cannot be read."""
    key = path.read_bytes()
    if len(key) != CLUSTER_KEY_BYTES:
        raise ValueError(
            f"cluster key {path} has {len(key)} bytes, not {CLUSTER_KEY_BYTES}; mount the Secret that "
            "the operator made"
        )
    return key


def identify(key: bytes | None, method: str, path: str, headers: Headers) -> Caller:
    """The caller of a route. Raises UnauthenticatedError, or ForbiddenError for one it may not use."""
    attempt = _attempt(headers.get(ATTEMPT_HEADER))
    if key is None:
        return Caller(attempt=attempt)
    shown = headers.get("authorization", "").encode()
    service, session = headers.get(SERVICE_HEADER), headers.get(SESSION_HEADER)
    if service is not None:
        for name in SERVICES:
            if name == service and _same(shown, service_secret(key, name)):
                return Caller(service=name)
        raise UnauthenticatedError(
            f"the secret of service {service[:40]!r} is wrong; use the one of this cluster's key"
        )
    if session is None or attempt is None:
        raise UnauthenticatedError(
            f"the call shows nobody: send Authorization with {SERVICE_HEADER}, or with "
            f"{SESSION_HEADER} and {ATTEMPT_HEADER}"
        )
    if not _same(shown, producer_secret(key, SessionUid(session), attempt)):
        raise UnauthenticatedError(
            f"the secret of attempt {attempt} of session {session[:63]!r} is wrong"
        )
    if not (method == "POST" and _is_meter_post(path)) and not path.startswith(METER_PATHS):
        raise ForbiddenError(f"a meter may not use {method} {path[:200]}")
    return Caller(session=session, attempt=attempt)


def _is_meter_post(path: str) -> bool:
    return path in METER_POSTS or METER_SESSION_POSTS.fullmatch(path) is not None


def _same(shown: bytes, secret: str) -> bool:
    return hmac.compare_digest(shown, f"Bearer {secret}".encode())


def _attempt(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdecimal()):
        return None
    attempt = int(text[:20])
    return attempt if attempt <= limits.QUANTITY_MAX else None


class Gate:
    """ASGI middleware: no route is reached before its caller is known. Every answer tells our protocol."""

    def __init__(self, app: Asgi, key: Callable[[], bytes | None]) -> None:
        self.app = app
        self.key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def tell(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                version = (PROTOCOL_HEADER.lower().encode(), str(PROTOCOL_VERSION).encode())
                message["headers"] = [*message.get("headers", ()), version]
            await send(message)

        path: str = scope["path"]
        if path not in OPEN_PATHS:
            headers = Headers(scope=scope)
            try:
                scope["gristmill.caller"] = identify(self.key(), scope["method"], path, headers)
                check_protocol(headers.get(PROTOCOL_HEADER))
            except GristmillError as error:
                await problem(error, as_json=path in JSON_PATHS)(scope, receive, tell)
                return
        await self.app(scope, receive, tell)
