"""Budgets against a model that is a few dicts: any order of leases, usage, loss, change of limit and time."""

import itertools
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gristmill_contracts import limits
from gristmill_contracts.budgets import Denied, Lease
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.usage import Counts
from gristmill_ledger.budgets.settle import settle
from gristmill_ledger.database import Database
from gristmill_testing import budget_store as budgets
from gristmill_testing.ledger import START_US, make_event
from gristmill_testing.ledger_store import stored_rows

LEASE_US = int(limits.BUDGET_LEASE_S * 1e6)
DAY_US = 86_400_000_000
NAMES = ("a-once", "b-day", "c-mine")
TENANTS = itertools.count(1)
"""Each run is of a tenant of its own, for a database takes longer to make."""


class Hold:
    """What the model knows of one lease: per budget its period and rest."""

    def __init__(
        self, session: str, rests: dict[str, int], periods: dict[str, int], until: int
    ) -> None:
        self.session = session
        self.rests = rests
        self.periods = periods
        self.until = until
        self.suspended = False


class Rules(RuleBasedStateMachine):
    """Figures of the model: [posted, late, reserved, suspense] by (budget, start of period)."""

    database: Database

    @initialize()
    def begin(self) -> None:
        self.now = START_US
        self.seq = 0
        self.tenant = f"t{next(TENANTS)}"
        self.sessions = (f"{self.tenant}-1", f"{self.tenant}-2")
        self.names = tuple(f"{self.tenant}/{name}" for name in NAMES)
        self.limits = dict(zip(self.names, (1000, 300, 500), strict=True))
        self.figures: dict[tuple[str, int], list[int]] = {}
        self.open: dict[str, Hold] = {}
        self.ended: dict[str, Hold] = {}
        self.lowered: set[str] = set()
        for uid in self.sessions:
            budgets.session(self.database, uid, tenant=self.tenant)
        for budget in self.names:
            self.put(budget)

    def put(self, budget: str) -> None:
        name = budget.partition("/")[2]
        known: dict[str, Any] = {
            "a-once": {}, "b-day": {"recurrence": "day"},
            "c-mine": {"scope_type": "session", "scope": self.sessions[0]},
        }[name]  # fmt: skip
        budgets.put(
            self.database, self.limits[budget], name, tenant=self.tenant, now_us=self.now,
            below_posted="block", **known,
        )  # fmt: skip

    def start_of(self, budget: str) -> int:
        return self.now - (self.now - START_US) % DAY_US if budget.endswith("b-day") else 0

    def of(self, budget: str, start: int) -> list[int]:
        return self.figures.setdefault((budget, start), [0, 0, 0, 0])

    def left(self, budget: str) -> int:
        return self.limits[budget] - sum(self.of(budget, self.start_of(budget)))

    def budgets_of(self, session: str) -> tuple[str, ...]:
        return self.names if session == self.sessions[0] else self.names[:2]

    @rule(first=st.booleans(), need=st.integers(0, 120), part=st.booleans())
    def reserve(self, first: bool, need: int, part: bool) -> None:
        self.seq += 1
        session = self.sessions[0 if first else 1]
        least = budgets.tokens(min(need, 1)) if part else None
        answer = budgets.answer(
            self.database, self.seq, need, session=SessionUid(session), least=least, now_us=self.now
        )
        wanted = min(need, 1) if part else need
        denying = [each for each in self.budgets_of(session) if wanted > max(0, self.left(each))]
        if denying:
            assert isinstance(answer, Denied), answer
            assert answer.budget == denying[0]
            return
        assert isinstance(answer, Lease), answer
        rests, periods = {}, {}
        for hold in answer.holds:
            left = max(0, self.left(hold.budget))
            assert min(need, left) <= hold.amount <= left
            rests[hold.budget], periods[hold.budget] = hold.amount, hold.period_start_us
            assert hold.period_start_us == self.start_of(hold.budget)
            self.of(hold.budget, hold.period_start_us)[2] += hold.amount
        self.open[answer.id] = Hold(session, rests, periods, self.now + LEASE_US)

    def pick(self, index: int, of: dict[str, Hold]) -> tuple[str, Hold]:
        key = list(of)[index % len(of)]
        return key, of[key]

    def spend(self, lease: str, hold: Hold, cost: int) -> None:
        self.seq += 1
        event = make_event(
            self.seq, session=hold.session, lease=lease, counts=Counts(train=cost),
            op_start_us=self.now, op_end_us=self.now,
        )  # fmt: skip
        self.database.write_now(lambda c: settle(c, self.tenant, [event], self.now, book="default"))

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 99), cost=st.integers(0, 150))
    def settle_some(self, index: int, cost: int) -> None:
        lease, hold = self.pick(index, self.open)
        # An honest meter: never more than every hold has. One that is used up has ended.
        cost = min([cost, *(hold.rests.get(budget, 0) for budget in hold.periods)])
        self.spend(lease, hold, cost)
        for budget in list(hold.rests):
            figures = self.of(budget, hold.periods[budget])
            figures[0] += cost
            figures[3 if hold.suspended else 2] -= cost
            hold.rests[budget] -= cost
            if hold.rests[budget] == 0:
                del hold.rests[budget]
        self.close_if_done(lease, hold)

    def close_if_done(self, lease: str, hold: Hold) -> None:
        if not hold.rests:
            self.ended[lease] = self.open.pop(lease)

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 99), keep=st.integers(0, 60))
    def give_back(self, index: int, keep: int) -> None:
        lease, hold = self.pick(index, self.open)
        names = dict.fromkeys(hold.rests, keep)
        budgets.give_back(self.database, lease, names, session=hold.session, now_us=self.now)
        for budget, rest in list(hold.rests.items()):
            freed = rest - min(rest, keep)
            self.of(budget, hold.periods[budget])[3 if hold.suspended else 2] -= freed
            hold.rests[budget] = rest - freed
        if keep == 0:
            hold.rests.clear()
        self.close_if_done(lease, hold)

    @precondition(lambda self: self.ended)
    @rule(index=st.integers(0, 99), cost=st.integers(1, 9))
    def late(self, index: int, cost: int) -> None:
        lease, hold = self.pick(index, self.ended)
        self.spend(lease, hold, cost)
        for budget, start in hold.periods.items():
            self.of(budget, start)[1] += cost
            self.lowered.add(budget)

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 99))
    def renew(self, index: int) -> None:
        lease, hold = self.pick(index, self.open)
        budgets.renew(self.database, lease, session=hold.session, now_us=self.now)
        # Written only when a part of its time is over.
        if not hold.suspended and hold.until < self.now + LEASE_US - LEASE_US // 8:
            hold.until = self.now + LEASE_US

    @rule(passes=st.sampled_from([1, LEASE_US // 2, LEASE_US, DAY_US // 2]))
    def time(self, passes: int) -> None:
        self.now += passes
        budgets.sweep(self.database, self.now)
        for hold in self.open.values():
            if not hold.suspended and hold.until <= self.now:
                hold.suspended = True
                for budget, rest in hold.rests.items():
                    figures = self.of(budget, hold.periods[budget])
                    figures[2] -= rest
                    figures[3] += rest

    @precondition(lambda self: any(hold.suspended for hold in self.open.values()))
    @rule(index=st.integers(0, 99), kind=st.sampled_from(["void", "post"]))
    def decide(self, index: int, kind: str) -> None:
        suspended = {lease: hold for lease, hold in self.open.items() if hold.suspended}
        lease, hold = self.pick(index, suspended)
        for budget, rest in hold.rests.items():
            budgets.decide(self.database, lease, budget, kind, now_us=self.now)
            figures = self.of(budget, hold.periods[budget])
            figures[3] -= rest
            figures[1] += rest if kind == "post" else 0
        hold.rests.clear()
        self.close_if_done(lease, hold)

    @rule(amount=st.integers(-30, 30))
    def adjust(self, amount: int) -> None:
        self.seq += 1
        event = make_event(
            self.seq, kind="adjustment", session=self.sessions[1], counts=Counts(train=amount), corrects="x",
            reason="r", op_start_us=self.now, op_end_us=self.now,
        )  # fmt: skip
        self.database.write_now(lambda c: settle(c, self.tenant, [event], self.now, book="default"))
        for budget in self.budgets_of(self.sessions[1]):
            self.of(budget, self.start_of(budget))[1] += amount
            self.lowered.add(budget)

    @rule(name=st.sampled_from(NAMES), limit=st.integers(0, 1500))
    def change_limit(self, name: str, limit: int) -> None:
        budget = f"{self.tenant}/{name}"
        if limit < self.limits[budget]:
            self.lowered.add(budget)
        self.limits[budget] = limit
        self.put(budget)

    @invariant()
    def the_database_says_what_the_model_says(self) -> None:
        stored = {
            (row["budget"], row["start_us"]): [
                row["posted"], row["late_posted"], row["reserved"], row["suspense"],
            ]
            for row in stored_rows(self.database, "budget_period")
            if row["budget"] in self.names
        }  # fmt: skip
        assert {key: value for key, value in stored.items() if any(value)} == {
            key: value for key, value in self.figures.items() if any(value)
        }
        for (budget, start), value in stored.items():
            if budget not in self.lowered and start == self.start_of(budget):
                assert sum(value) <= self.limits[budget]


def test_every_order_of_events_agrees_with_the_model(database: Database) -> None:
    class Machine(Rules):
        def __init__(self) -> None:
            super().__init__()
            self.database = database

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
