"""The fake worker and the fake ledger over HTTP, to test the real clients and whole meter processes."""

import asyncio
import struct
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from gristmill_contracts import http, inbox
from gristmill_contracts.budgets import Renewed, ReturnLease, TakeLease
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.ids import SessionUid
from gristmill_meter.ports import ExecuteCall, SequenceGapError, WorkerLostError
from gristmill_testing.fake_ledger import FakeLedger
from gristmill_testing.fake_worker import FakeWorker

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def worker_app(worker: FakeWorker) -> web.Application:
    """The routes of `contracts.http`, meter -> worker."""

    async def status(_: web.Request) -> web.Response:
        return _answer(await worker.status())

    async def put(request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=http.OpenSession)
        return _answer(await worker.open_session(request.match_info["uid"], body))

    async def execute(request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=ExecuteCall)
        return _answer(await worker.execute(request.match_info["uid"], body))

    async def stream(request: web.Request) -> web.StreamResponse:
        body = msgspec.msgpack.decode(await request.read(), type=ExecuteCall)
        response = web.StreamResponse()
        await response.prepare(request)
        chunks = worker.stream(request.match_info["uid"], body)
        try:
            async for chunk in chunks:
                content = msgspec.msgpack.encode(chunk)
                await response.write(struct.pack("<I", len(content)) + content)
        finally:
            await chunks.aclose()
        return response

    async def snapshot(request: web.Request) -> web.Response:
        return _answer(await worker.snapshot(request.match_info["uid"]))

    async def delete(request: web.Request) -> web.Response:
        await worker.close_session(request.match_info["uid"])
        return _answer(http.Empty())

    app = web.Application(client_max_size=2**26)
    app.router.add_get("/v1/status", guarded(status))
    app.router.add_put("/v1/sessions/{uid}", guarded(put))
    app.router.add_post("/v1/sessions/{uid}/execute", guarded(execute))
    app.router.add_post("/v1/sessions/{uid}/stream", guarded(stream))
    app.router.add_post("/v1/sessions/{uid}/snapshot", guarded(snapshot))
    app.router.add_delete("/v1/sessions/{uid}", guarded(delete))
    return app


def ledger_app(ledger: FakeLedger) -> web.Application:
    """The routes of `contracts.http`, meter -> ledger."""

    async def producers(request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=http.RegisterProducer)
        return _answer(await ledger.register_producer(body))

    async def batches(request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=http.UsageBatch)
        attempt = int(request.headers[http.ATTEMPT_HEADER])
        return _answer(await ledger.post_batch(body, attempt))

    async def checkpoints(request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=http.RegisterCheckpoint)
        attempt = int(request.headers[http.ATTEMPT_HEADER])
        return _answer(await ledger.register_checkpoint(body, attempt))

    async def claim(request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=inbox.ClaimInbox)
        return _answer(await ledger.claim_inbox(SessionUid(request.match_info["uid"]), body))

    async def acknowledge(request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=inbox.AckInbox)
        await ledger.ack_inbox(SessionUid(request.match_info["uid"]), body)
        return _answer(http.Empty())

    async def archive(request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=inbox.ArchiveOperations)
        await ledger.archive(SessionUid(request.match_info["uid"]), body)
        return _answer(http.Empty())

    async def heartbeats(request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=list[http.Heartbeat])
        return _answer(await ledger.post_heartbeats(body))

    app = web.Application(client_max_size=2**26)
    _add_leases(app, ledger)
    app.router.add_post("/v1/producers", guarded(producers))
    app.router.add_post("/v1/usage/batches", guarded(batches))
    app.router.add_post("/v1/checkpoints", guarded(checkpoints))
    app.router.add_post("/v1/heartbeats", guarded(heartbeats))
    app.router.add_post("/v1/sessions/{uid}/inbox/claim", guarded(claim))
    app.router.add_post("/v1/sessions/{uid}/inbox/ack", guarded(acknowledge))
    app.router.add_post("/v1/sessions/{uid}/archive", guarded(archive))
    return app


def _add_leases(app: web.Application, ledger: FakeLedger) -> None:
    async def take_lease(request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=TakeLease)
        return _answer(await ledger.take_lease(body))

    async def return_lease(request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=ReturnLease)
        lease = request.match_info["lease"]
        await ledger.return_lease(lease, body)
        return _answer(Renewed(id=lease, expires_in_s=0, rest={}))

    async def open_leases(request: web.Request) -> web.Response:
        return _answer(await ledger.open_leases(SessionUid(request.query["session"]), 0))

    app.router.add_post("/v1/leases", guarded(take_lease))
    app.router.add_get("/v1/leases", guarded(open_leases))
    app.router.add_post("/v1/leases/{lease}/return", guarded(return_lease))


def guarded(handler: Handler) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except WorkerLostError:
            # A worker that died answers nothing: the connection breaks.
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None
        except GristmillError as error:
            problem = http.Problem(
                code=error.code,
                message=error.message,
                retryable=error.retryable,
                expected_seq=error.expected_seq if isinstance(error, SequenceGapError) else None,
            )
            status = {"not_found": 404, "conflict": 409, "fenced": 421}.get(error.code, 503)
            if problem.expected_seq is not None:
                status = 409
            return web.Response(body=msgspec.msgpack.encode(problem), status=status)

    return answer


def _answer(body: object) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(body))
