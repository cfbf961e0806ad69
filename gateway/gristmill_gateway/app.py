"""Puts the gateway together: one port, one front door, three wires."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import aiohttp
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gristmill_gateway.access import OwnersAccess
from gristmill_gateway.accounts import Accounts
from gristmill_gateway.auth import Authenticator, utc_now
from gristmill_gateway.cluster import Cluster
from gristmill_gateway.directory import Directory
from gristmill_gateway.front import FrontDoor
from gristmill_gateway.inbox import Inbox
from gristmill_gateway.keys import derived_key
from gristmill_gateway.ledger_client import LedgerClient
from gristmill_gateway.meter_client import MeterClient
from gristmill_gateway.meters import Meters
from gristmill_gateway.metrics import Metrics
from gristmill_gateway.s3 import S3Wire
from gristmill_gateway.s3_front import S3Front
from gristmill_gateway.s3_ledger_store import LedgerArtifactStore
from gristmill_gateway.s3_store import ArtifactStore, LocalArtifactStore
from gristmill_gateway.sagemaker.context import RuntimeContext
from gristmill_gateway.sagemaker.json_wire import JsonWire
from gristmill_gateway.sagemaker.runtime_wire import RuntimeWire
from gristmill_gateway.settings import GatewaySettings
from gristmill_gateway.waiting_room import WaitingRoom
from gristmill_sessions.port import ResourceStore

logger = logging.getLogger(__name__)

KEEPALIVE_S: Final = 60.0
"""Below the meter's 75 s, so that no request meets a connection that is just being closed."""
READY_TIMEOUT_S: Final = 2.0


@dataclass(slots=True, kw_only=True)
class Gateway:
    """Everything that a process has one of."""

    settings: GatewaySettings
    context: RuntimeContext
    front: FrontDoor
    http: aiohttp.ClientSession
    cluster: Cluster | None = None
    leaving: bool = False
    """Told to end: new calls are still answered, and asked to come on another connection."""

    def begin_leave(self) -> None:
        """Be ready no longer, so that whoever shares out calls sends no more of them."""
        self.leaving = True

    def begin_drain(self) -> None:
        """Let held answers go: their clients ask again."""
        self.context.draining.set()

    async def missing(self) -> list[str]:
        """What does not answer: `store`, `ledger`, and `watch of <kind>` for what is read as it was."""
        absent = [] if self.cluster is None else self.cluster.away()
        try:
            # Here and now: a probe must not wait for threads that wait for an API server.
            self.context.store.revision()
        except Exception as error:  # noqa: BLE001 # Whatever is wrong with the store, it is not ready.
            logger.warning("store_unreadable", extra={"error": str(error)})
            absent.append("store")
        try:
            url = f"{self.settings.ledger_url.rstrip('/')}/healthz"
            timeout = aiohttp.ClientTimeout(total=READY_TIMEOUT_S)
            async with self.http.get(url, timeout=timeout) as response:
                if not response.ok:
                    absent.append("ledger")
        except (aiohttp.ClientError, TimeoutError):
            absent.append("ledger")
        return absent


def make_gateway(
    settings: GatewaySettings,
    store: ResourceStore,
    key: bytes,
    http: aiohttp.ClientSession,
    *,
    clock: Callable[[], datetime] = utc_now,
    cluster: Cluster | None = None,
) -> Gateway:
    """key: what operation ids and page tokens are signed with, each with a key derived from it."""
    draining = asyncio.Event()
    room = WaitingRoom(settings.submit_hold_s, draining)
    directory = (
        Directory(store)
        if cluster is None
        else Directory(store, cluster.tenancy, cluster.read_session)
    )
    ledger = LedgerClient(http, settings.ledger_url, None if cluster is None else cluster.key)
    metrics = Metrics()
    context = RuntimeContext(
        store=store,
        directory=directory,
        ledger=ledger,
        meters=Meters(
            directory=directory,
            client=MeterClient(http),
            room=room,
            inbox=Inbox(ledger=ledger),
        ),
        metrics=metrics,
        operation_key=derived_key(key, "operation-id"),
        token_key=derived_key(key, "page-token"),
        result_wait_s=settings.result_wait_s,
        access=OwnersAccess() if cluster is None else cluster.access,
        in_cluster=cluster is not None,
        draining=draining,
    )
    artifacts: ArtifactStore = (
        LocalArtifactStore(settings.artifacts_dir)
        if cluster is None
        else LedgerArtifactStore(ledger)
    )
    front = FrontDoor(
        authenticator=Authenticator(
            directory=directory,
            accounts=Accounts(directory, ledger),
            clock=clock,
            clock_skew_s=settings.clock_skew_s,
        ),
        control=JsonWire(context),
        runtime=RuntimeWire(context),
        s3=S3Front(S3Wire(artifacts, derived_key(key, "s3-token")), directory, context.access),
        metrics=metrics,
        trust_forwarded_host=settings.trust_forwarded_host,
    )
    metrics.watch(
        held_body_bytes=lambda: front.bodies.held_bytes,
        held_submits=lambda: room.total,
        watches_away=lambda: 0 if cluster is None else len(cluster.away()),
    )
    return Gateway(settings=settings, context=context, front=front, http=http, cluster=cluster)


def open_http() -> aiohttp.ClientSession:
    """For ledger and meters. No bound of its own: the front door has one, and held polls must not wait."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    return aiohttp.ClientSession(connector=connector)


def make_app(gateway: Gateway) -> FastAPI:
    """The application; `gateway.http` is closed with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if gateway.cluster is not None:
            gateway.cluster.start()
        yield
        gateway.begin_drain()
        if gateway.cluster is not None:
            await gateway.cluster.stop()
        await gateway.http.close()

    app = FastAPI(
        title="Gristmill gateway",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )

    async def everything(request: Request) -> Response:
        # A signed request is never ours: a bucket may be called like a probe.
        probe = None if "authorization" in request.headers else PROBES.get(request.url.path)
        if probe is not None and request.method == "GET":
            return await probe(gateway)
        return await gateway.front.answer(request)

    async def unrouted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app.router.not_found(scope, receive, send)
            return
        response = await everything(Request(scope, receive))
        if gateway.leaving:
            response.headers["connection"] = "close"
        await response(scope, receive, send)

    # No route: its pattern would let a path with a newline through to an answer that is no wire's.
    app.router.default = unrouted
    return app


async def _healthz(_gateway: Gateway) -> Response:
    return JSONResponse({"status": "ok"})


async def _readyz(gateway: Gateway) -> Response:
    """Ready once the store can be read; a ledger that is away is named, and most calls go on."""
    missing = await gateway.missing()
    ending = gateway.leaving or gateway.context.draining.is_set()
    ready = "store" not in missing and not ending
    return JSONResponse({"ready": ready, "missing": missing}, 200 if ready else 503)


async def _metrics(gateway: Gateway) -> Response:
    return Response(gateway.context.metrics.render(), media_type="text/plain; version=0.0.4")


PROBES: Final = {"/healthz": _healthz, "/readyz": _readyz, "/metrics": _metrics}
