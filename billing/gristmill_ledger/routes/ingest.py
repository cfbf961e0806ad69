"""What meters send: registrations, usage, heartbeats."""

import logging

import msgspec
from fastapi import APIRouter, Request, Response

from gristmill_contracts import limits
from gristmill_contracts.errors import ForbiddenError
from gristmill_contracts.http import Heartbeat, ProducerCursor, RegisterProducer, UsageBatch
from gristmill_ledger.auth import caller_of
from gristmill_ledger.cloud_events import read_events, to_batch
from gristmill_ledger.decisions import check_batch
from gristmill_ledger.events import Post, Stored
from gristmill_ledger.heartbeats import check_heartbeats
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.problems import TooLargeError
from gristmill_ledger.producers import check_registration, register_producer
from gristmill_ledger.wire import answer, answer_json, read_body, read_message

log = logging.getLogger(__name__)
router = APIRouter()


@router.post("/v1/producers")
async def register(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    message = await read_message(request, RegisterProducer)
    check_registration(message)
    caller = caller_of(request)
    caller.check_session(message.session, message.attempt)
    caller.check_session(message.producer)
    registered = await ledger.database.write(
        lambda c: register_producer(c, message, known_session=bool(caller.session))
    )
    fields = {"producer": message.producer, "epoch": message.epoch, "head_seq": message.head_seq}
    fields["acked_seq"] = registered.cursor.acked_seq
    if registered.log_lost:
        ledger.metrics.log_lost.inc()
        log.error("producer_log_lost", extra=fields)
    else:
        log.info("producer_registered", extra=fields)
    return answer(registered.cursor)


@router.post("/v1/usage/batches")
async def receive(request: Request) -> Response:
    # Wide, for a full batch of long names must pass: what was released is never refused.
    batch = await read_message(request, UsageBatch, bytes_max=limits.REQUEST_BODY_BYTES_MAX)
    if len(batch.events) > limits.BATCH_EVENTS_MAX:
        raise TooLargeError(
            f"the batch holds {len(batch.events)} events; send at most {limits.BATCH_EVENTS_MAX}"
        )
    return answer(await _store(request, batch))


@router.post("/v1/cloudevents")
async def receive_cloud_events(request: Request) -> Response:
    """The same, from whoever speaks CloudEvents: the same checks, and the same answers in JSON."""
    body = await read_body(request, bytes_max=limits.REQUEST_BODY_BYTES_MAX)
    batch = to_batch(read_events(body, request.headers.get("content-type", "")))
    return answer_json(msgspec.to_builtins(await _store(request, batch)))


async def _store(request: Request, batch: UsageBatch) -> ProducerCursor:
    """Check a batch, store it, and count and log what became of it."""
    ledger: Ledger = request.app.state.ledger
    check_batch(batch)
    caller = caller_of(request)
    caller.check_session(batch.producer)
    stored = await ledger.coalescer.post(Post(batch=batch, attempt=caller.attempt))
    if stored.cursor.fenced:
        log.warning(
            "usage_of_a_fenced_attempt",
            extra={"producer": batch.producer, "attempt": caller.attempt, "new": stored.inserted},
        )
    _report(ledger, stored)
    return stored.cursor


def _report(ledger: Ledger, stored: Stored) -> None:
    events = ledger.metrics.events
    events.labels("inserted").inc(stored.inserted)
    events.labels("duplicate").inc(stored.duplicates)
    events.labels("conflict").inc(len(stored.conflicts))
    ledger.metrics.quarantined.inc(stored.quarantined)
    ledger.desk.settled(stored.settled)
    for event in stored.conflicts:
        log.error(
            "usage_event_dead_lettered",
            extra={"event_id": event.event_id, "producer": stored.cursor.producer},
        )


@router.post("/v1/heartbeats")
async def beat(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    heartbeats = await read_message(request, list[Heartbeat])
    check_heartbeats(heartbeats)
    caller = caller_of(request)
    for heartbeat in heartbeats:
        caller.check_session(heartbeat.view.uid, heartbeat.view.attempt)
    if caller.session:
        tenant = await ledger.tenant_of(caller.session)
        for heartbeat in heartbeats:
            if heartbeat.tenant != tenant:
                raise ForbiddenError(
                    f"session {caller.session} is of tenant {tenant or 'nobody'}, not {heartbeat.tenant}"
                )
    return answer(await ledger.beat(heartbeats))
