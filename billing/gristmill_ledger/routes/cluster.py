"""What the operator tells: directives to meters, and usage that it gave up."""

import logging

from fastapi import APIRouter, Request, Response

from gristmill_contracts.cluster_http import Directive, UsageGap
from gristmill_contracts.http import Empty
from gristmill_ledger import checks
from gristmill_ledger.directives import put_directive
from gristmill_ledger.gaps import check_gap, record_gap, session_gaps
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.wire import answer, read_message

log = logging.getLogger(__name__)
router = APIRouter()


@router.put("/v1/sessions/{uid}/directive")
async def directive(request: Request, uid: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    message = await read_message(request, Directive)
    await ledger.database.write(lambda c: put_directive(c, uid, message))
    return answer(Empty())


@router.post("/v1/sessions/{uid}/gaps")
async def post_gap(request: Request, uid: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    gap = await read_message(request, UsageGap)
    check_gap(uid, gap)
    if await ledger.database.write(lambda c: record_gap(c, uid, gap)):
        ledger.metrics.gaps.inc()
        log.error(
            "usage_gap_recorded",
            extra={"session": uid, "attempt": gap.attempt, "reason": gap.reason,
                   "acked_seq": gap.acked_seq, "head_seq": gap.head_seq},
        )  # fmt: skip
    return answer(Empty())


@router.get("/v1/sessions/{uid}/gaps")
async def get_gaps(request: Request, uid: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    checks.text("session", uid)
    return answer(await ledger.database.read(lambda c: session_gaps(c, uid)))
