"""Budgets and what is in suspense: for the command line and the operator."""

import logging
from typing import Final, get_args

from fastapi import APIRouter, Request, Response

from gristmill_contracts import limits
from gristmill_contracts.budgets import Decide, PutBudget, ScopeType, Source
from gristmill_contracts.errors import ForbiddenError, InvalidRequestError
from gristmill_contracts.http import Empty
from gristmill_ledger.auth import caller_of
from gristmill_ledger.budgets.definitions import check_name, check_put, end_budget, put_budget
from gristmill_ledger.budgets.suspense import decide_suspense
from gristmill_ledger.budgets.views import BudgetQuery, list_budgets, list_suspense, view_budget
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.release import clock_us
from gristmill_ledger.routes.registries import read_parameters
from gristmill_ledger.usage_query import page_limit
from gristmill_ledger.wire import answer, read_message

log = logging.getLogger(__name__)
router = APIRouter()

WRITERS: Final = ("", "cli", "operator")
"""Services that may change budgets; "" = whoever calls on one machine."""
RESOURCE_WRITERS: Final = ("", "operator")


@router.put("/v1/budgets/{tenant}/{name}")
async def put(request: Request, tenant: str, name: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    message = await read_message(request, PutBudget)
    check_name(tenant, name)
    check_put(tenant, message)
    by = _writer(request, message.source)
    view = await ledger.database.write(
        lambda c: put_budget(c, tenant, name, message, by=by, now_us=clock_us(c))
    )
    log.info(
        "budget_put",
        extra={
            "budget": view.id,
            "limit": view.limit,
            "unit": view.unit,
            "mode": view.mode,
            "by": by,
        },
    )
    return answer(view)


@router.get("/v1/budgets/{tenant}/{name}")
async def get(request: Request, tenant: str, name: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    budget = check_name(tenant, name)
    return answer(await ledger.database.read(lambda c: view_budget(c, budget, clock_us(c))))


@router.delete("/v1/budgets/{tenant}/{name}")
async def delete(request: Request, tenant: str, name: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    check_name(tenant, name)
    given = read_parameters(request, ("source",)).get("source", "manual")
    source = _source(given)
    by = _writer(request, source)
    await ledger.database.write(
        lambda c: end_budget(c, tenant, name, source=source, by=by, now_us=clock_us(c))
    )
    log.info("budget_ended", extra={"budget": f"{tenant}/{name}", "by": by})
    return answer(Empty())


@router.get("/v1/budgets")
async def get_page(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    known = ("tenant", "scope_type", "scope", "ended", "after", "limit")
    given = read_parameters(request, known)
    scope_type, ended = given.get("scope_type"), given.get("ended", "false")
    if scope_type is not None and scope_type not in get_args(ScopeType):
        raise InvalidRequestError(
            f"scope_type is {scope_type[:40]!r}; it must be one of {', '.join(get_args(ScopeType))}"
        )
    if ended not in ("true", "false"):
        raise InvalidRequestError(f"ended is {ended[:40]!r}; it must be true or false")
    query = BudgetQuery(
        tenant=given.get("tenant"),
        scope_type=scope_type,
        scope=given.get("scope"),
        ended=ended == "true",
        after=given.get("after"),
        limit=_page_limit(given),
    )
    return answer(await ledger.database.read(lambda c: list_budgets(c, query, clock_us(c))))


@router.get("/v1/suspense")
async def get_suspense(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    given = read_parameters(request, ("tenant", "after", "limit"))
    limit = _page_limit(given)
    return answer(
        await ledger.database.read(
            lambda c: list_suspense(
                c, tenant=given.get("tenant"), after=given.get("after"), limit=limit
            )
        )
    )


@router.post("/v1/suspense/{lease}/{tenant}/{name}")
async def decide(request: Request, lease: str, tenant: str, name: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    decision = await read_message(request, Decide)
    budget = check_name(tenant, name)
    by = _writer(request, "manual")
    resolved = await ledger.database.write(
        lambda c: decide_suspense(c, lease, budget, decision, by=by, now_us=clock_us(c))
    )
    if resolved is not None:
        ledger.desk.resolved([resolved])
    return answer(Empty())


def _page_limit(given: dict[str, str]) -> int:
    return page_limit(given.get("limit"), default=100, most=limits.BUDGET_PAGE_MAX)


def _source(text: str) -> Source:
    if text == "resource":
        return "resource"
    if text == "manual":
        return "manual"
    raise InvalidRequestError(f"source is {text[:40]!r}; it must be manual or resource")


def _writer(request: Request, source: Source) -> str:
    """The service that asks. Raises ForbiddenError for one that may not change such a budget."""
    service = caller_of(request).service
    allowed = RESOURCE_WRITERS if source == "resource" else WRITERS
    if service not in allowed:
        raise ForbiddenError(
            f"service {service!r} may not write a budget of source {source}; "
            f"{' or '.join(name for name in allowed if name)} may"
        )
    return service
