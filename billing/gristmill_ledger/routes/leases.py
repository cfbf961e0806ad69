"""Leases of budgets: taken, renewed, given back and listed by the meters that spend them."""

import logging

from fastapi import APIRouter, Request, Response

from gristmill_contracts.budgets import RenewLease, ReturnLease, TakeLease
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_ledger import checks
from gristmill_ledger.auth import caller_of
from gristmill_ledger.budgets.open_leases import open_leases
from gristmill_ledger.budgets.returns import check_return, give_back, renew_one
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.release import clock_us
from gristmill_ledger.routes.registries import read_parameters
from gristmill_ledger.wire import answer, read_message

log = logging.getLogger(__name__)
router = APIRouter()


@router.post("/v1/leases")
async def post_lease(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    message = await read_message(request, TakeLease)
    check_take(message)
    caller_of(request).check_session(message.session, message.attempt)
    return answer(await ledger.desk.take(message))


@router.get("/v1/leases")
async def get_leases(request: Request) -> Response:
    ledger: Ledger = request.app.state.ledger
    given = read_parameters(request, ("session",))
    if "session" not in given:
        raise InvalidRequestError("parameter 'session' is missing; leases are listed by session")
    caller_of(request).check_session(given["session"])
    return answer(
        await ledger.database.read(lambda c: open_leases(c, given["session"], clock_us(c)))
    )


@router.post("/v1/leases/{lease}/renew")
async def renew(request: Request, lease: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    message = await read_message(request, RenewLease)
    checks.text("lease", lease)
    checks.text("session", message.session)
    checks.quantity("attempt", message.attempt)
    caller_of(request).check_session(message.session, message.attempt)
    return answer(
        await ledger.database.write(
            lambda c: renew_one(c, lease, message.session, message.attempt, clock_us(c))
        )
    )


@router.post("/v1/leases/{lease}/return")
async def return_lease(request: Request, lease: str) -> Response:
    ledger: Ledger = request.app.state.ledger
    message = await read_message(request, ReturnLease)
    checks.text("lease", lease)
    check_return(message)
    caller_of(request).check_session(message.session, message.attempt)
    given = await ledger.database.write(lambda c: give_back(c, lease, message, clock_us(c)))
    ledger.desk.resolved(given.resolved)
    return answer(given.renewed)


def check_take(message: TakeLease) -> None:
    """Raise InvalidRequestError naming the first field that is out of bounds."""
    checks.text("session", message.session)
    checks.text("model", message.model)
    checks.text("key", message.key, empty=True)
    checks.quantity("attempt", message.attempt)
    checks.quantity("seq", message.seq)
    for field in ("need", "least", "want"):
        counts: Counts | None = getattr(message, field)
        for name in TOKEN_TYPES if counts is not None else ():
            checks.quantity(f"{field}.{name}", getattr(counts, name))
