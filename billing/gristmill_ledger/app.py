"""The ledger's HTTP application: `make_app` wires routes to a `Ledger`."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from sqlalchemy.engine import make_url
from starlette.exceptions import HTTPException

from gristmill_contracts.errors import GristmillError, InvalidRequestError, NotFoundError
from gristmill_ledger.auth import Gate
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.routes import (
    artifacts,
    budgets,
    chain,
    cluster,
    corrections,
    inbox,
    ingest,
    leases,
    queries,
    rating,
    reconcile,
    registries,
)
from gristmill_ledger.wire import JSON_PATHS, problem

log = logging.getLogger(__name__)


def make_app(ledger: Ledger) -> FastAPI:
    """The application. Its lifespan opens (and migrates) the ledger and closes it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        served: Ledger = app.state.ledger
        try:
            await served.open()
        except Exception as error:
            # The server ends on it, and would tell no more than where it was raised.
            log.critical(
                "ledger_not_opened",
                extra={
                    "database": make_url(served.settings.url).render_as_string(),
                    "reason": str(error).partition("\n")[0],
                    "remedy": "see that the database answers, and that it and its folder can be written",
                },
            )
            raise
        try:
            yield
        finally:
            await served.close()

    app = FastAPI(
        title="Gristmill ledger", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None
    )
    app.state.ledger = ledger
    app.add_middleware(Gate, key=lambda: app.state.ledger.cluster_key)
    routers = (
        ingest,
        registries,
        queries,
        cluster,
        artifacts,
        inbox,
        budgets,
        leases,
        chain,
        rating,
        reconcile,
        corrections,
    )
    for router in (module.router for module in routers):
        app.include_router(router)
    app.add_exception_handler(GristmillError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _bug)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, GristmillError):
        raise error
    return problem(error, as_json=request.url.path in JSON_PATHS)


async def _no_route(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    where = f"{request.method} {request.url.path}"
    as_json = request.url.path in JSON_PATHS
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        wrong = InvalidRequestError(f"{where} is not a route; another method is")
        response = problem(wrong, as_json=as_json)
        response.status_code = error.status_code
        return response
    return problem(NotFoundError(f"{where} is not a route; see gristmill_contracts.http"))


async def _bug(request: Request, error: Exception) -> Response:
    log.error("request_failed", extra={"route": request.url.path}, exc_info=error)
    failed = GristmillError(f"the ledger failed ({type(error).__name__}); see its log")
    return problem(failed, as_json=request.url.path in JSON_PATHS)
