"""64 meters on one hot budget, one of them cut off: nobody ever sees more spoken for than the limit."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from sqlalchemy import select

from gristmill_contracts import limits
from gristmill_contracts.budgets import Denied
from gristmill_contracts.errors import OverloadedError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.usage import Counts
from gristmill_ledger.budgets.settle import settle
from gristmill_ledger.database import Database, open_engine
from gristmill_ledger.schema import budgets as tables
from gristmill_testing import budget_store as budgets
from gristmill_testing.ledger import make_event
from gristmill_testing.ledger_store import NOW_US, post, stored_rows

METERS = 64
ROUNDS = 3
LIMIT = 3000
LATER_US = NOW_US + int(limits.BUDGET_LEASE_S * 1e6)
"""When the lease of the meter that is cut off has run out."""
SPENT_ALONE = 40

_period = tables.budget_period.c
LEFT = select(
    _period.limit_amount
    - _period.posted
    - _period.late_posted
    - _period.reserved
    - _period.suspense
)


class Sampler:
    """Looks at the budgets as fast as it can until `stop`; keeps what it saw at worst."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.stopped = threading.Event()
        self.samples = 0
        self.least_left = LIMIT

    def run(self) -> None:
        while not self.stopped.is_set():
            self.look()

    def look(self) -> None:
        left = self.database.read_now(lambda c: c.execute(LEFT).scalars().all())
        self.samples += 1
        self.least_left = min([self.least_left, *left])


def meter(database: Database, n: int) -> int:
    """Takes, spends a part of it, posts, gives back. Returns what it spent."""
    rng = random.Random(n)
    session, spent = SessionUid(f"m-{n}"), 0
    for round_ in range(ROUNDS):
        need = rng.randint(5, 60)
        try:
            lease = budgets.answer(database, round_, need, session=session, now_us=LATER_US)
        except OverloadedError:
            continue
        if isinstance(lease, Denied):
            continue
        cost = rng.randint(0, need)
        event = make_event(
            n * 100 + round_, session=session, lease=lease.id, counts=Counts(train=cost),
            op_start_us=LATER_US, op_end_us=LATER_US,
        )  # fmt: skip
        database.write_now(partial(settle_one, event=event))
        budgets.give_back(database, lease.id, session=session, now_us=LATER_US)
        spent += cost
    return spent


def settle_one(connection: object, *, event: object) -> None:
    settle(connection, "acme", [event], LATER_US, book="default")  # type: ignore[arg-type,list-item]


def test_64_reservers_and_a_meter_that_is_cut_off_never_pass_the_limit(
    database: Database, another_database: Database, migrated_url: str
) -> None:
    """Each half of the meters through a replica of its own. The one that is cut off spends its lease
    alone, its time runs out meanwhile, and its usage arrives at the end."""
    budgets.put(database, LIMIT)
    budgets.put(database, LIMIT // 2, "half")
    budgets.session(database)
    for n in range(METERS):
        budgets.session(database, f"m-{n}")
    alone = budgets.take(database, 1, 100)
    # Through connections of its own: it must not wait for those of 32 meters.
    looking = Database(
        open_engine(migrated_url, busy_timeout_s=30, connections=1), readers=1, writes_pending_max=1
    )
    sampler = Sampler(looking)
    watching = threading.Thread(target=sampler.run)
    watching.start()
    both = (database, another_database)
    works: list[Callable[[], object]] = [partial(meter, both[n % 2], n) for n in range(METERS)]
    works.insert(METERS // 2, partial(budgets.sweep, database, LATER_US))
    try:
        with ThreadPoolExecutor(METERS) as pool:
            results = list(pool.map(lambda work: work(), works))
        late = [make_event(n, lease=alone.id, counts=Counts(train=SPENT_ALONE)) for n in (1, 2)]
        post(database, late, "s-1")
        budgets.give_back(database, alone.id)
    finally:
        sampler.stopped.set()
        watching.join()
        sampler.look()
        looking.close()
    spent = sum(each for each in results if isinstance(each, int)) + 2 * SPENT_ALONE
    figures = budgets.figures(database, now_us=LATER_US)
    assert figures == (spent, 0, 0, 0)
    assert sampler.samples > 10
    assert 0 <= sampler.least_left <= LIMIT // 2 - spent
    half = [row for row in stored_rows(database, "budget_period") if row["budget"] == "acme/half"]
    assert [row["posted"] for row in half] == [spent]
    assert spent <= LIMIT // 2
