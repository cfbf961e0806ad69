"""Reconciliation on demand, what differs, and decisions on it. All answers are JSON.

    POST /v1/reconcile?tenant=&session=                 compare now, and record it
    GET  /v1/reconcile?tenant=&session=&all=&after=&limit=
                                                        differences on record, open ones unless all=true
    POST /v1/reconcile/decisions?difference=&reason=&by=
                                                        record why a difference is settled

    {"run": {"id", "scope", "sessions", "in_flight", "silent", "differences", "started_us", "ended_us"} | null,
     "differences": [{"id", "pair", "kind", "tenant", "session", "subject", "operations", "tokens":
       {"prefill", "cached_prefill", "sample", "train"}, "amount", "detail", "found_us", "age_s", "run",
       "present": true | false | null, "decision": {"by", "reason", "at_us"} | null}],
     "next_after": id | null}

Figures are signed: what the second of the pair has, minus what the first has. `present`: whether this run
found it again; null where none ran.
"""

import logging
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from sqlalchemy import Row

from gristmill_contracts import limits
from gristmill_contracts.errors import ForbiddenError, InvalidRequestError
from gristmill_contracts.units import now_us
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger import checks
from gristmill_ledger.auth import caller_of
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.reconcile.sources import Scope
from gristmill_ledger.reconcile.store import decide, listed
from gristmill_ledger.reconcile.task import Report
from gristmill_ledger.routes.registries import read_parameters
from gristmill_ledger.usage_query import page_limit
from gristmill_ledger.wire import answer_json

log = logging.getLogger(__name__)
router = APIRouter()

DECIDERS: Final = ("", "cli", "operator")
"""Services that may compare and decide; "" = whoever calls on one machine."""


@router.post("/v1/reconcile")
async def reconcile(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    scope = _scope(read_parameters(request, ("tenant", "session")))
    report = await ledger.reconciler.reconcile(scope, asked_by=_decider(request) or "asked")
    rows = await ledger.database.read(lambda c: listed(c, scope, limit=limits.RECON_PAGE_MAX))
    return answer_json(_answer(rows, limits.RECON_PAGE_MAX, report))


@router.get("/v1/reconcile")
async def differences(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    given = read_parameters(request, ("tenant", "session", "all", "after", "limit"))
    scope, everything = _scope(given), given.get("all", "false")
    if everything not in ("true", "false"):
        raise InvalidRequestError(f"all is {everything[:40]!r}; it must be true or false")
    limit = page_limit(
        given.get("limit"), default=limits.RECON_PAGE_MAX, most=limits.RECON_PAGE_MAX
    )
    rows = await ledger.database.read(
        lambda c: listed(
            c,
            scope,
            after=given.get("after", ""),
            limit=limit,
            all_of_them=everything == "true",
        )
    )
    return answer_json(_answer(rows, limit, None))


@router.post("/v1/reconcile/decisions")
async def decided(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    given = read_parameters(request, ("difference", "reason", "by"))
    service = _decider(request)
    for name in ("difference", "reason"):
        if name not in given:
            raise InvalidRequestError(f"parameter {name!r} is missing; a decision is on record")
    by = given.get("by") or service or "local"
    found, reason = given["difference"], given["reason"]
    await ledger.database.write(lambda c: decide(c, found, by=by, reason=reason, now_us=now_us()))
    log.info("difference_decided", extra={"difference": found, "by": by, "reason": reason})
    return answer_json({"difference": found, "by": by, "reason": reason})


def _decider(request: Request) -> str:
    service = caller_of(request).service
    if service not in DECIDERS:
        raise ForbiddenError(f"the {service} may not reconcile; use `gristmill reconcile`")
    return service


def _scope(given: dict[str, str]) -> Scope:
    for name in ("tenant", "session"):
        if name in given:
            checks.text(name, given[name])
    return Scope(tenant=given.get("tenant", ""), session=given.get("session", ""))


def _answer(rows: list[Row[Any]], limit: int, report: Report | None) -> dict[str, Any]:  # Any: JSON
    found = None if report is None else {each.id for each in report.found}
    at_us = now_us()
    return {
        "run": None if report is None else _run(report),
        "differences": [_difference(row, found, at_us) for row in rows],
        "next_after": rows[-1].id if len(rows) == limit else None,
    }


def _run(report: Report) -> dict[str, Any]:  # Any: JSON
    names = ("id", "scope", "sessions", "in_flight", "silent", "differences", "started_us",
             "ended_us")  # fmt: skip
    return {name: getattr(report.run, name) for name in names}


def _difference(row: Row[Any], found: set[str] | None, at_us: int) -> dict[str, Any]:  # Any: JSON
    decision = None
    if row.decided_by is not None:
        decision = {"by": row.decided_by, "reason": row.reason, "at_us": row.at_us}
    names = ("id", "pair", "kind", "tenant", "session", "subject", "operations", "amount", "detail",
             "found_us", "run")  # fmt: skip
    return {
        **{name: getattr(row, name) for name in names},
        "tokens": {name: getattr(row, name) for name in TOKEN_TYPES},
        "age_s": max(0, at_us - row.found_us) // 1_000_000,
        "present": None if found is None else row.id in found,
        "decision": decision,
    }
