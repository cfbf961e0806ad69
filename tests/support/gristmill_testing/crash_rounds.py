"""Rounds of kill -9 against a Gristmill whose ledger is on a private PostgreSQL, which is killed too.

After each round the books are audited: every token of every result that came back is billed once, the
chain verifies, and no hard budget holds more than its limit.
"""

import os
import random
import signal
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gristmill_contracts.budgets import TOKENS, BudgetPage, PutBudget
from gristmill_ledger.database import open_engine
from gristmill_testing.chains import broken_chains
from gristmill_testing.instance import RunningGristmill
from gristmill_testing.mixed_run import MixedRun
from gristmill_testing.postgres import PostgresMissingError, stop_postgres

PARTS = ("gateway", "meter", "worker", "ledger", "postgres")
RESTART_S = 30.0
LIMIT = 10**9


@dataclass(slots=True, kw_only=True)
class CrashRounds:
    """`run` a round after another. `landed`: kills that hit while the client waited for results."""

    instance: RunningGristmill
    server_url: str
    """The PostgreSQL server's maintenance database."""
    database_url: str
    run: MixedRun
    rng: random.Random
    rounds: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    landed: Counter[str] = field(default_factory=Counter)
    _usual_s: float = 0.5

    def set_budget(self) -> None:
        """A hard budget in tokens of the tenant, wide enough to stop nothing: its sums are audited."""
        budget = PutBudget(scope_type="tenant", scope="default", unit=TOKENS, limit=LIMIT)
        self._ask("PUT", "/v1/budgets/default/crash", msgspec.msgpack.encode(budget))

    def round(self) -> str:
        """One turn of everything at once, with a kill somewhere in it. Returns the part that died."""
        part = PARTS[self.rounds % len(PARTS)]
        delay_s = self.rng.uniform(0.02, 0.9) * self._usual_s
        with ThreadPoolExecutor(max_workers=1) as pool:
            turn = pool.submit(self._timed_turn)
            time.sleep(delay_s)  # the moment of the kill, not a synchronisation
            landed = not turn.done()
            self._kill(part)
            took_s = turn.result()
        # Only a turn that no kill disturbed tells how long one takes.
        self._usual_s = self._usual_s * 1.05 if landed else took_s
        self.landed[part] += landed
        self.kills[part] += 1
        self.rounds += 1
        return part

    def _timed_turn(self) -> float:
        started = time.monotonic()
        self.run.turn(self.rounds)
        return time.monotonic() - started

    def _kill(self, part: str) -> None:
        if part != "postgres":
            self.instance.kill(part)
            return
        folder = Path(self.server_url.partition("host=")[2])
        pid = int((folder / "data/postmaster.pid").read_text().splitlines()[0])
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + RESTART_S
        while True:
            try:  # Refused as long as a backend of the old server is still there.
                stop_postgres(self.server_url, start=True)
            except PostgresMissingError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    # --- the audit -------------------------------------------------------------------------------

    def audit(self, session: str) -> None:
        """Nothing lost, nothing double, nothing overspent, the chain whole."""
        self.instance.books.expect(session, self.run.bill.as_dict())
        engine = open_engine(self.database_url, busy_timeout_s=30.0, connections=1)
        with engine.connect() as connection:
            assert not broken_chains(connection)
        engine.dispose()
        page = msgspec.msgpack.decode(
            self._ask("GET", "/v1/budgets?tenant=default"), type=BudgetPage
        )
        for budget in page.budgets:
            period = budget.period
            used = period.posted + period.late_posted + period.reserved + period.suspense
            assert used <= budget.limit, f"{budget.id} of {budget.limit}: {period}"

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(
            self.instance.ledger_url + path,
            data=body,
            method=method,
            headers={"Content-Type": "application/msgpack"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: bytes = answer.read()
            return content
