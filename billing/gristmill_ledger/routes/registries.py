"""Sessions, tenants, checkpoints and prices."""

from fastapi import APIRouter, Request, Response

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.http import CreateGroup, Empty, RegisterCheckpoint, RegisterSession
from gristmill_contracts.price_book import PriceBook
from gristmill_ledger import checkpoints, checks
from gristmill_ledger.auth import caller_of
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.prices import check_price_book, put_price_book
from gristmill_ledger.registry import put_tenant, register_session
from gristmill_ledger.usage_query import page_limit
from gristmill_ledger.wire import answer, read_message

router = APIRouter()


def _ledger(request: Request) -> Ledger:
    ledger: Ledger = request.app.state.ledger
    return ledger


@router.post("/v1/sessions")
async def post_session(request: Request) -> Response:
    message = await read_message(request, RegisterSession)
    await _ledger(request).database.write(lambda c: register_session(c, message))
    return answer(Empty())


@router.put("/v1/tenants/{name}")
async def put_account(request: Request, name: str) -> Response:
    checks.tenant_name(name)
    return answer(await _ledger(request).database.write(lambda c: put_tenant(c, name)))


@router.post("/v1/checkpoint-groups")
async def post_group(request: Request) -> Response:
    message = await read_message(request, CreateGroup)
    return answer(
        await _ledger(request).database.write(lambda c: checkpoints.create_group(c, message))
    )


@router.get("/v1/checkpoint-groups/{tenant}/{name}")
async def get_group(request: Request, tenant: str, name: str) -> Response:
    _check_path(tenant=tenant, name=name)
    return answer(
        await _ledger(request).database.read(lambda c: checkpoints.get_group(c, tenant, name))
    )


@router.post("/v1/checkpoints")
async def post_checkpoint(request: Request) -> Response:
    message = await read_message(request, RegisterCheckpoint)
    caller = caller_of(request)
    caller.check_session(message.session)
    return answer(
        await _ledger(request).database.write(
            lambda c: checkpoints.register_checkpoint(c, message, attempt=caller.attempt)
        )
    )


@router.get("/v1/checkpoints")
async def list_checkpoints(request: Request) -> Response:
    given = read_parameters(request, ("tenant", "group", "after", "limit", "order"))
    if "tenant" not in given:
        raise InvalidRequestError("parameter 'tenant' is missing; checkpoints are listed by tenant")
    order = given.get("order", "asc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order is {order!r}; it must be asc or desc")
    limit = page_limit(given.get("limit"), default=limits.LIST_PAGE_MAX, most=limits.LIST_PAGE_MAX)
    page = await _ledger(request).database.read(
        lambda c: checkpoints.list_checkpoints(
            c,
            tenant=given["tenant"],
            group=given.get("group"),
            after=given.get("after"),
            limit=limit,
            order="asc" if order == "asc" else "desc",
        )
    )
    return answer(page)


@router.get("/v1/checkpoints/{tenant}/{group}/{version}")
async def get_checkpoint(request: Request, tenant: str, group: str, version: str) -> Response:
    number = _check_version(tenant, group, version)
    return answer(
        await _ledger(request).database.read(
            lambda c: checkpoints.get_checkpoint(c, tenant, group, number)
        )
    )


@router.delete("/v1/checkpoints/{tenant}/{group}/{version}")
async def delete_checkpoint(request: Request, tenant: str, group: str, version: str) -> Response:
    number = _check_version(tenant, group, version)
    await _ledger(request).database.write(
        lambda c: checkpoints.delete_checkpoint(c, tenant, group, number)
    )
    return answer(Empty())


@router.put("/v1/price-books/{name}")
async def put_prices(request: Request, name: str) -> Response:
    book = await read_message(request, PriceBook)
    check_price_book(name, book)
    by = caller_of(request).service
    await _ledger(request).database.write(lambda c: put_price_book(c, name, book, written_by=by))
    return answer(Empty())


def read_parameters(
    request: Request, known: tuple[str, ...], *, empty: tuple[str, ...] = ()
) -> dict[str, str]:
    """The query string, each parameter known and given once. `empty`: those that may be so."""
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise InvalidRequestError(
                f"unknown parameter {name!r}; this route knows {', '.join(known)}"
            )
        if name in given:
            raise InvalidRequestError(f"parameter {name!r} is given twice; give it once")
        given[name] = checks.text(name, value, empty=name in empty)
    return given


def _check_path(**parts: str) -> None:
    for name, value in parts.items():
        checks.text(name, value)


def _check_version(tenant: str, group: str, version: str) -> int:
    _check_path(tenant=tenant, group=group)
    if not (version.isascii() and version.isdecimal()):
        raise InvalidRequestError(f"version {version[:40]!r} is not a number; versions begin at 1")
    return checks.whole_number("version", version)
