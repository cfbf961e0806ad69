"""What others read: usage, raw events, heartbeats, health and metrics."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError, UnavailableError
from gristmill_ledger import checks
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.raw_events import events_page
from gristmill_ledger.routes.registries import read_parameters
from gristmill_ledger.usage import usage_page
from gristmill_ledger.usage_query import page_limit, parse_usage_query
from gristmill_ledger.wire import answer, answer_json, problem

router = APIRouter()


@router.get("/v1/usage")
async def usage(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    query = parse_usage_query(request.query_params.multi_items())
    book = ledger.settings.price_book
    return answer_json(await ledger.database.read(lambda c: usage_page(c, query, book)))


@router.get("/v1/events")
async def events(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    given = read_parameters(request, ("session", "tenant", "after", "limit"))
    if "session" not in given:
        raise InvalidRequestError("parameter 'session' is missing; events are listed by session")
    after = checks.whole_number("after", given.get("after", "0"))
    limit = page_limit(given.get("limit"), default=1000, most=limits.USAGE_PAGE_MAX)
    return answer(
        await ledger.database.read(
            lambda c: events_page(
                c, session=given["session"], tenant=given.get("tenant"), after=after, limit=limit
            )
        )
    )


@router.get("/v1/heartbeats")
async def heartbeats(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    given = read_parameters(request, ("after", "wait_s"))
    after = checks.whole_number("after", given.get("after", "0"))
    return answer(await ledger.await_heartbeats(after, _wait_s(given.get("wait_s", "0"))))


@router.get("/healthz")
async def healthz() -> Response:
    return Response("ok\n", media_type="text/plain")


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    if ledger.stopping:
        return problem(UnavailableError("the ledger is stopping; ask another replica"))
    try:
        await ledger.database.read(lambda c: c.exec_driver_sql("SELECT 1").scalar_one())
    except UnavailableError as error:
        return problem(UnavailableError(f"database: {error.message}"))
    return Response("ok\n", media_type="text/plain")


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    return Response(await ledger.metrics_text(), media_type=CONTENT_TYPE_LATEST)


def _wait_s(text: str) -> float:
    try:
        wait_s = float(text)
    except ValueError as error:
        raise InvalidRequestError(f"wait_s is {text[:40]!r}; it must be seconds") from error
    if not 0 <= wait_s <= limits.HEARTBEAT_WAIT_S_MAX:
        raise InvalidRequestError(
            f"wait_s is {text}; it must be 0 to {limits.HEARTBEAT_WAIT_S_MAX}"
        )
    return wait_s
