"""What a charge is made of, what tokens would cost, and rating again. All answers are JSON."""

import logging
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from gristmill_contracts import limits
from gristmill_contracts.errors import ForbiddenError, InvalidRequestError
from gristmill_contracts.units import now_us
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger import checks
from gristmill_ledger.auth import caller_of
from gristmill_ledger.estimate import estimate
from gristmill_ledger.explain import explain_event, explain_session
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.rerating import (
    Outcome,
    Place,
    Rerate,
    check_rerate,
    check_run,
    preview,
    rerate_step,
)
from gristmill_ledger.rerating import touched as touched_hours
from gristmill_ledger.routes.registries import read_parameters
from gristmill_ledger.usage import decimal_text
from gristmill_ledger.usage_query import page_limit, read_time
from gristmill_ledger.wire import answer_json

log = logging.getLogger(__name__)
router = APIRouter()

RERATERS: Final = ("", "cli", "operator")
"""Services that may rate again; "" = whoever calls on one machine."""


@router.get("/v1/explain")
async def explain(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    given = read_parameters(request, ("event", "session", "tenant", "after", "limit"))
    if ("event" in given) == ("session" in given):
        raise InvalidRequestError("name an event or a session, one of them")
    tenant, book = given.get("tenant"), ledger.settings.price_book
    if "event" in given:
        found = await ledger.database.read(lambda c: explain_event(c, given["event"], tenant, book))
        return answer_json(found)
    after = checks.whole_number("after", given.get("after", "0"))
    limit = page_limit(given.get("limit"), default=1000, most=limits.EXPLAIN_PAGE_MAX)
    found = await ledger.database.read(
        lambda c: explain_session(c, given["session"], tenant, after, limit, book)
    )
    return answer_json(found)


@router.get("/v1/estimate")
async def estimated(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    given = read_parameters(request, ("model", "price_book", "at", *TOKEN_TYPES))
    if "model" not in given:
        raise InvalidRequestError("parameter 'model' is missing; prices are of a model")
    counts = Counts(
        **{name: checks.whole_number(name, given.get(name, "0")) for name in TOKEN_TYPES}
    )
    at_us = read_time("at", given.get("at"))
    found = await ledger.database.read(
        lambda c: estimate(
            c,
            counts,
            model=given["model"],
            book=given.get("price_book", ledger.settings.price_book),
            at_us=now_us() if at_us is None else at_us,
        )
    )
    return answer_json(found)


@router.post("/v1/rerate")
async def rerate(request: Request) -> Response:
    """Rate a stretch again: at most RERATE_HOURS_MAX hours a call; `next` goes on behind them.

    JSON: {"run": n | null, "rows": n, "hours": n, "unpriced": n, "other_currency": n, "differences":
    [{"tenant", "currency", "difference_pico", "difference"}], "next": text | null}
    """
    ledger: Ledger = request.app.state.ledger
    names = ("tenant", "book", "since", "until", "reason", "dry_run", "run", "next")
    given = read_parameters(request, names, empty=("tenant", "book"))
    by = caller_of(request).service
    if by not in RERATERS:
        raise ForbiddenError(f"the {by} may not rate usage again; use `gristmill rerate`")
    wanted = _request(given, by)
    check_rerate(wanted)
    run = checks.whole_number("run", given["run"]) if "run" in given else None
    if run is not None:
        await ledger.database.read(partial(check_run, number=run))
    dry = _flag("dry_run", given.get("dry_run", "false"))
    book = ledger.settings.price_book
    behind = _place(given.get("next"))
    places = await ledger.database.read(lambda c: touched_hours(c, wanted, book, behind=behind))
    outcome = Outcome()
    for place in places[: limits.RERATE_HOURS_MAX]:
        found, run = await _step(ledger, place, wanted, run, dry=dry)
        outcome.add(found)
    more = len(places) > limits.RERATE_HOURS_MAX
    if outcome.rows and not dry:
        ledger.costs.forget()
        fields = {"run": run, "rows": outcome.rows, "reason": wanted.reason, "by": by}
        log.info("usage_rated_again", extra=fields)
    told = _told(outcome, run)
    last = places[limits.RERATE_HOURS_MAX - 1] if more else None
    return answer_json(told | {"next": f"{last.tenant}/{last.hour_us}" if last else None})


async def _step(
    ledger: Ledger, place: Place, wanted: Rerate, run: int | None, *, dry: bool
) -> tuple[Outcome, int | None]:
    book = ledger.settings.price_book
    if dry:
        return await ledger.database.read(lambda c: preview(c, place, wanted, book)), None
    return await ledger.database.write(lambda c: rerate_step(c, place, wanted, book, run, now_us()))


def _request(given: dict[str, str], by: str) -> Rerate:
    since, until = (read_time(name, given.get(name)) for name in ("since", "until"))
    return Rerate(
        tenant=given.get("tenant", ""),
        book=given.get("book", ""),
        since_us=-limits.QUANTITY_MAX if since is None else since,
        until_us=limits.QUANTITY_MAX if until is None else until,
        reason=given.get("reason", ""),
        written_by=by,
    )


def _place(text: str | None) -> Place | None:
    if text is None:
        return None
    tenant, _, hour = text.rpartition("/")
    if not hour.removeprefix("-").isdecimal() or not hour.isascii():
        raise InvalidRequestError(f"next is {text[:80]!r}; pass the `next` of the answer before")
    return Place(tenant=tenant, hour_us=checks.signed("next", int(hour[:21])))


def _told(outcome: Outcome, run: int | None) -> dict[str, Any]:  # Any: JSON
    return {
        "run": run,
        "rows": outcome.rows,
        "hours": outcome.hours,
        "unpriced": outcome.unpriced,
        "other_currency": outcome.other_currency,
        "differences": [
            {
                "tenant": tenant,
                "currency": currency or None,
                "difference_pico": pico,
                "difference": decimal_text(pico),
            }
            for (tenant, currency), pico in sorted(outcome.tenants.items())
        ],
    }


def _flag(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise InvalidRequestError(f"{name} is {text[:40]!r}; it must be true or false")
    return text == "true"
