"""Inbox and archive of sessions that no meter serves, over HTTP."""

import logging
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError, InvalidRequestError
from gristmill_contracts.http import Empty, OperationView
from gristmill_contracts.ids import Stream
from gristmill_contracts.inbox import (
    AckInbox,
    ArchiveOperations,
    ClaimInbox,
    CloseInbox,
    InboxEntry,
    InboxPage,
    PostInbox,
)
from gristmill_ledger import archive, checks, inbox, inbox_claims
from gristmill_ledger.auth import caller_of
from gristmill_ledger.bodies import Body, drop_bodies, load_body, store_body
from gristmill_ledger.inbox_rules import Entry
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.registry import require_found
from gristmill_ledger.wire import answer, read_message

log = logging.getLogger(__name__)
router = APIRouter()

BODY_BYTES_MAX = limits.REQUEST_BODY_BYTES_MAX + limits.CONTROL_BODY_BYTES_MAX
_encoder = msgspec.msgpack.Encoder()


# --- gateways ------------------------------------------------------------------------------------


@router.post("/v1/sessions/{uid}/inbox")
async def post_inbox(request: Request, uid: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    post = await read_message(request, PostInbox, bytes_max=BODY_BYTES_MAX)
    inbox.check_post(uid, post)
    content = _encoder.encode(post.submit or post.refuse)
    if len(content) > limits.INLINE_PAYLOAD_BYTES_MAX:
        # Nothing is stored for what would be refused, or is there already.
        known = await ledger.database.read(
            partial(inbox.look, uid=uid, post=post, size=len(content))
        )
        if isinstance(known, Entry):
            return answer(inbox.submitted_again(known))
    body = await store_body(ledger.bodies, post.tenant, uid, content)
    stored = False
    try:
        kept = await ledger.database.write(partial(inbox.keep, uid=uid, post=post, body=body))
        stored = kept.stored
    except GristmillError as error:
        stored = error.retryable  # Perhaps it was committed all the same.
        raise
    finally:
        if body.blob is not None and not stored:
            await drop_bodies(ledger.bodies, post.tenant, [body.blob])
    if kept.stored:
        ledger.metrics.inbox_operations.labels("accepted").inc()
    return answer(kept.submitted)


@router.get("/v1/sessions/{uid}/inbox")
async def get_inbox(request: Request, uid: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    checks.text("session", uid)
    return answer(await ledger.database.read(partial(inbox.view_inbox, uid=uid)))


@router.post("/v1/sessions/{uid}/inbox/close")
async def close_inbox(request: Request, uid: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    message = await read_message(request, CloseInbox)
    checks.text("session", uid)
    checks.tenant_name(message.tenant)
    dropped = await ledger.database.write(
        partial(inbox_claims.close, uid=uid, tenant=message.tenant, reason=message.reason)
    )
    await _drop(ledger, dropped)
    return answer(Empty())


@router.get("/v1/sessions/{uid}/archive/{stream}/{number}")
async def get_operation(request: Request, uid: str, stream: str, number: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    checks.text("session", uid)
    which, counted = _operation(stream, number)
    found = await ledger.database.read(
        partial(archive.find_operation, uid=uid, stream=which, number=counted)
    )
    if found.result is None:
        return answer(found.view)
    content = await load_body(ledger.bodies, found.tenant, found.result)
    return answer(_with_result(found.view, content))


def _with_result(view: OperationView, result: bytes) -> dict[str, object]:
    """The view with its result still encoded, as the meter sent it."""
    return msgspec.structs.asdict(view) | {"result": msgspec.Raw(result)}


def _operation(stream: str, number: str) -> tuple[Stream, int]:
    if stream not in ("train", "log") or not (number.isascii() and number.isdecimal()):
        raise InvalidRequestError(
            f"{stream[:40]}/{number[:40]} names no operation; use train/7 or log/7"
        )
    which: Stream = "train" if stream == "train" else "log"
    return which, checks.whole_number("number", number)


# --- meters --------------------------------------------------------------------------------------


@router.post("/v1/sessions/{uid}/inbox/claim")
async def claim_inbox(request: Request, uid: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    message = await read_message(request, ClaimInbox)
    caller_of(request).check_session(uid, message.attempt)
    claimed = await ledger.database.write(partial(inbox_claims.claim, uid=uid, request=message))
    entries = [
        InboxEntry(
            position=row.position,
            stream=row.stream,
            number=row.number,
            kind=row.kind,
            body=await load_body(ledger.bodies, claimed.tenant, inbox_claims.body_of(row)),
            accepted_us=row.accepted_us,
        )
        for row in claimed.rows
    ]
    return answer(InboxPage(entries=entries, served=claimed.served))


@router.post("/v1/sessions/{uid}/inbox/ack")
async def acknowledge_inbox(request: Request, uid: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    message = await read_message(request, AckInbox)
    inbox_claims.check_ack(message)
    caller_of(request).check_session(uid, message.attempt)
    dropped = await ledger.database.write(
        partial(inbox_claims.acknowledge, uid=uid, request=message)
    )
    for skip in message.skipped:
        log.warning(
            "inbox_entry_skipped",
            extra={"session": uid, "position": skip.position, "reason": skip.reason},
        )
    await _drop(ledger, dropped)
    return answer(Empty())


@router.post("/v1/sessions/{uid}/archive")
async def put_archive(request: Request, uid: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    message = await read_message(request, ArchiveOperations, bytes_max=BODY_BYTES_MAX)
    archive.check_archive(uid, message)
    caller_of(request).check_session(uid, message.attempt)
    tenant = require_found(await ledger.tenant_of(uid), f"session {uid[:63]!r}")
    missing = await ledger.database.read(
        partial(archive.missing_operations, uid=uid, request=message)
    )
    bodies: list[Body | None] = [
        None if each.result is None else await store_body(ledger.bodies, tenant, uid, each.result)
        for each in missing
    ]

    def work(connection: Connection) -> list[bool]:
        inbox_claims.check_owner(connection, uid, message.attempt)
        return [
            archive.keep_operation(
                connection,
                uid,
                each,
                body,
                tenant=tenant,
                until_us=archive.expires_us(message, each),
            )
            for each, body in zip(missing, bodies, strict=True)
        ]

    kept = await ledger.database.write(work)
    double = [
        body.blob
        for body, is_kept in zip(bodies, kept, strict=True)
        if body is not None and body.blob is not None and not is_kept
    ]
    await drop_bodies(ledger.bodies, tenant, double)
    ledger.metrics.archived_operations.inc(sum(kept))
    return answer(Empty())


async def _drop(ledger: Ledger, dropped: inbox_claims.Dropped) -> None:
    await drop_bodies(ledger.bodies, dropped.tenant, dropped.blobs)
    ledger.metrics.inbox_operations.labels("taken").inc(dropped.taken)
    ledger.metrics.inbox_operations.labels("skipped").inc(dropped.skipped)
