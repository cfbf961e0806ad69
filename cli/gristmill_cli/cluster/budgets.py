"""The ledger's budgets, asked for by the command line."""

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from gristmill_cli.cluster.ledger import LedgerAccess
from gristmill_cli.errors import CommandError
from gristmill_cli.local.ledger_client import reported
from gristmill_contracts.budgets import (
    BudgetPage,
    BudgetView,
    Decide,
    PutBudget,
    SuspensePage,
    SuspenseView,
)
from gristmill_contracts.http import CONTENT_TYPE, Empty

T = TypeVar("T")
P = TypeVar("P", BudgetPage, SuspensePage)
TIMEOUT_S: Final = 30
PAGE: Final = "1000"


@dataclass(frozen=True, slots=True)
class BudgetClient:
    """Every call raises the error that the ledger reports, or CommandError where it does not answer."""

    ledger: LedgerAccess

    def budgets(self, *, tenant: str = "", ended: bool = False) -> list[BudgetView]:
        parameters = {"ended": "true" if ended else "false"}
        pages = self._pages("/v1/budgets", BudgetPage, tenant, parameters)
        return [each for page in pages for each in page.budgets]

    def get(self, tenant: str, name: str) -> BudgetView:
        return self._ask("GET", _path("budgets", tenant, name), BudgetView)

    def put(self, tenant: str, name: str, budget: PutBudget) -> BudgetView:
        return self._ask("PUT", _path("budgets", tenant, name), BudgetView, message=budget)

    def end(self, tenant: str, name: str) -> None:
        self._ask("DELETE", _path("budgets", tenant, name), Empty)

    def suspense(self, *, tenant: str = "") -> list[SuspenseView]:
        pages = self._pages("/v1/suspense", SuspensePage, tenant, {})
        return [each for page in pages for each in page.suspense]

    def decide(self, lease: str, tenant: str, name: str, decision: Decide) -> None:
        self._ask("POST", _path("suspense", lease, tenant, name), Empty, message=decision)

    def _pages(
        self, path: str, shape: type[P], tenant: str, parameters: Mapping[str, str]
    ) -> Iterator[P]:
        """One after the other, to the last; tenant "" = of all."""
        asked = {**parameters, "limit": PAGE} | ({"tenant": tenant} if tenant else {})
        after: str | None = ""
        while after is not None:
            behind = {"after": after} if after else {}
            page = self._ask("GET", path, shape, parameters=asked | behind)
            yield page
            after = page.next_after

    def _ask(
        self,
        method: str,
        path: str,
        shape: type[T],
        *,
        message: msgspec.Struct | None = None,
        parameters: dict[str, str] | None = None,
    ) -> T:
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        request = urllib.request.Request(  # noqa: S310 - our ledger
            f"{self.ledger.url}{path}{query}",
            data=None if message is None else msgspec.msgpack.encode(message),
            headers={**self.ledger.headers, "Content-Type": CONTENT_TYPE},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
                return msgspec.msgpack.decode(response.read(), type=shape)
        except urllib.error.HTTPError as error:
            raise reported(error.code, error.read()) from error
        except (OSError, msgspec.DecodeError) as error:
            raise CommandError(
                f"the ledger at {self.ledger.url} does not answer ({error}); see `gristmill status`"
            ) from error


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(urllib.parse.quote(part, safe="") for part in parts)
