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
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger import schema
from gristmill_ledger.rates import Rates, load_rates
from gristmill_ledger.rating import counts_of, is_billed
from gristmill_ledger.registry import session_books
from gristmill_ledger.usage import decimal_text
from gristmill_ledger.usage_sources import rate_in_force

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
    _changes: tuple[int, int] = (-1, -1)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fill(self, connection: Connection, heartbeats: Iterable[Heartbeat]) -> None:
        """Set the `cost` of each heartbeat."""
        beats = list(heartbeats)
        if not beats:
            return
        with self._lock:
            self._forget_if_prices_changed(connection)
            rates = load_rates(connection)
            books = session_books(connection, {beat.view.uid for beat in beats})
            for beat in beats:
                book = books.get(beat.view.uid, self.default_book)
                beat.cost = self._cost(beat, rates, book)

    def forget(self) -> None:
        """Usage was rated again: look at all of it anew."""
        with self._lock:
            self._tallies.clear()

    def _forget_if_prices_changed(self, connection: Connection) -> None:
        """What was rated may be rated again; what was not may get a price that begins in the past."""
        prices, runs = (
            connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in (schema.price, schema.rating.rating_run)
        )
        if (prices, runs) != self._changes or len(self._tallies) > SESSIONS_MAX:
            self._tallies.clear()
            self._changes = (prices, runs)

    def _cost(self, beat: Heartbeat, rates: Rates, book: str) -> str | None:
        currency = rates.prices(book).currency
        if currency is None:
            return None
        tally = self._tallies.setdefault((beat.tenant, beat.view.uid), Tally())
        age_s = time.monotonic() - tally.looked_at
        if age_s >= LOOK_AGAIN_S or beat.view.state in OVER:
            _bring_forward(tally, beat, rates, book)
            tally.looked_at = time.monotonic()
        return None if tally.unpriced else f"{decimal_text(tally.pico)} {currency}"


def _bring_forward(tally: Tally, beat: Heartbeat, rates: Rates, book: str) -> None:
    event = schema.usage_event.c
    behind = (
        select(
            event.seq, event.kind, event.model, event.op_start_us, *_TOKENS,
            rate_in_force().label("rate"),
        )
        .where(
            event.session == beat.view.uid,
            event.tenant == beat.tenant,
            event.seq > tally.seq,
        )
        .order_by(event.seq)
    )  # fmt: skip
    for row in rates.connection.execute(behind.execution_options(yield_per=1000)):
        tally.seq = row.seq
        counts = counts_of(row)
        if not is_billed(row.kind) or counts is None:
            continue
        rate = rates.at(book, row.model, row.op_start_us)
        amount = (rate if row.rate is None else rates.known[row.rate]).amount(counts)
        if amount is None:
            tally.unpriced = True
        else:
            tally.pico += amount
