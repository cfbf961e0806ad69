"""What each session costs so far, for those who watch heartbeats. Informative: GET /v1/usage is exact.

Kept in memory and brought forward by the events behind the last look, for a session may have millions.
"""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, func, select

from gristmill_contracts.http import Heartbeat
from gristmill_contracts.units import amount_pico
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger import schema
from gristmill_ledger.prices import PriceList, load_prices
from gristmill_ledger.registry import session_books
from gristmill_ledger.usage import decimal_text

LOOK_AGAIN_S: Final = 10.0
"""How old the cost of a session that goes on may be."""
SESSIONS_MAX: Final = 20_000
"""Sessions whose cost is kept in memory."""
_TOKENS: Final = [schema.usage_event.c[name] for name in TOKEN_TYPES]
OVER: Final = frozenset({"Closed", "Failed"})


@dataclass(slots=True, kw_only=True)
class Tally:
    """The cost of a session's events up to the tenant's number `seq`."""

    seq: int = 0
    pico: int = 0
    unpriced: bool = False
    looked_at: float = float("-inf")


@dataclass(slots=True, kw_only=True)
class Costs:
    """Of one ledger process. Calls block: use a reader's thread."""

    default_book: str
    _tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    _prices: dict[str, PriceList] = field(default_factory=dict)
    _price_rows: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fill(self, connection: Connection, heartbeats: Iterable[Heartbeat]) -> None:
        """Set the `cost` of each heartbeat."""
        beats = list(heartbeats)
        if not beats:
            return
        with self._lock:
            self._forget_if_prices_changed(connection)
            books = session_books(connection, {beat.view.uid for beat in beats})
            for beat in beats:
                book = books.get(beat.view.uid, self.default_book)
                beat.cost = self._cost(connection, beat, book)

    def _forget_if_prices_changed(self, connection: Connection) -> None:
        """A new row may begin in the past, and price again what was priced already."""
        rows = connection.execute(select(func.count()).select_from(schema.price)).scalar_one()
        if rows != self._price_rows or len(self._tallies) > SESSIONS_MAX:
            self._tallies.clear()
            self._prices.clear()
            self._price_rows = rows

    def _cost(self, connection: Connection, beat: Heartbeat, book: str) -> str | None:
        if book not in self._prices:
            self._prices[book] = load_prices(connection, book)
        prices = self._prices[book]
        if prices.currency is None:
            return None
        tally = self._tallies.setdefault((beat.tenant, beat.view.uid), Tally())
        age_s = time.monotonic() - tally.looked_at
        if age_s >= LOOK_AGAIN_S or beat.view.state in OVER:
            _bring_forward(connection, tally, beat, prices)
            tally.looked_at = time.monotonic()
        return None if tally.unpriced else f"{decimal_text(tally.pico)} {prices.currency}"


def _bring_forward(
    connection: Connection, tally: Tally, beat: Heartbeat, prices: PriceList
) -> None:
    event = schema.usage_event.c
    behind = (
        select(event.seq, event.kind, event.model, event.op_start_us, *_TOKENS)
        .where(
            event.session == beat.view.uid,
            event.tenant == beat.tenant,
            event.seq > tally.seq,
        )
        .order_by(event.seq)
    )
    for row in connection.execute(behind.execution_options(yield_per=1000)):
        tally.seq = row.seq
        if row.kind != "usage":
            continue
        for name in TOKEN_TYPES:
            tokens = row._mapping[name]
            price = prices.at(row.model, name, row.op_start_us) if tokens else 0
            if price is None:
                tally.unpriced = True
            elif tokens:
                tally.pico += amount_pico(tokens, price)
