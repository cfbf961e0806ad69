"""The front door: every public request is bounded, authenticated, answered and counted here."""

import asyncio
import hashlib
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError, OverloadedError
from gristmill_gateway import sigv4
from gristmill_gateway.auth import Authenticator
from gristmill_gateway.body import BodyReader, ClientGoneError
from gristmill_gateway.call import Call, Wire
from gristmill_gateway.metrics import Metrics
from gristmill_gateway.sigv4 import SignedRequest

logger = logging.getLogger(__name__)

HASHED_INLINE_BYTES_MAX: Final = 256 * 2**10
"""A larger body is hashed in a thread: it takes longer than a hop to one."""
CLIENT_CLOSED_REQUEST: Final = 499


@dataclass(slots=True, kw_only=True)
class FrontDoor:
    """`control`, `runtime` and `s3` share the port; the credential's scope and the target tell them apart."""

    authenticator: Authenticator
    control: Wire
    runtime: Wire
    s3: Wire
    metrics: Metrics
    trust_forwarded_host: bool = False
    """Signatures are over X-Forwarded-Host where there is one."""
    bodies: BodyReader = field(default_factory=BodyReader)
    open_requests: int = 0

    async def answer(self, connection: Request) -> Response:
        started = time.perf_counter()
        call = Call(
            request=signed_request(connection, trust_forwarded_host=self.trust_forwarded_host),
            request_id=str(uuid.uuid4()),
            connection=connection,
        )
        wire = self._wire(call.request)
        operation = wire.operation(call)
        self.open_requests += 1
        self.metrics.open_requests.set(self.open_requests)
        try:
            response = await self._answer(wire, call, operation)
        finally:
            self.open_requests -= 1
            self.metrics.open_requests.set(self.open_requests)
        self.metrics.requests.labels(operation, str(response.status_code)).inc()
        self.metrics.seconds.labels(operation).observe(time.perf_counter() - started)
        return response

    async def _answer(self, wire: Wire, call: Call, operation: str) -> Response:
        extra = {"request_id": call.request_id, "operation": operation}
        try:
            return await self._admitted(wire, call)
        except GristmillError as error:
            response = wire.refuse(call, error)
            refusal = {"code": error.code, "status": response.status_code, "reason": error.message}
            logger.info("request_refused", extra=extra | refusal)
            return response
        except ClientGoneError:
            logger.info("client_gone", extra=extra)
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception:  # The outermost handler: the client gets its protocol's error.
            logger.exception("request_crashed", extra=extra)
            return wire.refuse(call, None)

    async def _admitted(self, wire: Wire, call: Call) -> Response:
        if self.open_requests > limits.OPEN_REQUESTS_MAX:
            raise OverloadedError(
                f"{self.open_requests} requests are open, and at most {limits.OPEN_REQUESTS_MAX} may be; "
                "try again shortly"
            )
        as_of = time.monotonic()
        claim, key = await self.authenticator.admit(call.request, as_of)
        body = await self.bodies.read(call.connection, wire.body_bytes_max(call))
        try:
            caller = await self.authenticator.prove(
                call.request, claim, key, await _sha256(body), as_of
            )
            return await wire.answer(call, caller, body)
        finally:
            self.bodies.release(body)

    def _wire(self, request: SignedRequest) -> Wire:
        if sigv4.scope_service(request.headers) == "s3":
            return self.s3
        if request.path in ("", "/") or request.value("x-amz-target") is not None:
            return self.control
        return self.runtime


def signed_request(connection: Request, *, trust_forwarded_host: bool = False) -> SignedRequest:
    """The request as the client signed it, nothing decoded.

    trust_forwarded_host: Host is what a proxy before us says that it was.
    """
    scope = connection.scope
    raw_path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"]]
    forwarded = next((value for name, value in headers if name == "x-forwarded-host"), "")
    if trust_forwarded_host and forwarded:
        # A chain of proxies appends: the first is what the client said.
        host = forwarded.partition(",")[0].strip()
        headers = [(name, host if name == "host" else value) for name, value in headers]
    return SignedRequest(
        method=scope["method"],
        path=raw_path.partition(b"?")[0].decode("latin-1"),
        query=scope["query_string"].decode("latin-1"),
        headers=headers,
    )


async def _sha256(body: bytes) -> str:
    if len(body) <= HASHED_INLINE_BYTES_MAX:
        return hashlib.sha256(body).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(body).hexdigest())
