"""What the operator asks of the ledger."""

from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from gristmill_contracts import limits
from gristmill_contracts.budgets import BudgetPage, BudgetView, PutBudget, ScopeType
from gristmill_contracts.cluster_http import Directive, UsageGap
from gristmill_contracts.errors import GristmillError, UnavailableError, error_from
from gristmill_contracts.http import (
    CONTENT_TYPE,
    SERVICE_HEADER,
    Empty,
    HeartbeatPage,
    Problem,
    RegisterSession,
    TenantAccount,
)
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.price_book import PriceBook

T = TypeVar("T")
SERVICE: Final = "operator"
ANSWER_TIMEOUT_S: Final = 10.0
BEAT_WAIT_S: Final = 20.0

if BEAT_WAIT_S > limits.HEARTBEAT_WAIT_S_MAX:
    raise AssertionError("the ledger holds a heartbeat poll no longer than it allows")


class LedgerClient:
    """Every call raises UnavailableError while the ledger is away, or the error that it reports."""

    def __init__(self, http: aiohttp.ClientSession, url: str, secret: Callable[[], str]) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._secret = secret

    async def put_tenant(self, tenant: str) -> TenantAccount:
        return await self._ask("PUT", f"/v1/tenants/{_quoted(tenant)}", TenantAccount)

    async def register_session(self, session: RegisterSession) -> None:
        await self._ask("POST", "/v1/sessions", Empty, message=session)

    async def put_price_book(self, book: PriceBook) -> None:
        await self._ask("PUT", f"/v1/price-books/{_quoted(book.name)}", Empty, message=book)

    async def put_directive(self, uid: SessionUid, directive: Directive) -> None:
        """Told to the meter with the answer to its next heartbeat."""
        await self._ask("PUT", f"/v1/sessions/{uid}/directive", Empty, message=directive)

    async def record_gap(self, uid: SessionUid, gap: UsageGap) -> None:
        await self._ask("POST", f"/v1/sessions/{uid}/gaps", Empty, message=gap)

    async def put_budget(self, tenant: str, name: str, budget: PutBudget) -> BudgetView:
        path = f"/v1/budgets/{_quoted(tenant)}/{_quoted(name)}"
        return await self._ask("PUT", path, BudgetView, message=budget)

    async def list_budgets(
        self, tenant: str, scope_type: ScopeType, scope: str
    ) -> list[BudgetView]:
        """A resource has few: they are of one page."""
        query = f"tenant={_quoted(tenant)}&scope_type={scope_type}&scope={_quoted(scope)}"
        page = await self._ask("GET", f"/v1/budgets?{query}&limit=1000", BudgetPage)
        return page.budgets

    async def end_budget(self, tenant: str, name: str) -> None:
        path = f"/v1/budgets/{_quoted(tenant)}/{_quoted(name)}?source=resource"
        await self._ask("DELETE", path, Empty)

    async def heartbeats(self, after: int, wait_s: float) -> HeartbeatPage:
        """Held by the ledger until something changed behind `after`, or `wait_s` passed."""
        path = f"/v1/heartbeats?after={after}&wait_s={wait_s:g}"
        return await self._ask("GET", path, HeartbeatPage, timeout_s=wait_s + ANSWER_TIMEOUT_S)

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
                headers={
                    "Content-Type": CONTENT_TYPE,
                    "Authorization": f"Bearer {self._secret()}",
                    SERVICE_HEADER: SERVICE,
                },
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


def reported(status: int, body: bytes) -> GristmillError:
    """The error of a `Problem` body."""
    try:
        decode = msgspec.json.decode if body.startswith(b"{") else msgspec.msgpack.decode
        problem: Problem = decode(body, type=Problem)
    except msgspec.DecodeError:
        return UnavailableError(f"the ledger answered with status {status}, and no reason")
    if status >= 500:
        return UnavailableError(problem.message)
    return error_from(problem.code, problem.message)


def _quoted(name: str) -> str:
    return quote(name, safe="")
