"""POST /v1/corrections: a correction of one usage event, for a recorded decision. The answer is JSON.

`event`, `reason`, and `kind=void`, or `kind=adjustment` (default) with signed `prefill`, `cached_prefill`, `sample`, `train`;
`tenant` where two tenants share the id, `by`.

    {"event_id", "tenant", "seq", "corrects", "kind", "reason", "by", "again": true | false,
     "delta": {"prefill", "cached_prefill", "sample", "train"}, "left": the same}
"""

import logging
import re
from dataclasses import asdict
from typing import Final

from fastapi import APIRouter, Request, Response

from gristmill_contracts.errors import ForbiddenError, InvalidRequestError
from gristmill_contracts.units import now_us
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger.auth import caller_of
from gristmill_ledger.corrections import Correct, check_correction, correct
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.routes.registries import read_parameters
from gristmill_ledger.wire import answer_json

log = logging.getLogger(__name__)
router = APIRouter()

CORRECTORS: Final = ("", "cli", "operator")
"""Services that may correct usage; "" = whoever calls on one machine."""
_SIGNED: Final = re.compile(r"[+-]?[0-9]{1,20}")


@router.post("/v1/corrections")
async def corrections(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    names = ("event", "tenant", "kind", "reason", "by", *TOKEN_TYPES)
    given = read_parameters(request, names)
    service = caller_of(request).service
    if service not in CORRECTORS:
        raise ForbiddenError(f"the {service} may not correct usage; use `gristmill adjust`")
    wanted = _request(given, service)
    check_correction(wanted)
    book = ledger.settings.price_book
    made = await ledger.database.write(lambda c: correct(c, wanted, book=book, now_us=now_us()))
    told = {"corrects": wanted.event, "kind": wanted.kind, "reason": wanted.reason, "by": wanted.by}
    if not made.again:
        ledger.costs.forget()
        log.info("usage_corrected", extra=told | {"event": made.event_id, "seq": made.seq})
    return answer_json(asdict(made) | told)


def _request(given: dict[str, str], service: str) -> Correct:
    for name in ("event", "reason"):
        if name not in given:
            raise InvalidRequestError(f"parameter {name!r} is missing; a correction is on record")
    kind = given.get("kind", "adjustment")
    if kind not in ("adjustment", "void"):
        raise InvalidRequestError(f"kind is {kind[:40]!r}; it must be adjustment or void")
    return Correct(
        event=given["event"],
        tenant=given.get("tenant", ""),
        kind="void" if kind == "void" else "adjustment",
        delta=Counts(**{name: _signed(name, given.get(name, "0")) for name in TOKEN_TYPES}),
        reason=given["reason"],
        by=given.get("by") or service or "local",
    )


def _signed(name: str, text: str) -> int:
    if not _SIGNED.fullmatch(text):
        raise InvalidRequestError(
            f"{name} is {text[:40]!r}; it must be a whole number of at most 20 digits, as +5 or -5"
        )
    return int(text)
