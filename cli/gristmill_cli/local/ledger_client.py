"""What the supervisor asks of the ledger: accounts, registrations, heartbeats."""

from typing import Final, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from gristmill_contracts import limits
from gristmill_contracts.budgets import BudgetPage, BudgetView, PutBudget, ScopeType
from gristmill_contracts.errors import GristmillError, UnavailableError, error_from
from gristmill_contracts.http import (
    CONTENT_TYPE,
    Empty,
    HeartbeatPage,
    Problem,
    RegisterSession,
    TenantAccount,
)
from gristmill_contracts.price_book import PriceBook

T = TypeVar("T")
ANSWER_TIMEOUT_S: Final = 10.0
BEAT_WAIT_S: Final = 20.0

if BEAT_WAIT_S > limits.HEARTBEAT_WAIT_S_MAX:
    raise AssertionError("the ledger holds a heartbeat poll no longer than it allows")


class LedgerClient:
    """Every call raises UnavailableError while the ledger is away, or the error that it reports."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def put_tenant(self, tenant: str) -> TenantAccount:
        return await self._ask("PUT", f"/v1/tenants/{quote(tenant, safe='')}", TenantAccount)

    async def put_price_book(self, book: PriceBook) -> None:
        path = f"/v1/price-books/{quote(book.name, safe='')}"
        await self._ask("PUT", path, Empty, message=book)

    async def register_session(self, session: RegisterSession) -> None:
        await self._ask("POST", "/v1/sessions", Empty, message=session)

    async def put_budget(self, tenant: str, name: str, budget: PutBudget) -> BudgetView:
        path = f"/v1/budgets/{quote(tenant, safe='')}/{quote(name, safe='')}"
        return await self._ask("PUT", path, BudgetView, message=budget)

    async def list_budgets(
        self, tenant: str, scope_type: ScopeType, scope: str
    ) -> list[BudgetView]:
        """A resource has few: they are of one page."""
        query = (
            f"tenant={quote(tenant, safe='')}&scope_type={scope_type}&scope={quote(scope, safe='')}"
        )
        page = await self._ask("GET", f"/v1/budgets?{query}&limit=1000", BudgetPage)
        return page.budgets

    async def end_budget(self, tenant: str, name: str) -> None:
        path = f"/v1/budgets/{quote(tenant, safe='')}/{quote(name, safe='')}?source=resource"
        await self._ask("DELETE", path, Empty)

    async def heartbeats(self, after: int) -> HeartbeatPage:
        """Held by the ledger until something changed behind `after`, or BEAT_WAIT_S passed."""
        path = f"/v1/heartbeats?after={after}&wait_s={BEAT_WAIT_S:g}"
        return await self._ask("GET", path, HeartbeatPage, timeout_s=BEAT_WAIT_S + ANSWER_TIMEOUT_S)

    async def _ask(
        self,
        method: str,
        path: str,
        shape: type[T],
        *,
        message: msgspec.Struct | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> T:
        try:
            async with self._http.request(
                method,
                self._url + path,
                data=None if message is None else msgspec.msgpack.encode(message),
                headers={"Content-Type": CONTENT_TYPE},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                body = await response.read()
                if not response.ok:
                    raise reported(response.status, body)
                return msgspec.msgpack.decode(body, type=shape)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise UnavailableError(
                f"the ledger at {self._url} did not answer {path} ({type(error).__name__})"
            ) from error


def problem_of(body: bytes) -> Problem:
    """JSON or msgpack. Raises msgspec.DecodeError."""
    decode = msgspec.json.decode if body.startswith(b"{") else msgspec.msgpack.decode
    problem: Problem = decode(body, type=Problem)
    return problem


def reported(status: int, body: bytes) -> GristmillError:
    """The error of a `Problem` body."""
    try:
        problem = problem_of(body)
    except msgspec.DecodeError:
        return UnavailableError(f"status {status} without a problem in it")
    if status >= 500:
        return UnavailableError(problem.message)
    return error_from(problem.code, problem.message)
